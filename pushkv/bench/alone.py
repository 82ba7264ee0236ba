"""NIXL alone, as other connectors use it: one agent, lists prepared once, transfers by their numbers.

What stands beside PushKV's own times in every measurement. No code of PushKV's runs between a post and its end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv.errors import TransportError
from pushkv.transport.nixl_import import find_nixl

Rows = Sequence[tuple[int, int]]
"""Regions as (address, bytes)."""
Ids = NDArray[np.int32]
WAIT_S = 120.0


class Alone:
    """An agent over UCX that has registered ``regions``. Raises TransportUnavailable where there is no NIXL.

    ``delay_us`` is its progress thread's, ``parameters`` go to UCX as they are.
    """

    def __init__(
        self,
        name: str,
        regions: Rows,
        *,
        delay_us: int = 1000,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        self._nixl: Any = find_nixl().bindings
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread, settings.syncMode = True, self._nixl.NIXL_THREAD_SYNC_RW
        settings.pthrDelay = delay_us
        self.agent = self._nixl.nixlAgent(name, settings)
        self.agent.createBackend("UCX", dict(parameters or {}))
        self.regions = list(regions)
        rows = [(address, length, 0, "") for address, length in self.regions]
        self.agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows), [])

    @property
    def metadata(self) -> tuple[bytes, Rows]:
        """What the other side is told."""
        return self.agent.getLocalMD(), self.regions

    def meet(self, metadata: bytes) -> str:
        """Load the other side's metadata; gives its name."""
        return str(self.agent.loadRemoteMD(metadata).decode())

    def listed(self, regions: Rows, piece: int, *, peer: str = "", order: Sequence[int] | None = None) -> int:
        """Prepare a list of all pieces of all regions, region by region: ours, or those of ``peer``.

        ``order`` are the pieces of a region to list, by default all of them in order.
        """
        blocks = np.arange(regions[0][1] // piece) if order is None else np.asarray(order)
        rows = np.zeros((len(regions), len(blocks), 3), np.uint64)
        starts = np.array([address for address, _ in regions], np.uint64)
        rows[:, :, 0] = starts[:, None] + blocks.astype(np.uint64) * np.uint64(piece)
        rows[:, :, 1] = piece
        made = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, np.ascontiguousarray(rows.reshape(-1, 3)))
        return int(self.agent.prepXferDlist(peer or self._nixl.NIXL_INIT_AGENT, made, []))

    def post(self, verb: str, ours: tuple[int, Ids], theirs: tuple[int, Ids], message: bytes) -> int:
        """Post a ``"READ"`` or ``"WRITE"`` of the pieces with these numbers of two lists; gives its handle."""
        operation = self._nixl.NIXL_READ if verb == "READ" else self._nixl.NIXL_WRITE
        handle = self.agent.makeXferReq(operation, *ours, *theirs, message)
        self.agent.postXferReq(handle, message)
        return int(handle)

    def over(self, handle: int) -> bool:
        """Whether a transfer is over; its handle is then released. Raises TransportError if it failed."""
        status = self.agent.getXferStatus(handle)
        if status == self._nixl.NIXL_IN_PROG:
            return False
        self.agent.releaseXferReq(handle)
        if status != self._nixl.NIXL_SUCCESS:
            raise TransportError(f"NIXL ended a transfer with {status}; see its log.")
        return True

    def notifications(self) -> list[bytes]:
        """What has come in."""
        return [message for messages in self.agent.getNotifs({}, []).values() for message in messages]

    def arrived(self) -> float:
        """Wait for a notification; when it came, by ``time.perf_counter``. Raises TransportError after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while not self.notifications():
            if time.monotonic() > end:
                raise TransportError(f"No notification came in {WAIT_S:.0f} s; the other process may have died.")
            time.sleep(20e-6)
        return time.perf_counter()
