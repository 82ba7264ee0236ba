"""The producer endpoint: what a prefill engine uses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pushkv.backends.base import Fence
from pushkv.cache import KVCache, fence_of
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command, StageEnded, StageReleased
from pushkv.core.messages import Blocks
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.errors import ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.address import check_reachable, parse
from pushkv.runtime.control import Route
from pushkv.runtime.ending import Ending
from pushkv.runtime.endpoint import Endpoint, TransportFactory
from pushkv.runtime.life import Life
from pushkv.runtime.producing import Producing
from pushkv.runtime.rate import Rate
from pushkv.runtime.requests import check_request, layer_counts, pack_blocks, whole
from pushkv.runtime.side import Shared
from pushkv.runtime.slots import pool_of
from pushkv.runtime.staging import Call
from pushkv.trace import Trace

CLOSING = "the producer is shutting down"
REMEMBERED = 4096
"""How many stages that are over are remembered for an engine that does not ask."""


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
        self._grain = cache.geometry.grain
        self._stages: dict[str, Ending] = {}
        self._untold: dict[str, tuple[Ending, Command]] = {}
        """Stages that are over, and the last event of each, until the engine knows."""
        self._introductions = Rate(per_second=10, burst=64)
        super().__init__(config, cache, transport=transport, trace=trace)
        self._listen()

    def _make_side(self, shared: Shared) -> Producing:
        machine = ProducerMachine(shared.config.rank, shared.epoch, shared.config.limits, slots=pool_of(shared.slots))
        return Producing(shared, machine)

    def stage(
        self,
        transfer: str,
        blocks: object,
        *,
        prompt: bytes,
        prompt_tokens: int,
        ready: int | None = None,
        layers: int | Sequence[int] | None = None,
        siblings: int | None = 1,
        deadline: float | None = None,
        fence: Fence | None = None,
    ) -> Ending:
        """Say that the KV of a prompt's tokens 0 to ``ready`` (by default all) is in ``blocks``.

        Call again with the same ``transfer`` as more is computed: what the config's ``stream`` lets go early leaves
        at once where an offer is there. (Blocks that are copied whole wait for all of their tokens, or for the
        prompt's end.) With ``layers``, a number for every cache group or one for each, that is so for as many first
        layers alone, in the cache's order, and for the others up to where the calls before said. ``prompt`` is
        :func:`pushkv.prompt_digest` of the whole prompt. ``blocks`` are ids from the prompt's start, one list for a
        cache of one group, else one a group; None for those of the call before, which costs the engine less.
        ``siblings`` is after how many offers served the stage ends: one for each consumer rank that this rank writes
        to (:func:`pushkv.core.template.writers` tells which those are), times the n of a request with n > 1. A rank
        that writes to none, as another has the same heads and does, need not stage. With None the stage waits for as
        many as the offers say (``Consumer(fellows=...)``). ``deadline`` in seconds from this call is how long the
        stage waits for offers, by default the limits' own from the first call.
        Nothing is read before ``fence`` has passed; by default that is the memory backend's, made now on the
        calling thread. The blocks stay as they are until the returned ending is released.
        A stage that has ended is returned as it is, and nothing more is read for it, as long as its blocks are still
        read or the engine does not know: until it has waited for the ending, or taken the last event about it. After
        that the same id begins another stage.
        Raises GeometryError for block ids out of range, ProtocolError for an id, digest, deadline or number that
        cannot be, BackendError where the memory's backend makes no fence, and EndpointClosed; numbers that contradict
        each other or an earlier call end the stage.
        """
        self._check_open()
        ending = self._stages.get(transfer)
        if ending is None:
            self._check_new()
        if ending is None or type(prompt) is not bytes or ending.asked != (prompt, deadline):
            check_request(transfer, prompt, deadline)
        prompt_tokens = whole(transfer, "prompt_tokens", prompt_tokens)
        ready = prompt_tokens if ready is None else whole(transfer, "ready", ready)
        if ready < prompt_tokens:  # a block that is copied whole has to be complete, unless the prompt ends in it
            ready -= ready % self._grain
        counts = None if layers is None else layer_counts(self.cache, layers, transfer)
        siblings = 0 if siblings is None else whole(transfer, "siblings", siblings, 1)
        ending = ending or self._untold_end(transfer)
        packed = pack_blocks(self.cache, blocks) if blocks is not None else self._blocks_before(transfer, ending)
        behind = fence or fence_of(self.cache)
        if ending is None:
            ending = self._stages[transfer] = Ending()
        if not ending.holds and not ending.hold():  # the first is all that most calls of an engine need
            return ending
        ending.blocks, ending.asked = packed, (prompt, deadline)
        call = Call(transfer, packed, prompt, prompt_tokens, ready, siblings, deadline, behind, ending, counts)
        self._life.submit(lambda side: side.stage(call))
        return ending

    @staticmethod
    def _blocks_before(transfer: str, ending: Ending | None) -> Blocks:
        if ending is None or ending.blocks is None:
            raise ProtocolError(f"{transfer} is staged in the blocks of the call before, and none has named any.")
        return ending.blocks

    def introduce(self, addresses: Sequence[str]) -> None:
        """Tell consumers that connect to this rank where all ranks of the engine are, in the order of ranks."""
        self._shared.fellows[:] = addresses

    def _untold_end(self, transfer: str) -> Ending | None:
        ending, _ = self._untold.get(transfer, (None, None))
        if ending is not None and ending.known:
            self._untold.pop(transfer, None)
            return None
        return ending

    def events(self) -> list[Command]:
        """Take what has happened; an id whose stage is over can be staged anew after that."""
        if not self._events:  # so it is in most steps of an engine
            return []
        taken = super().events()
        for event in taken:
            if isinstance(event, (StageEnded, StageReleased)):
                _, last = self._untold.get(event.transfer, (None, None))
                if last is event:
                    self._untold.pop(event.transfer, None)
        return taken

    def preempt(self, transfer: str) -> Ending | None:
        """Take a stage's blocks back to compute the prompt again later; :meth:`stage` it then with fresh blocks.

        The returned ending is released when no WRITE reads the blocks any more.
        """
        ending = self._stages.get(transfer)
        if ending is not None:
            ending.blocks = None
        self._submit_to_all(lambda side: side.preempt(transfer))
        return ending

    def unstage(self, transfer: str) -> Ending | None:
        """End a stage (the request was aborted): its open transfers end as cancelled."""
        ending = self._stages.get(transfer)
        self._submit_to_all(lambda side: side.unstage(transfer, time.monotonic()))
        return ending

    def _emit(self, event: Command) -> None:
        ending = self._stages.get(event.transfer) if isinstance(event, (StageEnded, StageReleased)) else None
        if ending is not None and isinstance(event, StageEnded):
            ending.end(event.outcome, event.detail)
        elif ending is not None and isinstance(event, StageReleased):
            ending.release()
        if ending is not None and ending.outcome is not None and ending.released:
            assert isinstance(event, (StageEnded, StageReleased))
            self._untold[event.transfer] = ending, event  # first: at every moment it is in one of the two
            self._stages.pop(event.transfer, None)
            if len(self._untold) > REMEMBERED:
                self._untold.pop(next(iter(self._untold)), None)
        super()._emit(event)

    def _wind_up(self, side: Producing) -> None:
        side.end_open(Outcome.REJECTED_CLOSING, CLOSING)

    def _refuse_new(self, side: Producing) -> None:
        side.refuse_new(Outcome.REJECTED_CLOSING, CLOSING)

    def _reconnect(self, old: Life[Producing]) -> None:
        for pair in list(old.side.agents.values()):
            self._control.send(pair.route, wire.Moved(pair.token))

    def _end_the_rest(self) -> None:
        for ending in list(self._stages.values()):
            ending.end(Outcome.REJECTED_CLOSING, CLOSING)
            ending.release()
        self._stages.clear()

    def _control_message(self, route: Route, message: wire.Control) -> None:
        if not isinstance(message, wire.Introduction):
            super()._control_message(route, message)
        elif not self._introductions.allows(route, time.monotonic()):
            self._shared.stats["handshakes over the rate"] += 1
        elif self._closing or self.draining or self._asleep:
            why = CLOSING if self._closing or self.draining else "the producer sleeps"
            self._control.send(route, wire.Refusal(message.token, f"{why}; connect to another"))
        else:
            self._life.submit(lambda side: side.introduced(route, message))
