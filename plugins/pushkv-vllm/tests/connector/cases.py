"""Prompts, parameters and pairs of engines for the tests."""

from __future__ import annotations

from typing import Any

from fake_engine import FakeEngine, Scene, Shape, next_token, until

PROMPT = [5 + number * 7 % 300 for number in range(41)]


def legs(prefill: FakeEngine, transfer: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of both legs of a dispatch."""
    return (
        {"do_remote_decode": True, "transfer_id": transfer},
        {"do_remote_prefill": True, "transfer_id": transfer, **prefill.where, **more},
    )


def continued(prompt: list[int], count: int) -> list[int]:
    """The prompt and what the model says to it."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known


def pair(scene: Scene, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Any:
    """A prefill and a decode engine."""
    return (
        scene.engine(Shape(**{"role": "kv_producer", **(prefill or {})})),
        scene.engine(Shape(**{"role": "kv_consumer", **(decode or {})})),
    )


def counts(engine: FakeEngine) -> dict[str, int]:
    """What the scheduler half has counted."""
    half = engine.scheduler.connector._scheduler
    made: dict[str, int] = {}
    for one in (half._decode, half._prefill):
        made.update(one.counts if one is not None else {})
    return made


def has_open(producer: Any) -> bool:
    """Whether an offer, or a WRITE of one that has ended, is open at this rank."""
    return int(producer.ask(lambda side: str(side.machine.open_transfers))) > 0


class Balance:
    """Whether all blocks are free again that were free at the start."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = engines
        self.free = [engine.free_blocks for engine in engines]

    def settle(self) -> None:
        """Step until they are, and nothing is under way any more."""
        until(lambda: [engine.free_blocks for engine in self.engines] == self.free, *self.engines)
        until(lambda: not any(engine.scheduler.has_requests() for engine in self.engines), *self.engines)
        assert [len(engine.scheduler.connector._scheduler._pins) for engine in self.engines] == [0] * len(self.free)


def serve(prefill: FakeEngine, decode: FakeEngine, prompts: dict[str, list[int]], tokens: int) -> None:
    """These prompts at once, so many tokens each: every token is right, and every block comes back."""
    balance = Balance(prefill, decode)
    for name, prompt in prompts.items():
        one, other = legs(prefill, name)
        prefill.add(f"p-{name}", prompt, one)
        decode.add(f"d-{name}", prompt, other, tokens)
    until(lambda: len(decode.finished) == len(prompts), prefill, decode)
    for name, prompt in prompts.items():
        assert decode.tokens[f"d-{name}"] == continued(prompt, tokens)
    balance.settle()


def serve_eight(prefill: FakeEngine, decode: FakeEngine) -> None:
    """Eight prompts of 21 to 28 tokens at once, 30 tokens each."""
    serve(prefill, decode, {f"r{number}": [number + 3, *PROMPT[: 20 + number]] for number in range(8)}, 30)
