"""Which timers matter in a machine's state, which it must have set, and the check that it has."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator
from typing import Any

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Serving
from pushkv.core.states import Receiving, Sending, Source, Target
from walk.errors import Violation
from walk.machines import freeze
from walk.slots import check_ring, check_staging

Timer = tuple[Any, ...]


def consumer_needs(machine: ConsumerMachine) -> Iterator[Timer]:
    """The timers without which a consumer's transfer or its memory would hang."""
    for key, transfer in machine._transfers.items():
        if transfer.state is Receiving.OPEN:
            yield ("deadline", key)
        for peer, rank in transfer.ranks.items():
            if rank.custody is Target.DRAINING or (rank.custody is Target.OFFERED and not rank.acked):
                yield ("resend", key, peer)
            if rank.custody is Target.OFFERED:
                yield ("renew", peer)
            if rank.custody is Target.QUARANTINED:
                yield ("proof", peer)
    if machine._ring.dry:
        yield ("ring",)


def consumer_due(machine: ConsumerMachine) -> tuple[Timer, ...]:
    """The timers that may fire in a consumer's state and do something.

    A Renew may come whenever something is open, timer or not: what it says is true then.
    """
    due = set(consumer_needs(machine))
    due |= {("renew", peer) for peer, pairing in machine._pairings.items() if pairing.live and pairing.open}
    return tuple(sorted(due, key=repr))


def producer_needs(machine: ProducerMachine) -> Iterator[Timer]:
    """The timers without which a producer's transfer, stage or memory would hang."""
    for peer, customer in machine._book.customers.items():
        for sequence, serving in customer.live.items():
            if serving.state is not Sending.OVER:
                yield ("deadline", peer, sequence)
            if serving.state is Sending.FAILING:
                yield ("failed", peer, sequence)
            if serving.state in (Sending.OFFERED, Sending.MATCHED) and serving.unsent:
                yield ("lease", peer)
            if serving.state is Sending.MATCHED and _lacks_a_credit(machine, serving):
                yield ("ready", peer, sequence)
            if serving.custody is Source.STUCK or (customer.lost and serving.reads):
                yield ("proof", peer)
    for transfer, stage in machine._stages._stages.items():
        if not stage.over:
            yield ("stage", transfer)
    if machine._staging.dry:
        yield ("staging",)


def _lacks_a_credit(machine: ProducerMachine, serving: Serving) -> bool:
    parts = (machine._staging.find(write) for write in serving.unposted)
    return any(packed is not None and packed.credit is None for packed in parts)


def producer_due(machine: ProducerMachine) -> tuple[Timer, ...]:
    """The timers that may fire in a producer's state and do something."""
    return tuple(sorted(set(producer_needs(machine)), key=repr))


def check_consumer(machine: ConsumerMachine) -> None:
    """Nothing hangs at the consumer, and what is over is offered to no rank any more; raises Violation."""
    if machine.slots.count:
        check_ring(machine)
    for key, transfer in machine._transfers.items():
        for peer, rank in transfer.ranks.items():
            if transfer.state is Receiving.OVER and rank.custody in (Target.QUEUED, Target.OFFERED):
                raise Violation(f"nothing hangs: {key} is over, and {peer} is not told")
    _check(machine, set(consumer_needs(machine)), set(consumer_due(machine)))


def check_producer(machine: ProducerMachine) -> None:
    """Nothing hangs at the producer, and its books agree; raises Violation."""
    if machine.slots.count:
        check_staging(machine)
    served = [serving for customer in machine._book.customers.values() for serving in customer.live.values()]
    assert sorted(map(id, served)) == sorted(map(id, machine._book))
    assert {write for serving in served for write in serving.writes} == set(machine._book._by_write)
    for serving in served:
        if serving.state is Sending.MATCHED and serving.unsent and _stage_is_over(machine, serving):
            raise Violation(f"nothing hangs: {serving.offer.key} waits for more of a stage that is over")
    _check(machine, set(producer_needs(machine)), set(producer_due(machine)))


def _stage_is_over(machine: ProducerMachine, serving: Serving) -> bool:
    stage = machine._stages._stages.get(serving.offer.key.transfer)
    return stage is not None and stage.over


_seen: set[tuple[Any, frozenset[Hashable]]] = set()


def _check(machine: Any, needs: set[Timer], due: set[Timer]) -> None:
    pending = set(machine.timers.pending())
    if missing := needs - pending:
        raise Violation(f"nothing hangs: {sorted(missing, key=repr)[0]} is not set, and nothing else would go on")
    idle = pending - due
    if not idle:
        return
    frozen = freeze(machine)
    if (frozen, frozenset(idle)) in _seen:
        return
    _seen.add((frozen, frozenset(idle)))
    for timer in idle:
        fired = pickle.loads(pickle.dumps(machine))
        fired.timers.cancel(timer)
        fired.fire(timer, 0.0)
        if freeze(fired) != frozen:
            raise AssertionError(f"the walk takes {timer} for idle, and it is not")
