"""The producer endpoint: what a prefill engine uses."""

from __future__ import annotations

import time
from collections.abc import Callable

from pushkv.backends.base import Fence
from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command, StageEnded, StageReleased
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.runtime import wire
from pushkv.runtime.address import check_reachable, parse, url
from pushkv.runtime.control import Route
from pushkv.runtime.endpoint import Ending, Endpoint, TransportFactory, pack_blocks
from pushkv.runtime.producing import Producing
from pushkv.runtime.side import Shared
from pushkv.trace import Trace


class Producer(Endpoint[Producing]):
    """Serves a rank's KV: :meth:`stage` what is computed, and it is pushed to whoever has offered blocks for it.

    Raises ConfigError, AddressError, TransportUnavailable and TransportError when it cannot start.
    """

    role = "prefill"

    def __init__(
        self,
        config: EndpointConfig,
        cache: KVCache,
        *,
        transport: TransportFactory | None = None,
        trace: Trace | None = None,
    ) -> None:
        bind = parse(config.bind)
        check_reachable(bind, config.advertise, config.peers)
        self._stages: dict[str, Ending] = {}
        super().__init__(config, cache, transport=transport, trace=trace)
        try:
            host, port = self._control.listen(bind)
            told = parse(config.advertise) if config.advertise else (host, port)
            self.address = url((told[0], told[1] or port))
            """What consumers connect to."""
        except BaseException:
            self._control.close()
            raise
        self._start()

    def _make_side(self, shared: Shared) -> Producing:
        machine = ProducerMachine(shared.config.rank, shared.epoch, shared.config.limits)
        return Producing(shared, machine)

    def stage(
        self,
        transfer: str,
        blocks: object,
        *,
        prompt: bytes,
        prompt_tokens: int,
        ready: int | None = None,
        siblings: int = 1,
        deadline: float | None = None,
        fence: Fence | None = None,
    ) -> Ending:
        """Say that the KV of a prompt's tokens 0 to ``ready`` (by default all) is in ``blocks``.

        Call again with the same ``transfer`` as more is computed. ``prompt`` is :func:`pushkv.prompt_digest` of the
        whole prompt. ``blocks`` are ids from the prompt's start, one list for a cache of one group, else one a group.
        Nothing is read before ``fence`` has passed; by default that is the memory backend's, made now on the
        calling thread. The blocks stay as they are until the returned ending is released.
        Raises GeometryError for block ids out of range.
        """
        packed = pack_blocks(self.cache, blocks)
        ready = prompt_tokens if ready is None else ready
        behind = fence or self.cache.backend.fence(self.cache.arrays[0] if self.cache.arrays else None)
        ending = self._stages.get(transfer)
        if ending is None or ending.outcome is not None:
            ending = self._stages[transfer] = Ending()
        ending.hold()
        machine = self._side.machine

        def action(now: float) -> None:
            machine.stage(transfer, packed, prompt, prompt_tokens, ready, now, siblings, deadline)

        self._submit(lambda: self._side.stage(transfer, behind, action))
        return ending

    def preempt(self, transfer: str) -> Ending | None:
        """Take a stage's blocks back to compute the prompt again later; :meth:`stage` it then with fresh blocks.

        The returned ending is released when no WRITE reads the blocks any more.
        """
        ending = self._stages.get(transfer)
        self._take_back(transfer, lambda: self._side.machine.preempt(transfer))
        return ending

    def unstage(self, transfer: str) -> Ending | None:
        """End a stage (the request was aborted): its open transfers end as cancelled."""
        ending = self._stages.get(transfer)
        self._take_back(transfer, lambda: self._side.machine.unstage(transfer, time.monotonic()))
        return ending

    def _take_back(self, transfer: str, action: Callable[[], None]) -> None:
        def taking() -> None:
            self._side.drop_fenced(transfer)
            action()
            self._side.run_commands()

        self._submit(taking)

    def _emit(self, event: Command) -> None:
        ending = self._stages.get(event.transfer) if isinstance(event, (StageEnded, StageReleased)) else None
        if ending is not None and isinstance(event, StageEnded):
            ending.end(event.outcome, event.detail)
        elif ending is not None and isinstance(event, StageReleased):
            ending.release()
            if ending.outcome is not None:
                self._stages.pop(event.transfer, None)
        super()._emit(event)

    def _wind_up(self) -> None:
        now = time.monotonic()
        for transfer in list(self._stages):
            self._side.machine.unstage(transfer, now, Outcome.REJECTED_CLOSING, "the producer is shutting down")
        self._side.machine.close(now)
        self._side.run_commands()

    def _in_custody(self) -> bool:
        return bool(self._side.in_custody)

    def _control_message(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Introduction) and not self._closing:
            self._transfer.submit(lambda: self._side.introduced(route, message))
