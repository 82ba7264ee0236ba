"""What is in a consumer's custody, for whoever asks: the base of :class:`pushkv.core.consumer.ConsumerMachine`."""

from __future__ import annotations

from collections import Counter

from pushkv.core.messages import TransferKey
from pushkv.core.receiving import Held, Transfer
from pushkv.core.states import Receiving, Target


class Keeping:
    """The transfers that are open or in custody, and the blocks that they hold."""

    def __post_init__(self) -> None:
        self._transfers: dict[TransferKey, Transfer] = {}
        self._held = Held()

    def holds(self, key: TransferKey) -> bool:
        """Whether the transfer's blocks are in custody."""
        return key in self._transfers and not self._transfers[key].released

    def knows(self, key: TransferKey) -> bool:
        """Whether the transfer is one of :meth:`transfers`."""
        return key in self._transfers

    def transfers(self) -> list[TransferKey]:
        """The transfers whose blocks, or the landing slots granted for them, are in custody."""
        return list(self._transfers)

    @property
    def quarantined(self) -> int:
        """How many transfers wait for nothing but proof."""
        done = (Target.ENDED, Target.QUARANTINED)
        return sum(all(rank.custody in done for rank in one.ranks.values()) for one in self._transfers.values())

    def custody(self) -> Counter[Target]:
        """How many offers are in which custody."""
        return Counter(rank.custody for transfer in self._transfers.values() for rank in transfer.ranks.values())

    def held_blocks(self, state: Target | None = None) -> int:
        """How many blocks are in custody over all groups; with ``state``, those of transfers with a rank in it."""
        if state is None:
            return len(self._held)
        return sum(
            sum(map(len, transfer.blocks))
            for transfer in self._transfers.values()
            if any(rank.custody is state for rank in transfer.ranks.values())
        )

    @property
    def open_transfers(self) -> int:
        """How many transfers have no outcome yet."""
        return sum(transfer.state is Receiving.OPEN for transfer in self._transfers.values())
