"""The consumer endpoint: what a decode engine uses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command, Ended, Released
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from pushkv.core.template import uncovered
from pushkv.errors import GeometryError, HandshakeError, ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.address import parse_dialled
from pushkv.runtime.consuming import Consuming, Dial
from pushkv.runtime.control import Route
from pushkv.runtime.ending import Ending
from pushkv.runtime.endpoint import Endpoint, TransportFactory, check_request, pack_blocks
from pushkv.runtime.pair import Pair
from pushkv.runtime.side import Shared
from pushkv.trace import Trace


@dataclass(frozen=True)
class Link:
    """A connected prefill engine: all of its ranks that hold KV for this consumer rank."""

    pairs: tuple[Pair, ...]

    @property
    def agents(self) -> tuple[str, ...]:
        """The ranks' agent names."""
        return tuple(pair.agent for pair in self.pairs)

    @property
    def alive(self) -> bool:
        """Whether none of the ranks is lost. After a loss connect again."""
        return not any(pair.lost for pair in self.pairs)


class Transfer(Ending):
    """One offered transfer: wait for its outcome, and for its blocks to be out of custody."""

    def __init__(self, key: TransferKey) -> None:
        super().__init__()
        self.key = key


class Consumer(Endpoint[Consuming]):
    """Receives KV: :meth:`connect` to a prefill engine, then :meth:`offer` blocks while it still computes.

    Raises ConfigError, TransportUnavailable and TransportError when it cannot start.
    """

    role = "decode"

    def __init__(
        self,
        config: EndpointConfig,
        cache: KVCache,
        *,
        transport: TransportFactory | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._transfers: dict[TransferKey, Transfer] = {}
        super().__init__(config, cache, transport=transport, trace=trace)
        self._start()

    def _make_side(self, shared: Shared) -> Consuming:
        return Consuming(shared, ConsumerMachine(shared.config.limits))

    def connect(self, addresses: str | Sequence[str], timeout: float | None = None) -> Link:
        """Connect to the ranks of one prefill engine, ahead of time or again after a loss.

        One round trip a rank connects both sides, and a first WRITE opens the path. Raises AddressError,
        HandshakeRefused with the producer's reason, and HandshakeError where no answer or no WRITE comes in time
        or where the ranks together lack layers or heads.
        """
        urls = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        wait = self.config.connect_timeout if timeout is None else timeout
        deadline = time.monotonic() + wait
        dials = [self._dial(one) for one in urls]
        try:
            pairs = tuple(_finished(dial, deadline, wait) for dial in dials)
        finally:
            for dial in dials:
                self._transfer.submit(partial(self._side.give_up, dial))
        if missing := uncovered([pair.template for pair in pairs]):
            raise HandshakeError(f"the producers at {', '.join(urls)} together do not fit: {'; '.join(missing[:8])}")
        return Link(pairs)

    def _dial(self, address: str) -> Dial:
        dial = Dial(secrets.token_bytes(16), parse_dialled(address), Future())
        self._submit(lambda: self._side.dial(dial))
        return dial

    def offer(
        self,
        transfer: str,
        link: Link,
        blocks: object,
        *,
        prompt: bytes,
        prompt_tokens: int,
        start: int = 0,
        stop: int | None = None,
        first_block: int = 0,
        sibling: int = 0,
        attempt: int = 0,
        deadline: float | None = None,
    ) -> Transfer:
        """Offer blocks for tokens ``start`` to ``stop`` (by default all) of a prompt; returns at once.

        ``transfer`` is the id that both engines were given for this dispatch of the request. ``blocks`` are ids of
        the prompt's blocks from number ``first_block`` on, one list for a cache of one group, else one a group.
        A retry counts ``attempt`` up and takes other blocks, or waits for the first one's release. ``deadline`` in
        seconds from now bounds everything. Raises GeometryError for block ids or tokens out of range, and
        ProtocolError for an attempt that is open already and for an id, digest or deadline that cannot be.
        """
        self._check_open()
        check_request(transfer, prompt, deadline)
        stop = prompt_tokens if stop is None else stop
        if not 0 <= start <= stop <= prompt_tokens:
            raise GeometryError(f"{transfer} asks for tokens {start} to {stop} of {prompt_tokens}; stay inside.")
        into = pack_blocks(self.cache, blocks, first_block)
        key = TransferKey(transfer, self.config.engine, self.epoch, sibling, attempt)
        if key in self._transfers:
            raise ProtocolError(f"{key} is offered already; count attempt up and take other blocks.")
        handle = self._transfers[key] = Transfer(key)
        pairs = link.pairs

        def make() -> Order:
            owed = {pair.agent: pair.template.owed((start, stop)) for pair in pairs}
            return Order(key, into, prompt, prompt_tokens, start, stop, owed, deadline)

        self._submit(lambda: self._side.offer(key, into, make))
        return handle

    def cancel(self, transfer: Transfer, detail: str = "cancelled by the engine") -> None:
        """End a transfer (the request was aborted). Its blocks are free once it is released, not before."""
        self._submit(lambda: self._side.cancel(transfer.key, Outcome.CANCELLED, detail))

    @property
    def held_blocks(self) -> int:
        """How many blocks were in custody (offered, draining or quarantined) when the transfer thread last looked."""
        return self._side.held_blocks

    def _emit(self, event: Command) -> None:
        handle = self._transfers.get(event.key) if isinstance(event, (Ended, Released)) else None
        if handle is not None and isinstance(event, Ended):
            handle.end(event.outcome, event.detail)
        elif handle is not None and isinstance(event, Released):
            handle.release()
            self._transfers.pop(handle.key, None)
        super()._emit(event)

    def _wind_up(self) -> None:
        now = time.monotonic()
        for key in self._side.machine.transfers():
            self._side.machine.cancel(key, now, detail="the consumer is shutting down")
        self._side.run_commands()

    def _end_the_rest(self) -> None:
        for handle in list(self._transfers.values()):
            handle.end(Outcome.CANCELLED, "the consumer is shutting down")
            handle.release()
        self._transfers.clear()

    def _in_custody(self) -> bool:
        return bool(self._side.in_custody)

    def _control_message(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Welcome):
            self._transfer.submit(lambda: self._side.welcomed(message))
        elif isinstance(message, wire.Refusal):
            self._transfer.submit(lambda: self._side.refused(message))


def _finished(dial: Dial, deadline: float, wait: float) -> Pair:
    try:
        return dial.done.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        if dial.pair is None:
            what = "does not answer: is the producer running, is the address right, and do both hold one cluster key"
        else:
            what = "shook hands, but its first WRITE has not arrived: does NIXL have a path between the two"
        raise HandshakeError(f"{dial.route!s} {what}? (waited {wait:g} s)") from None
