"""The control thread's watch over peers: what they say over their connections, and whether they are still there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from pushkv.core.ways import ASSUMED
from pushkv.runtime import wire
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.life import Life
from pushkv.runtime.pair import Pair
from pushkv.runtime.peering import CLOSED
from pushkv.runtime.side import Side

S = TypeVar("S", bound=Side)
OfPair = wire.Alive | wire.Knock | wire.Bye | wire.Moved | wire.Measured
OfPairs = wire.Relay | OfPair
"""Control messages between two sides that know each other."""
SIGN_OF_LIFE = 1.0
"""Seconds between signs of life over a control connection."""
LONG_AWAY = 1.0
"""Seconds without a tick after which it was this process that was not there, and no peer's silence counts."""


class Watch(Generic[S]):
    """Passes on what peers say to the life that knows them, and tells it of those that are gone or silent."""

    def __init__(
        self,
        lives: Callable[[], list[Life[S]]],
        control: ControlThread,
        silence: float,
        patience: float,
        stats: Counter[str],
        moved: Callable[[Pair], object],
    ) -> None:
        """Without a word for ``silence`` seconds a peer is lost, for ``patience`` where its process is seen to run.

        ``moved`` is called with a pair whose other side goes on with another agent.
        """
        self._lives = lives
        self._control = control
        self._silence = silence
        self._patience = max(silence, patience)
        self._stats = stats
        self._moved = moved
        self._last_sign = 0.0
        self._last_tick = time.monotonic()

    def heard(self, route: Route, message: OfPairs) -> None:
        """Take in what a peer says."""
        if isinstance(message, wire.Relay):
            self._relayed(route, message.frame)
            return
        for life in self._lives():
            pair = life.side.pairs.get(message.token)
            if pair is not None:
                self._of_pair(life, pair, route, message)

    def _relayed(self, route: Route, frame: bytes) -> None:
        """Strangers' frames end here, so that they cannot keep the transfer thread busy."""
        for life in self._lives():
            if life.side.knows(frame):
                life.submit(lambda side: side.frame(frame, route))
                return
        self._stats["foreign frames"] += 1

    def _of_pair(self, life: Life[S], pair: Pair, route: Route, message: OfPair) -> None:
        token = message.token
        if isinstance(message, wire.Alive):
            pair.heard = time.monotonic()
            if pair.lost or token == pair.coming or route != pair.route:
                life.submit(lambda side: side.alive(token, route))
        elif isinstance(message, wire.Knock):
            life.submit(lambda side: None)
        elif isinstance(message, wire.Measured):
            pair.measured = ASSUMED._replace(descriptor=message.descriptor, wire=message.wire)
        elif isinstance(message, wire.Bye):
            life.submit(lambda side: side.peer_gone(token, CLOSED))
        else:
            pair.moved = True
            self._moved(pair)

    def tick(self, now: float) -> None:
        """Look at every peer, and give a sign of life when it is time."""
        away, self._last_tick = now - self._last_tick, now
        for life in self._lives():
            for pair in list(life.side.agents.values()):
                if away > LONG_AWAY:
                    pair.heard += away
                if not pair.lost:
                    self._look(life, pair, now)
        if now - self._last_sign >= SIGN_OF_LIFE:
            self._last_sign = now
            self.give_signs()

    def _look(self, life: Life[S], pair: Pair, now: float) -> None:
        token, silent = pair.token, now - pair.heard
        if pair.watch is not None and pair.watch.dead():
            life.submit(lambda side: side.peer_gone(token, "its process has ended"))
        elif silent > self._silence:
            limit = self._patience if _waits_for_a_processor(pair) else self._silence
            if silent > limit:
                life.submit(lambda side: side.peer_silent(token, f"not a word from it for {limit:g} s"))

    def give_signs(self) -> None:
        """Tell every peer that this side is alive."""
        for life in self._lives():
            for pair in list(life.side.agents.values()):
                self._control.send(pair.route, wire.Alive(pair.token))


def _waits_for_a_processor(pair: Pair) -> bool:
    """Whether a silent peer's process can be seen to be there, with no link in between that could be lost.

    Then it gets no processor, or a thread of it does not give Python's lock away; most likely it will speak again.
    Nothing is posted to it meanwhile, and what is open ends by its deadline. It may also be an endpoint that is gone
    from a process that goes on, or one that hangs for good: so there is a limit to this, too.
    """
    return pair.watch is not None and pair.watch.same_network and pair.watch.running()
