"""What the machines ask to be done. A command is an effect as data; the runtime carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pushkv.core.messages import Blocks, Complete, Message, Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer; ``insist``: over the control connection, as the other way went unanswered."""

    peer: str
    message: Message
    insist: bool = False


@dataclass(frozen=True, slots=True)
class Post:
    """Post one WRITE: tokens ``start`` to ``stop`` from the source blocks to the peer's, with its notification.

    ``end`` is where the offered range ends (window and state groups count from there). ``alone``: of one
    group's layers as in the notification's one span, not of all groups and layers.
    """

    write: int
    peer: str
    key: TransferKey
    source: Blocks
    target: Blocks
    start: int
    stop: int
    end: int
    complete: Complete
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """Producer: gather the spans from the source blocks into this staging slot; answered by ``gathered``.

    They are packed one span after the other, each in the ascending order of its bytes in the target blocks.
    """

    write: int
    peer: str
    key: TransferKey
    source: Blocks
    target: Ring
    spans: tuple[Span, ...]
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class PostSlot:
    """Producer: WRITE this staging slot into the landing slot of ``complete.credit``, with that notification."""

    write: int
    peer: str
    key: TransferKey
    slot: int
    complete: Complete


@dataclass(frozen=True, slots=True)
class Scatter:
    """Consumer: scatter the spans from this landing slot into the target blocks; answered by ``scattered``."""

    slot: int
    generation: int
    peer: str
    key: TransferKey
    target: Ring
    spans: tuple[Span, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer has its outcome on this side. Its memory is another matter: see Released."""

    key: TransferKey
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """Consumer: no rank can write into this transfer's blocks any more; they may be reused."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class StageEnded:
    """Producer: nothing more will be read for this transfer id; its outcome over all siblings."""

    transfer: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StageReleased:
    """Producer: no WRITE reads this stage's blocks any more; they may be freed or overwritten."""

    transfer: str


@dataclass(frozen=True, slots=True)
class AskProof:
    """Ask the transport whether WRITEs with this peer have ended; a yes comes back as ``writes_ended``."""

    peer: str


Command: TypeAlias = (
    Send | Post | Gather | PostSlot | Scatter | Ended | Released | StageEnded | StageReleased | AskProof
)
