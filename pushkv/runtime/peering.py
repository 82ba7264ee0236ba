"""Who an endpoint knows on the other side: meeting, losing and regaining peers, and proof that they have ended."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command
from pushkv.core.outcome import Outcome
from pushkv.core.timers import Timers
from pushkv.errors import HandshakeError
from pushkv.runtime import wire
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.copying import Copier, CopyThread
from pushkv.runtime.loop import Work
from pushkv.runtime.pair import Pair
from pushkv.runtime.slots import Slots
from pushkv.runtime.turn import Turn
from pushkv.runtime.vetting import vet_peer
from pushkv.trace import Trace
from pushkv.transport.base import Proof, Transport
from pushkv.transport.host import this_host

log = logging.getLogger(__name__)

CLOSED = "it has closed"
FORMER = 8
"""How many handshakes a WRITE's notification may be behind."""
REMEMBERED = 4096
"""How many epochs that have ended are remembered, so that a late introduction does not bring one back."""


class Machine(Protocol):
    """What the machines of both sides have in common."""

    timers: Timers
    counts: Counter[str]

    @property
    def open_transfers(self) -> int: ...
    def tick(self, now: float) -> None: ...
    def commands(self) -> list[Command]: ...
    def peer_lost(self, peer: str, detail: str, now: float) -> None: ...
    def writes_ended(self, peer: str, now: float) -> None: ...


@dataclass
class Shared:
    """What an endpoint's threads share."""

    config: EndpointConfig
    cache: KVCache
    agent: str
    epoch: str
    make_transport: Callable[[str], Transport]
    control: ControlThread
    turn: Turn
    emit: Callable[[Command], None]
    trace: Trace
    slots: Slots | None = None
    make_copier: Callable[[str, Callable[[], object]], Copier] = CopyThread
    stats: Counter[str] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    """Seconds; a test may have time pass as it likes."""
    fellows: list[str] = field(default_factory=list)
    """The addresses of all ranks of this engine, for peers who know one of them; one list for all lives."""


