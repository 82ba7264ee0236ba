"""What the connector's halves tell each other in a step: directives to the workers, reports to the scheduler.

Directives are pickled to other processes, or shared by reference within one: everything here is fresh and immutable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from pushkv_vllm.wake import NOBODY, Doorbell

Tables = tuple[tuple[int, ...], ...]
"""Block ids, one row a cache group of vLLM's."""


@dataclass(frozen=True)
class OfferBlocks:
    """Decode: have tokens ``start`` to ``stop`` of a prompt pushed into these blocks.

    ``tables`` hold the blocks from logical block ``firsts[group]`` on. ``deadline`` is in seconds.
    With ``error`` nothing is offered, and the load fails for that reason. ``load`` is the load's number.
    """

    request: str
    transfer: str
    address: str
    sibling: int
    siblings: int
    attempt: int
    tables: Tables
    firsts: tuple[int, ...]
    start: int
    stop: int
    prompt: bytes
    prompt_tokens: int
    deadline: float
    error: str = ""
    load: int = 0


@dataclass(frozen=True)
class Decline:
    """Decode: tell the prefill engine that nothing of this transfer is wanted."""

    transfer: str
    address: str
    sibling: int
    siblings: int
    attempt: int


@dataclass(frozen=True)
class StagePart:
    """Prefill: after this step the KV of tokens 0 to ``ready`` is in these blocks."""

    transfer: str
    tables: Tables
    ready: int
    prompt: bytes
    prompt_tokens: int


@dataclass(frozen=True)
class Reclaim:
    """Prefill: its blocks are wanted back; answer with this ``round`` when nothing reads them any more."""

    transfer: str
    round: int


@dataclass(frozen=True)
class Unstage:
    """Prefill: end this transfer; ``prompt`` and ``prompt_tokens`` in case it was never staged."""

    transfer: str
    prompt: bytes
    prompt_tokens: int


@dataclass(frozen=True)
class Directives(KVConnectorMetadata):
    """All of a step's directives. ``tokens`` is how many the step computes; ``wake`` whom a worker is to wake,
    and to tell of loads."""

    tokens: int = 0
    wake: Doorbell = NOBODY
    offers: tuple[OfferBlocks, ...] = ()
    cancels: tuple[str, ...] = ()
    declines: tuple[Decline, ...] = ()
    parts: tuple[StagePart, ...] = ()
    reclaims: tuple[Reclaim, ...] = ()
    unstages: tuple[Unstage, ...] = ()

    @property
    def urgent(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.offers or self.cancels or self.declines or self.parts or self.reclaims or self.unstages)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What the workers have seen, counted over ranks.

    ``released``: decode requests whose blocks nobody can write into any more. ``failed``: why loads have failed.
    ``over``: prefill transfers that are over and read no more; ``reclaimed``: (transfer, round) that have let go.
    ``ended``: how prefill transfers ended, one text a transfer. ``open``: loads are under way here, which is no news,
    but vLLM passes on no output that is empty, and the scheduler half may have heard something itself.
    """

    released: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    over: Counter[str] = field(default_factory=Counter)
    reclaimed: Counter[tuple[str, int]] = field(default_factory=Counter)
    ended: dict[str, str] = field(default_factory=dict)
    open: bool = False

    @property
    def news(self) -> bool:
        """Whether anything has happened."""
        return bool(self.released or self.failed or self.over or self.reclaimed or self.ended)

    def __bool__(self) -> bool:
        return self.news or self.open

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        """The reports of two ranks as one."""
        assert isinstance(other, Reports)
        return Reports(
            self.released + other.released,
            {**other.failed, **self.failed},
            self.over + other.over,
            self.reclaimed + other.reclaimed,
            {**other.ended, **self.ended},
            self.open or other.open,
        )
