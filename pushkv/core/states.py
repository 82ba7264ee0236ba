"""The state tables: every state, event and transition of the protocol, outcome and custody apart.

Rules at the top, as data; the machines in :mod:`producer` and :mod:`consumer` move only by :func:`step`.

* *Outcome* is how a transfer ends. The consumer decides it; the producer holds a failure open (``FAILING``)
  until the consumer answers, so that both say the same where a word can still cross.
* *Custody* is who may still touch memory. It ends on proof alone: full coverage, Drained, or the transport's
  evidence. No outcome, error, lease, silence or new epoch is in these tables as a way to ``ENDED``.

``python -m pushkv.core.states`` prints the tables as Mermaid diagrams; the docs hold that output.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar


class Receiving(Enum):
    """The consumer's side of a transfer."""

    OPEN = "open"
    OVER = "over"


class Sending(Enum):
    """The producer's side of a transfer."""

    OFFERED = "offered"
    MATCHED = "matched"
    FAILING = "failing"
    OVER = "over"


class OutcomeEvent(Enum):
    """What moves a transfer towards its outcome."""

    MATCH = "stage meets offer"
    ALL_SENT = "every part has landed"
    ALL_HERE = "covered from every rank"
    FAIL = "fail"
    ANSWER = "the consumer's word"
    END = "end without the other side"


RECEIVING: Mapping[tuple[Receiving, OutcomeEvent], Receiving] = {
    (Receiving.OPEN, OutcomeEvent.ALL_HERE): Receiving.OVER,
    (Receiving.OPEN, OutcomeEvent.FAIL): Receiving.OVER,
}

SENDING: Mapping[tuple[Sending, OutcomeEvent], Sending] = {
    (Sending.OFFERED, OutcomeEvent.MATCH): Sending.MATCHED,
    (Sending.OFFERED, OutcomeEvent.FAIL): Sending.FAILING,
    (Sending.OFFERED, OutcomeEvent.ANSWER): Sending.OVER,
    (Sending.OFFERED, OutcomeEvent.END): Sending.OVER,
    (Sending.MATCHED, OutcomeEvent.ALL_SENT): Sending.OVER,
    (Sending.MATCHED, OutcomeEvent.FAIL): Sending.FAILING,
    (Sending.MATCHED, OutcomeEvent.ANSWER): Sending.OVER,
    (Sending.MATCHED, OutcomeEvent.END): Sending.OVER,
    (Sending.FAILING, OutcomeEvent.ANSWER): Sending.OVER,
    (Sending.FAILING, OutcomeEvent.END): Sending.OVER,
}


class Target(Enum):
    """Custody of a consumer's blocks, for one producer rank they were offered to."""

    QUEUED = "queued"
    OFFERED = "offered"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    ENDED = "ended"


class TargetEvent(Enum):
    """What moves the custody of target blocks."""

    SEND = "offer sent"
    STOP = "transfer over"
    LOSE = "peer lost, or its WRITE stuck"
    COVER = "complete coverage"
    DRAIN = "Drained"
    PROVE = "writes ended"
    REGAIN = "peer back"


TARGET: Mapping[tuple[Target, TargetEvent], Target] = {
    (Target.QUEUED, TargetEvent.SEND): Target.OFFERED,
    (Target.QUEUED, TargetEvent.STOP): Target.ENDED,
    (Target.QUEUED, TargetEvent.LOSE): Target.ENDED,
    (Target.OFFERED, TargetEvent.STOP): Target.DRAINING,
    (Target.OFFERED, TargetEvent.LOSE): Target.QUARANTINED,
    (Target.OFFERED, TargetEvent.COVER): Target.ENDED,
    (Target.OFFERED, TargetEvent.PROVE): Target.ENDED,
    (Target.DRAINING, TargetEvent.LOSE): Target.QUARANTINED,
    (Target.DRAINING, TargetEvent.COVER): Target.ENDED,
    (Target.DRAINING, TargetEvent.DRAIN): Target.ENDED,
    (Target.DRAINING, TargetEvent.PROVE): Target.ENDED,
    (Target.QUARANTINED, TargetEvent.REGAIN): Target.DRAINING,
    (Target.QUARANTINED, TargetEvent.COVER): Target.ENDED,
    (Target.QUARANTINED, TargetEvent.DRAIN): Target.ENDED,
    (Target.QUARANTINED, TargetEvent.PROVE): Target.ENDED,
}


class Source(Enum):
    """Custody of what one transfer reads on the producer's side."""

    IDLE = "idle"
    READING = "reading"
    DRAINING = "draining"
    STUCK = "stuck"
    ENDED = "ended"


class SourceEvent(Enum):
    """What moves the custody of source blocks."""

    POST = "post"
    LAST_DONE = "last WRITE done"
    STOP = "nothing more will be posted"
    STRAND = "a WRITE failed, its bytes may travel"
    PROVE = "writes ended"


