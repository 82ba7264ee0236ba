"""The control connections on the virtual clock: in order, with losses, and cut at will."""

from __future__ import annotations

import random
from collections.abc import Callable

from pushkv.runtime.address import Address, url
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.wire import Control, pack, unpack
from pushkv.testing.soak.network import Agenda

Deliver = Callable[[Route, Control], None]
"""Takes a message in, with the route to answer it by."""


class Exchange:
    """Carries control messages. An end is an agent; a producer's also has the address that it listens at."""

    def __init__(self, rng: random.Random, clock: Callable[[], float], agenda: Agenda, loss: float) -> None:
        self.loss = loss
        self.cut: set[str] = set()
        """Agents whose connections are cut."""
        self.lost = 0
        self._rng = rng
        self._clock = clock
        self._agenda = agenda
        self._ends: dict[str, Deliver] = {}
        self._listening: dict[str, str] = {}
        self._last: dict[tuple[str, str], float] = {}

    def join(self, agent: str, deliver: Deliver, listens: str = "") -> None:
        """Put an end on, which may listen at an address."""
        self._ends[agent] = deliver
        if listens:
            self._listening[listens] = agent

    def leave(self, agent: str) -> None:
        """Take an end off: what is sent to it from now on is lost."""
        del self._ends[agent]
        self._listening = {at: end for at, end in self._listening.items() if end != agent}

    def send(self, sender: str, route: Route, message: Control) -> None:
        """Carry a message; to whoever is at the end of the route when it arrives."""
        at = self._clock() + self._rng.uniform(0.0005, 0.01)
        lost = self._rng.random() < self.loss
        line = (sender, str(route))
        at = self._last[line] = max(at, self._last.get(line, 0.0))
        if lost or sender in self.cut:
            self.lost += 1
        else:
            back: Route = sender.encode() if isinstance(route, str) else self._address(sender)
            data = pack(message)
            self._agenda.add(at, lambda: self._arrive(sender, route, back, data))

    def _arrive(self, sender: str, route: Route, back: Route, data: bytes) -> None:
        receiver = route.decode() if isinstance(route, bytes) else self._listening.get(route, "")
        deliver = self._ends.get(receiver)
        if deliver is None or receiver in self.cut or sender in self.cut:
            self.lost += 1
            return
        deliver(back, unpack(data))

    def _address(self, agent: str) -> Route:
        return next(at for at, end in self._listening.items() if end == agent)


class Line(ControlThread):
    """One end's control connections, in a control thread's place."""

    def __init__(self, exchange: Exchange, agent: str) -> None:
        self._exchange = exchange
        self._agent = agent
        self.dropped = 0

    def dial(self, address: Address) -> None:
        """Addresses are always reachable."""
        url(address)

    def hang_up(self, route: str) -> None:
        """Nothing is kept open."""

    def send(self, route: Route, message: Control) -> None:
        """Carry a message."""
        self._exchange.send(self._agent, route, message)
