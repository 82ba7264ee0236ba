"""What the machines ask to be done. A command is an effect as data; the runtime carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pushkv.core.messages import Blocks, Complete, Message, TransferKey
from pushkv.core.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer; ``insist``: over the control connection, as the other way went unanswered."""

    peer: str
    message: Message
    insist: bool = False


@dataclass(frozen=True, slots=True)
class Post:
    """Post one WRITE: tokens ``start`` to ``stop`` from the source blocks to the peer's, with its notification.

    ``end`` is where the offered range ends (window and state groups count from there).
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


Command: TypeAlias = Send | Post | Ended | Released | StageEnded | StageReleased | AskProof