SOURCE: Mapping[tuple[Source, SourceEvent], Source] = {
    (Source.IDLE, SourceEvent.POST): Source.READING,
    (Source.IDLE, SourceEvent.STOP): Source.ENDED,
    (Source.READING, SourceEvent.POST): Source.READING,
    (Source.READING, SourceEvent.LAST_DONE): Source.IDLE,
    (Source.READING, SourceEvent.STOP): Source.DRAINING,
    (Source.READING, SourceEvent.STRAND): Source.STUCK,
    (Source.DRAINING, SourceEvent.LAST_DONE): Source.ENDED,
    (Source.DRAINING, SourceEvent.STRAND): Source.STUCK,
    (Source.DRAINING, SourceEvent.PROVE): Source.ENDED,
    (Source.STUCK, SourceEvent.PROVE): Source.ENDED,
}


class Slot(Enum):
    """Custody of one landing slot of a consumer, for one generation of it."""

    FREE = "free"
    GRANTED = "granted"
    WRITTEN = "written"
    SCATTERING = "scattering"
    QUARANTINED = "quarantined"


class SlotEvent(Enum):
    """What moves a landing slot. Every way back to FREE starts another generation."""

    GRANT = "credit granted"
    ARRIVE = "Complete with this credit"
    SCATTER = "scatter launched"
    DROP = "its transfer is over"
    SCATTERED = "scatter's event done"
    LOSE = "its transfer is over, nothing arrived"
    PROVE = "Drained, or writes ended"


SLOT: Mapping[tuple[Slot, SlotEvent], Slot] = {
    (Slot.FREE, SlotEvent.GRANT): Slot.GRANTED,
    (Slot.GRANTED, SlotEvent.ARRIVE): Slot.WRITTEN,
    (Slot.GRANTED, SlotEvent.LOSE): Slot.QUARANTINED,
    (Slot.WRITTEN, SlotEvent.SCATTER): Slot.SCATTERING,
    (Slot.WRITTEN, SlotEvent.DROP): Slot.FREE,
    (Slot.SCATTERING, SlotEvent.SCATTERED): Slot.FREE,
    (Slot.QUARANTINED, SlotEvent.ARRIVE): Slot.WRITTEN,
    (Slot.QUARANTINED, SlotEvent.PROVE): Slot.FREE,
}


class Pack(Enum):
    """Custody of one staging slot of a producer, for one part."""

    FREE = "free"
    GATHERING = "gathering"
    GATHERED = "gathered"
    WRITING = "writing"
    STUCK = "stuck"


class PackEvent(Enum):
    """What moves a staging slot. A gather that runs is never given up: it ends."""

    TAKE = "gather launched"
    PACKED = "gather's event done"
    DROP = "its transfer is over"
    POST = "post, with a credit"
    DONE = "WRITE done, or never reached the transport"
    STRAND = "the WRITE failed, its bytes may travel"
    PROVE = "writes ended"


PACK: Mapping[tuple[Pack, PackEvent], Pack] = {
    (Pack.FREE, PackEvent.TAKE): Pack.GATHERING,
    (Pack.GATHERING, PackEvent.PACKED): Pack.GATHERED,
    (Pack.GATHERED, PackEvent.DROP): Pack.FREE,
    (Pack.GATHERED, PackEvent.POST): Pack.WRITING,
    (Pack.WRITING, PackEvent.DONE): Pack.FREE,
    (Pack.WRITING, PackEvent.STRAND): Pack.STUCK,
    (Pack.WRITING, PackEvent.PROVE): Pack.FREE,
    (Pack.STUCK, PackEvent.PROVE): Pack.FREE,
}

TABLES: Mapping[str, Mapping[Any, Any]] = {
    "Outcome at the consumer": RECEIVING,
    "Outcome at the producer": SENDING,
    "Custody of target blocks (consumer, a producer rank)": TARGET,
    "Custody of source blocks (producer, a transfer)": SOURCE,
    "Custody of a landing slot (consumer)": SLOT,
    "Custody of a staging slot (producer)": PACK,
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class TransitionError(AssertionError):
    """A machine tried a transition that its table does not have: a bug in PushKV, never a peer's doing."""


def step(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after ``event``. Raises TransitionError where the table has no such transition."""
    try:
        return table[state, event]
    except KeyError:
        raise TransitionError(f"{type(state).__name__} has no transition from {state.name} on {event.name}") from None


def diagram(table: Mapping[Any, Any]) -> str:
    """A table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    first = next(iter(table))[0]
    lines.append(f"    [*] --> {first.name}")
    merged: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), after in table.items():
        merged.setdefault((state, after), []).append(str(event.value))
    lines += [f"    {a.name} --> {b.name}: {' / '.join(events)}" for (a, b), events in merged.items()]
    return "\n".join(lines)


def diagrams() -> str:
    """All tables as Markdown with Mermaid diagrams, in the order of :data:`TABLES`."""
    return "\n".join(f"### {title}\n\n```mermaid\n{diagram(table)}\n```\n" for title, table in TABLES.items())


if __name__ == "__main__":
    print(diagrams())
