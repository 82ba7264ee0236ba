"""What one episode of the soak is like, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pushkv.core.limits import Limits
from pushkv.transport.memory import Faults, OnDeath

LAYERS, SIDES, HEADS, CONTENT = 2, 2, 2, 2
SOURCE_TOKENS = 4
"""Tokens a block at the producers."""
MOST_TOKENS = 48
TICK = 0.004
"""Seconds of virtual time between looks."""
SLOT_BYTES, SLOTS = 64, 6
"""Of a landing ring, and of a producer's staging slots: a few tokens each."""
SIGN = 0.25
"""Seconds between signs of life."""


@dataclass(frozen=True)
class Settings:
    """One episode. ``split``: the two producers are the ranks of one engine, each with half of the heads.

    ``watched``: that a process has ended is seen; otherwise only silence and failing calls tell. ``trouble`` is the
    mean time between two things that happen to whole processes or links, in seconds.
    """

    seed: str
    transfers: int
    split: bool
    watched: bool
    on_death: OnDeath
    faults: Faults
    limits: Limits
    target_tokens: int
    blocks: int
    requests: int
    trouble: float
    control_loss: float
    detection: float
    silence: float = 1.5
    landing: bool = False
    """Whether all parts go through slots; otherwise none does."""
    verify: bool = False
    """Whether bytes are verified, and some land as others."""
    layers: bool = False
    """Whether layers are staged apart; otherwise chunks are."""

    @classmethod
    def draw(
        cls, seed: str, transfers: int, landing: bool = False, verify: bool = False, layers: bool = False
    ) -> Settings:
        """The settings of the episode with this seed."""
        rng = random.Random(f"settings {seed}")
        return cls(
            seed=seed,
            transfers=transfers,
            split=rng.random() < 0.5,
            watched=rng.random() < 0.7,
            on_death=rng.choice([OnDeath.CMA, OnDeath.TCP]),
            faults=_faults(rng, verify),
            limits=_limits(rng),
            target_tokens=rng.choice([4, 8]),
            blocks=rng.choice([160, 256]),
            requests=rng.randint(8, 24),
            trouble=rng.uniform(0.3, 1.5),
            control_loss=rng.uniform(0.0, 0.05),
            detection=rng.uniform(0.0, 0.3),
            landing=landing,
            verify=verify,
            layers=layers,
        )


def _faults(rng: random.Random, verify: bool) -> Faults:
    return Faults(
        corrupt=random.Random(f"corrupt {rng.getstate()}").uniform(0.005, 0.05) if verify else 0.0,
        drop=rng.uniform(0.005, 0.08),
        duplicate=rng.uniform(0.01, 0.2),
        reorder=rng.uniform(0.05, 0.5),
        stall=rng.uniform(0.001, 0.01),
        fail=rng.uniform(0.001, 0.01),
        delay=(0.0, rng.uniform(0.01, 0.08)),
        late=rng.uniform(0.1, 1.0),
    )


def _limits(rng: random.Random) -> Limits:
    return Limits(
        deadline=3.0,
        lease=rng.uniform(0.6, 1.5),
        stage_deadline=3.0,
        resend=0.08,
        resend_most=0.4,
        window=rng.choice([6, 16, 64]),
        unmatched=rng.choice([12, 64]),
    )