class Peering(Work):
    """The pairs of one side, by token and by agent. Once open, only the transfer thread calls anything here."""

    def __init__(self, shared: Shared, machine: Machine) -> None:
        self.shared = shared
        self.pairs: dict[bytes, Pair] = {}
        self.agents: dict[str, Pair] = {}
        self.transport: Transport | None = None
        self.grounded = ""
        self.agent_closed = False
        """Whether the agent was closed on purpose: see :meth:`close_for_proof`."""
        self.ended: dict[str, None] = {}
        """Agents whose epoch has ended by proof, the earliest first."""
        self._base_machine = machine

    @abstractmethod
    def run_commands(self) -> bool:
        """Carry out what the machine asks for; whether it asked for anything."""

    @abstractmethod
    def measure(self) -> None:
        """Publish, for other threads, how much is in custody."""

    def meet(self, theirs: wire.Side) -> Pair | None:
        """Load the other side's metadata; the pair that we are with it already. Raises HandshakeError."""
        assert self.transport is not None
        if theirs.agent in self.ended:
            raise HandshakeError(f"{theirs.agent} has ended; connect its successor")
        known = self.agents.get(theirs.agent)
        if known is not None and known.theirs != theirs:
            raise HandshakeError(
                f"{theirs.agent} is connected already, and says something else of itself now: "
                "an agent's name stands for one life, so connect with an endpoint made afresh"
            )
        vet_peer(self.shared.config, self.shared.cache, theirs.host)
        if known is not None and known.broken:
            known.prepared = None
            self.transport.remove_peer(theirs.agent)
        agent = self.transport.add_peer(theirs.metadata, theirs.host)
        if agent != theirs.agent:
            if agent not in self.agents:
                self.transport.remove_peer(agent)
            raise HandshakeError(f"the metadata is agent {agent}'s and the introduction {theirs.agent}'s")
        return known

    def add(self, pair: Pair) -> None:
        """Know a new pair."""
        self.pairs[pair.token] = pair
        self.agents[pair.agent] = pair

    def back(self, pair: Pair) -> None:
        """A handshake has brought a pair back, if it was away."""
        pair.lost = pair.broken = False
        pair.heard = self.shared.clock()
        self.regain(pair, pair.heard)

    def adopt(self, pair: Pair, token: bytes) -> None:
        """Use this token from now on; the last ones stay good for what is on its way."""
        if token != pair.token:
            pair.former, pair.token, pair.coming = (*pair.former, pair.token), token, b""
            for old in pair.former[:-FORMER]:
                self.pairs.pop(old, None)
            pair.former = pair.former[-FORMER:]
            self.pairs[token] = pair

    def heard_from(self, pair: Pair, token: bytes, route: Route | None) -> None:
        """The other side has used this token, over this connection: both are good to answer it with."""
        if token == pair.coming:
            self.adopt(pair, token)
        if isinstance(route, bytes):
            pair.route = route

    def lose(self, pair: Pair, detail: str, now: float) -> None:
        """A peer cannot be reached: its transfers end, its memory waits for proof."""
        if pair.lost:
            return
        pair.lost = True
        self.shared.stats["peers lost"] += 1
        log.log(logging.INFO if detail == CLOSED else logging.WARNING, "Lost %s: %s", pair.agent, detail)
        self._base_machine.peer_lost(pair.agent, detail, now)

    def peer_silent(self, token: bytes, detail: str) -> None:
        """The control thread has found a peer dead or silent."""
        pair = self.pairs.get(token)
        if pair is not None:
            self.lose(pair, detail, self.shared.clock())
            self.run_commands()

    def peer_gone(self, token: bytes, detail: str) -> None:
        """A peer's process has ended, or it has said good-bye: this epoch does not come back."""
        pair = self.pairs.get(token)
        if pair is not None:
            pair.broken = True
            self.peer_silent(token, detail)

    def alive(self, token: bytes, route: Route) -> None:
        """A sign of life that tells more than that: from a lost peer, or of a new token or connection."""
        pair = self.pairs.get(token)
        if pair is None:
            return
        self.heard_from(pair, token, route)
        if pair.lost and pair.broken:
            self.estranged(pair)
        elif pair.lost:
            self.back(pair)
            self.run_commands()

    def estranged(self, pair: Pair) -> None:  # the one who dials sees to it without being told
        """A peer to whom our way is gone is alive, and may not know that it must be met again."""

    @abstractmethod
    def regain(self, pair: Pair, now: float) -> None:
        """Tell the machine that a peer is back."""

    def ask_proof(self, peer: str, now: float) -> None:
        """Tell the machine where no WRITE between us and this peer can touch memory any more."""
        pair = self.agents.get(peer)
        proof = Proof.NONE if pair is None else self._proof(pair)
        if pair is None or proof is Proof.NONE:
            return
        log.info("No WRITE between us and %s can touch memory any more: %s.", peer, proof.value)
        self.shared.stats[f"proof: {proof.value}"] += 1
        pair.broken = True
        self.lose(pair, "its WRITEs have ended", now)
        self._base_machine.writes_ended(peer, now)
        self.forget(pair)
        self.measure()  # slots come back without a word to the engine

    def _proof(self, pair: Pair) -> Proof:
        """By the data mover's evidence; or, once our agent is closed, by what that means.

        Then no queue pair or socket is left that a peer's bytes could come through. What is left is a process of
        this host that may write into our memory by itself (cma, CUDA IPC): that one must have ended.
        """
        if self.transport is not None:
            return self.transport.writes_ended(pair.agent)
        elsewhere = pair.theirs.host is not None and pair.theirs.host.machine != this_host().machine
        ended = pair.watch is not None and pair.watch.dead()
        return Proof.AGENT_REBUILT if self.agent_closed and (elsewhere or ended) else Proof.NONE

    @abstractmethod
    def end_open(self, outcome: Outcome, detail: str) -> None:
        """End what is open, for this reason."""

    def close_for_proof(self) -> None:
        """Close the agent, so that nothing can come through it any more, and take the proof that this is."""
        if self.transport is None:
            return
        log.info("%s is closed for the proof that gives.", self.shared.agent)
        self.transport.close()
        self.transport, self.agent_closed, self.grounded = None, True, "its agent was rebuilt by fence"
        now = self.shared.clock()
        for pair in list(self.agents.values()):
            self.lose(pair, self.grounded, now)
            self.ask_proof(pair.agent, now)
        self.run_commands()
        self.measure()

    def forget(self, pair: Pair) -> None:
        """Drop a pair that is dead and proven harmless."""
        for token in pair.tokens:
            self.pairs.pop(token, None)
        self.agents.pop(pair.agent, None)
        self.ended[pair.agent] = None
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]
        if pair.watch is not None:
            pair.watch.close()
        if self.transport is not None:
            self.transport.remove_peer(pair.agent)
