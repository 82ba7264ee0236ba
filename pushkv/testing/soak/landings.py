"""Every WRITE of the soak as it is posted and lands: whose blocks it reads, and whose it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pushkv.core.commands import Ended
from pushkv.core.messages import Complete, TransferKey, decode
from pushkv.core.outcome import Outcome
from pushkv.core.states import Pack
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.soak.lives import ConsumerLife, ProducerLife
from pushkv.testing.soak.stagings import Lot
from pushkv.transport.memory_bytes import U64, Copy, Write

if TYPE_CHECKING:
    from pushkv.testing.soak.episode import Episode


@dataclass(frozen=True)
class Flight:
    """A WRITE: for which transfer, out of which lot, into whose blocks."""

    key: TransferKey
    lot: Lot
    source: ProducerLife
    target: ConsumerLife


@dataclass(frozen=True)
class SlotFlight:
    """A WRITE from a staging slot to a landing slot."""

    key: TransferKey
    complete: Complete
    source: ProducerLife
    target: ConsumerLife


class Landings:
    """Watches the network for an episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._flights: dict[int, Flight] = {}
        self._slots: dict[int, SlotFlight] = {}
        self.failures: set[tuple[str, str]] = set()
        """The pairs of lives (producer, consumer) between which a WRITE has failed."""
        self.spoilt_keys: set[TransferKey] = set()
        """The transfers that a byte of has come, or will come, as another."""
        self.late_bytes = 0
        """Bytes that landed although their transfer was over, in blocks that were kept for that."""

    def posted(self, write: Write, source: U64, length: U64) -> None:
        """Only blocks of one lot, of the transfer's stage, may be read. Raises Broken."""
        message = decode(write.notification)
        if not isinstance(message, Complete):
            return
        producer = self._episode.life_of(write.source.agent)
        consumer = self._episode.life_of(write.target.agent)
        assert isinstance(producer, ProducerLife)
        if consumer is None:
            return
        assert isinstance(consumer, ConsumerLife)
        key = consumer.keys[message.nonce]
        if self._episode.settings.landing:
            self._slots[write.number] = SlotFlight(key, message, producer, consumer)
            self._check_slots(self._slots[write.number])
            return
        lot = self._lot(producer, key, source, length)
        if lot is not None:
            self._flights[write.number] = Flight(key, lot, producer, consumer)

    def _lot(self, life: ProducerLife, key: TransferKey, source: U64, length: U64) -> Lot | None:
        lots: list[object | None] = []
        for block in _blocks(life, source, length):
            owner = life.ledger.owner[block]
            if not lots or lots[-1] is not owner:
                lots.append(owner)
        if not lots:
            return None
        lot = lots[0]
        if len(lots) > 1 or not isinstance(lot, Lot) or lot.staging.request.name != key.transfer:
            raise Broken(Rule.SOURCE, f"a WRITE is posted for {key} from blocks of {life.name} that are not its own")
        return lot

    def landing(self, copy: Copy) -> None:
        """Source and target must still be the transfer's. Raises Broken."""
        if (passing := self._slots.get(copy.write.number)) is not None:
            self._check_slots(passing, held=copy.held is not None)
            if self._episode.transfers[passing.key].outcome is not None:
                self.late_bytes += copy.bytes
            return
        flight = self._flights.get(copy.write.number)
        if flight is None or not copy.bytes:
            return
        if copy.held is None and flight.source.alive and flight.lot.released:
            raise Broken(Rule.SOURCE, f"a WRITE for {flight.key} reads a lot that {flight.source.name} has released")
        ledger = flight.target.ledger
        transfer = self._episode.transfers[flight.key]
        for block in _blocks(flight.target, copy.target, copy.length):
            if ledger.owner[block] is not transfer:
                raise Broken(Rule.TARGET, f"a WRITE for {flight.key} lands in block {block} of {ledger.name}")
        if transfer.outcome is not None:
            self.late_bytes += copy.bytes

    def _check_slots(self, flight: SlotFlight, held: bool = False) -> None:
        """The staging slot must still hold the part, and the landing slot be the credit's. Raises Broken."""
        complete, credit = flight.complete, flight.complete.credit
        staged = flight.source.machine._staging._packed.values()
        mine = [one for one in staged if one.complete.nonce == complete.nonce and one.complete.part == complete.part]
        if flight.source.alive and not held and [one.state for one in mine] not in ([Pack.WRITING], [Pack.STUCK]):
            raise Broken(
                Rule.SOURCE, f"a WRITE for {flight.key} reads a staging slot that {flight.source.name} reuses"
            )
        berth = None if credit is None else flight.target.machine._ring._berths.get(credit.slot)
        if credit is None or berth is None or berth.generation != credit.generation or berth.key != flight.key:
            raise Broken(
                Rule.TARGET, f"a WRITE for {flight.key} lands in {credit} of {flight.target.name}, now {berth}"
            )

    def spoilt(self, write: int) -> None:
        """Remember whose WRITE lands as another: its bytes may differ, and none but its."""
        flight = self._flights.get(write) or self._slots.get(write)
        if flight is not None:
            self.spoilt_keys.add(flight.key)

    def check_blame(self, event: Ended) -> None:
        """A transfer fails for what its bytes are only where some came as others. Raises Broken."""
        differ = event.outcome is Outcome.TRANSPORT_ERROR and "the digest of what has arrived" in event.detail
        if differ and event.key not in self.spoilt_keys:
            raise Broken(Rule.BYTES, f"{event.key} fails, and its bytes came as they were: {event.detail}")

    def failed(self, write: int) -> None:
        """Remember that a WRITE has failed: its blocks may wait for proof."""
        flight = self._flights.get(write) or self._slots.get(write)
        if flight is not None:
            self.failures.add((flight.source.agent, flight.target.agent))

    def forget(self) -> None:
        """Nothing is under way any more."""
        self._flights.clear()
        self._slots.clear()


def _blocks(life: ProducerLife | ConsumerLife, address: U64, length: U64) -> list[int]:
    pieces = zip(address.tolist(), length.tolist(), strict=True)
    return [block for at, size in pieces if size for block in life.blocks_at(at, size)]
