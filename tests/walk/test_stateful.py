"""Random ways through the hostile world of two producer and two consumer ranks, with real time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pushkv.core.outcome import Outcome
from pushkv.core.states import Target
from walk.cluster import BLOCKS, RANKS, TOKENS, Cluster, Flight

TRANSFERS = ("t0", "t1", "t2")
transfers = st.sampled_from(TRANSFERS)
ranks = st.integers(0, RANKS - 1)
picks = st.integers(0, 999)
seats = st.sampled_from([f"{side}{rank}" for side in "pc" for rank in range(RANKS)])


class TwoByTwo(RuleBasedStateMachine):
    """What may happen, each at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Cluster()
        self.attempts = dict.fromkeys(TRANSFERS, 0)

    # Engines

    @rule(transfer=transfers, block=st.integers(0, BLOCKS - 1))
    def offer(self, transfer: str, block: int) -> None:
        if self.world.ask(transfer, self.attempts[transfer], block):
            self.attempts[transfer] += 1

    @rule(transfer=transfers, block=st.integers(0, BLOCKS - 1), ready=st.integers(0, TOKENS))
    def offer_and_stage(self, transfer: str, block: int, ready: int) -> None:
        self.offer(transfer, block)
        self.all_messages_arrive()
        for name in list(self.world.producers) if ready else ():
            self.world.stage(name, transfer, ready)

    @precondition(lambda self: self.world.requests)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        requests = self.world.requests
        self.world.cancel(requests[pick % len(requests)])

    @rule()
    def engine_hears(self) -> None:
        self.world.hear()

    @rule(rank=ranks, transfer=transfers, ready=st.integers(1, TOKENS))
    def stage(self, rank: int, transfer: str, ready: int) -> None:
        self.world.stage(self.world.names[f"p{rank}"], transfer, ready)

    @rule(transfer=transfers)
    def stage_everywhere(self, transfer: str) -> None:
        for name in list(self.world.producers):
            self.world.stage(name, transfer, TOKENS)

    @rule(rank=ranks, transfer=transfers, give_up=st.booleans())
    def preempt(self, rank: int, transfer: str, give_up: bool) -> None:
        call = self.world.unstage if give_up else self.world.preempt
        call(self.world.names[f"p{rank}"], transfer)

    # Network and wire

    @precondition(lambda self: self.world.net)
    @rule(pick=st.lists(picks, min_size=1, max_size=12))
    def messages_arrive(self, pick: list[int]) -> None:
        for index in pick:
            self.world.deliver(index)

    @rule()
    def all_messages_arrive(self) -> None:
        for index in range(len(self.world.net)):
            self.world.deliver(index)

    @precondition(lambda self: self.travelling())
    @rule(pick=picks)
    def bytes_land(self, pick: int) -> None:
        travelling = self.travelling()
        self.world.land(travelling[pick % len(travelling)])

    @precondition(lambda self: self.travelling())
    @rule()
    def all_bytes_land_and_are_told(self) -> None:
        for flight in self.travelling():
            self.world.land(flight)
        for flight in self.untold():
            self.world.tell(flight, error=False)

    @precondition(lambda self: self.untold())
    @rule(pick=picks, end=st.sampled_from(["done", "done", "failed", "never left"]))
    def write_ends(self, pick: int, end: str) -> None:
        flight = self.untold()[pick % len(self.untold())]
        reached = end != "never left" or not flight.air
        self.world.tell(flight, error=end != "done", reached=reached)

    def travelling(self) -> list[Flight]:
        """WRITEs whose bytes may land."""
        return [flight for flight in self.world.flights if flight.air]

    def untold(self) -> list[Flight]:
        """WRITEs whose producer waits for their end."""
        return [flight for flight in self.world.flights if not flight.told]

    # Time, losses and lives

    @rule(seconds=st.sampled_from([0.05, 0.4, 2.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(seconds=st.sampled_from([0.05, 0.4, 2.0]))
    def time_passes_and_timers_go_off(self, seconds: float) -> None:
        self.world.now += seconds
        for seat in self.world.names.values():
            self.world.tick(seat)

    @rule(seat=seats)
    def timers_go_off(self, seat: str) -> None:
        self.world.tick(self.world.names[seat])

    @rule(trouble=st.sampled_from(["none", "none", "lose", "lose", "kill", "notice"]), seat=seats, pick=picks)
    def trouble(self, trouble: str, seat: str, pick: int) -> None:
        name, other = self.world.names[seat], "c" if seat[0] == "p" else "p"
        if trouble == "lose":
            self.world.lose(name, self.world.names[f"{other}{pick % RANKS}"])
        elif trouble == "kill":
            self.world.kill(seat)
        elif trouble == "notice":
            self.notice_a_death(name, pick)

    def notice_a_death(self, name: str, pick: int) -> None:
        """A side is told that it lost a life that has ended, or has proof about it."""
        gone = [peer for peer in self.world._known(name) if not self.world.alive(peer)]
        if gone:
            call = self.world.prove if pick % 2 else self.world.lose
            call(name, gone[pick % len(gone)])

    @rule(producer=ranks, consumer=ranks)
    def connect(self, producer: int, consumer: int) -> None:
        self.world.connect(self.world.names[f"p{producer}"], self.world.names[f"c{consumer}"])

    @rule()
    def connect_all(self) -> None:
        for producer in self.world.producers:
            for consumer in self.world.consumers:
                self.world.connect(producer, consumer)

    # What holds at every moment besides what the world checks

    @invariant()
    def the_engine_is_complete_where_all_ranks_are(self) -> None:
        for request in self.world.requests:
            if request.outcome is Outcome.COMPLETE:
                assert set(request.outcomes.values()) == {Outcome.COMPLETE}

    @invariant()
    def blocks_in_custody_are_counted(self) -> None:
        for name, machine in self.world.consumers.items():
            owned = sum(place[0] == name for place in self.world.owners)
            assert machine.held_blocks() == owned
            assert machine.custody()[Target.ENDED] <= RANKS * owned

    def teardown(self) -> None:
        self.world.settle()


TestTwoByTwo = TwoByTwo.TestCase
TestTwoByTwo.settings = settings(
    max_examples=300,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTwoByTwo = pytest.mark.walk(pytest.mark.timeout(600)(TestTwoByTwo))
