"""Landing at the producer: parts are gathered into staging slots, and WRITTEN from there once each has its credit.

Stands between :class:`pushkv.core.producer.ProducerMachine` and the :class:`Custodian`. A part takes a staging slot,
and says Ready, when its gather is launched; so a landing slot that is granted is filled soon, and one that nobody
grants holds up nothing but its share of the staging slots. From the end of its gather on the source blocks are free
of a part, whatever becomes of its WRITE.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pushkv.core.commands import Gather, PostSlot
from pushkv.core.custodian import Custodian
from pushkv.core.messages import Blocks, Complete, Grant, Ready, Ring
from pushkv.core.outcome import Outcome
from pushkv.core.ring import Packed
from pushkv.core.sending import Serving, Share
from pushkv.core.span import Span
from pushkv.core.states import Pack, PackEvent, Sending, SourceEvent


@dataclass
class Packing(Custodian):
    """The part of the producer's machine that has to do with slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queues: dict[str, dict[int, Serving]] = {}
        """By peer, the offers that something could be gathered for, by their sequences."""

    def gathered(self, write: int, now: float, error: str = "") -> None:
        """A gather has ended; ``error`` says what went wrong with it: then its transfer fails."""
        packed = self._staging.find(write)
        if packed is None or packed.state is not Pack.GATHERING:
            return
        self._staging.move(packed, PackEvent.PACKED)
        serving = self._book.serving_of(write)
        if error and serving is not None:  # which drops this part, as every one that is not posted
            self._fail(serving, Outcome.TRANSPORT_ERROR, f"a part could not be gathered: {error}", now)
        if self._staging.find(write) is packed:
            self._gathered(serving, packed)
        self._settle_stage(packed.transfer)
        self._gather(now)

    def _gathered(self, serving: Serving | None, packed: Packed) -> None:
        if serving is None:
            self._staging.move(packed, PackEvent.DROP)
        elif serving.state is not Sending.MATCHED:
            self._drop(serving, packed)
        elif packed.credit is not None:
            self._post_slot(serving, packed)

    def _on_grant(self, peer: str, grant: Grant) -> None:
        """A landing slot for a part: the first credit counts, and it is used once."""
        serving = self._book.find(peer, grant.sequence)
        packed = None if serving is None else self._unposted_part(serving, grant.part)
        if serving is None or packed is None or packed.credit is not None or serving.state is not Sending.MATCHED:
            self.counts["stray grant"] += 1
            return
        packed.credit = grant.credit
        if packed.state is Pack.GATHERED:
            self._post_slot(serving, packed)

    def _unposted_part(self, serving: Serving, part: int) -> Packed | None:
        parts = (self._staging.find(write) for write in serving.unposted)
        return next((packed for packed in parts if packed is not None and packed.complete.part == part), None)

    def _post_slot(self, serving: Serving, packed: Packed) -> None:
        self._staging.move(packed, PackEvent.POST)
        serving.unposted.discard(packed.write)
        complete = msgspec.structs.replace(packed.complete, credit=packed.credit)
        self._out.put(PostSlot(packed.write, serving.peer, serving.offer.key, packed.slot, complete))

    def _slot_written(self, write: int, reached: bool | None, now: float) -> None:
        """A WRITE from a slot has ended: well, or without reaching the transport, or (``reached``) it has failed."""
        packed = self._staging.find(write)
        if packed is not None and packed.state is Pack.WRITING:
            self._staging.move(packed, PackEvent.STRAND if reached else PackEvent.DONE)
            self._gather(now)

    # From blocks to staging slots

    def _share(
        self, serving: Serving, computed: list[tuple[Span, ...]], whole: tuple[Span, ...] | None, now: float
    ) -> None:
        """Cut what is computed into parts that fit, and gather as many as there are slots."""
        offer, customer = serving.offer, self._book.customers[serving.peer]
        assert customer.cut is not None
        parts = [part for spans in computed for part in customer.cut(spans)]
        last = len(parts) - 1
        serving.shares.extend(Share(part, whole if number == last else None) for number, part in enumerate(parts))
        if serving.shares:
            self._queues.setdefault(serving.peer, {})[offer.sequence] = serving
            self._staging.wait(serving.peer)
            self._gather(now)

    def _gather(self, now: float) -> None:
        """Launch gathers while there are slots: peers take turns, and a peer's offers are served in their order."""
        asking: list[Serving] = []
        while (turn := self._staging.take(lambda peer: self._next_of(peer) is not None)) is not None:
            peer, slot = turn
            if (found := self._next_of(peer)) is None:
                raise AssertionError(f"{peer} has taken a slot for nothing")
            serving, source = found
            self._gather_part(serving, serving.shares.popleft(), source, slot)
            if serving not in asking:
                asking.append(serving)
        for serving in asking:
            self._say_ready(serving, now)
        if self._staging.dry and ("staging",) not in self.timers:  # an earlier life may give slots back
            self.timers.set(("staging",), now + self.limits.ask_proof)

    def _next_of(self, peer: str) -> tuple[Serving, Blocks] | None:
        """The first offer of a peer that something can be gathered for, and from where; a stage queues it again."""
        queue = self._queues.get(peer, {})
        for sequence, serving in list(queue.items()):
            if (source := self._blocks_of(serving)) is not None:
                return serving, source
            del queue[sequence]
        self._queues.pop(peer, None)
        return None

    def _blocks_of(self, serving: Serving) -> Blocks | None:
        """The source blocks of its next part, None where it has none that can be gathered now."""
        stage = self._stages.get(serving.offer.key.transfer)
        if serving.state is not Sending.MATCHED or not serving.shares or stage is None or stage.blocks is None:
            return None
        streaming = self._book.customers[serving.peer].streaming
        return stage.blocks if streaming.there(serving.shares[0].spans, stage.computed) else None

    def _gather_part(self, serving: Serving, share: Share, source: Blocks, slot: int) -> None:
        offer, part, write = serving.offer, serving.parts, self._book.start_write(serving)
        assert isinstance(offer.into, Ring)
        serving.unposted.add(write)
        self._move(serving, SourceEvent.POST)
        complete = Complete(offer.nonce, self.rank, self.epoch, part, share.spans, share.whole)
        self._staging.pack(Packed(write, slot, serving.peer, offer.key.transfer, complete))
        self._out.put(Gather(write, serving.peer, offer.key, source, offer.into, share.spans, offer.stop, slot))

    # Asking for landing slots

    def _say_ready(self, serving: Serving, now: float) -> None:
        sequence = serving.offer.sequence
        self._say(serving.peer, Ready(sequence, serving.parts), serving.ready_tries)
        self.timers.set(("ready", serving.peer, sequence), now + self.limits.resend_wait(serving.ready_tries))

    def _resend_ready(self, peer: str, sequence: int, now: float) -> None:
        """Ask again while a part has no credit: the Ready may be lost, or the Grant, or the ring is dry."""
        serving = self._book.find(peer, sequence)
        if serving is None or serving.state is not Sending.MATCHED:
            return
        packed = (self._staging.find(write) for write in serving.unposted)
        if any(one is not None and one.credit is None for one in packed):
            serving.ready_tries = min(serving.ready_tries + 1, self.limits.most_tries())
            self._say_ready(serving, now)
