"""How a transfer can end: one closed set of reasons, the same words on both sides."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Outcome(Enum):
    """The one terminal outcome of a transfer, from best to worst.

    An outcome says how a transfer ended. It says nothing about who may still touch its memory:
    that is custody (:mod:`pushkv.core.states`).
    """

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    PEER_LOST = "peer lost"
    TRANSPORT_ERROR = "transport error"
    REJECTED_BUSY = "rejected: busy"
    REJECTED_CLOSING = "rejected: closing"
    REJECTED_VERSION = "rejected: version"
    REJECTED_TOKENS = "rejected: tokens"
    REJECTED_GEOMETRY = "rejected: geometry"
    REJECTED_PROMPT = "rejected: prompt"

    @property
    def rejected(self) -> bool:
        """Whether the other side refused the transfer for what it is."""
        return self.value.startswith("rejected")


_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of an engine over its ranks: the worst wins. Raises ValueError for none at all."""
    return max(outcomes, key=_RANK.__getitem__)
