"""What the world asks of a machine's state, and which messages can do nothing in it any more."""

from __future__ import annotations

from typing import Any

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Ack, Cancel, Complete, Drained, Failed, Grant, Offer, Ready, Renew, TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Customer
from pushkv.core.states import Receiving, Sending, Target


def reachable_consumers(machine: ProducerMachine) -> frozenset[str]:
    """The consumer epochs that the producer takes for connected."""
    return frozenset(peer for peer, customer in machine._book.customers.items() if not customer.lost)


def known_consumers(machine: ProducerMachine) -> frozenset[str]:
    """The consumer epochs that the producer remembers."""
    return frozenset(machine._book.customers)


def reachable_producers(machine: ConsumerMachine) -> frozenset[str]:
    """The producer epochs that the consumer takes for connected."""
    return frozenset(peer for peer, pairing in machine._pairings.items() if pairing.live)


def known_producers(machine: ConsumerMachine) -> frozenset[str]:
    """The producer epochs that the consumer remembers."""
    return frozenset(machine._pairings)


def has_stage(machine: ProducerMachine) -> bool:
    """Whether the prompt is staged, or over and still read."""
    return "t" in machine._stages


def held_keys(machine: ConsumerMachine) -> tuple[TransferKey, ...]:
    """The transfers whose blocks are in custody."""
    return tuple(sorted(machine._transfers, key=repr))


def sending_keys(machine: ProducerMachine) -> frozenset[tuple[str, TransferKey]]:
    """The offers of which the producer may post something more, each with its own name."""
    return frozenset(
        (machine.epoch, serving.offer.key)
        for customer in machine._book.customers.values()
        for serving in customer.live.values()
        if serving.state in (Sending.OFFERED, Sending.MATCHED) and serving.unsent
    )


def open_keys(machine: ProducerMachine) -> frozenset[TransferKey]:
    """The offers that have no outcome at the producer yet."""
    return frozenset(
        serving.offer.key
        for customer in machine._book.customers.values()
        for serving in customer.live.values()
        if serving.state is not Sending.OVER
    )


def newest_attempts(machine: ProducerMachine) -> dict[tuple[str, str, str, int], int]:
    """The latest attempt that has been offered and is still served, of every transfer and sibling."""
    newest: dict[tuple[str, str, str, int], int] = {}
    for serving in machine._book:
        key = serving.offer.key
        newest[key.base] = max(key.attempt, newest.get(key.base, 0))
    return newest


def idle_at_producer(machine: ProducerMachine, peer: str, message: Any) -> Any:
    """Whether a message of this consumer can never again do anything but repeat an answer that is of no use.

    True if so; otherwise, where any one of several messages would do, what they have in common.

    * An Offer whose floor is known and that is served, over, or below the floor: it is never taken in again.
    * A Cancel of what is buried: Drained has been sent, and stays in the network. (While the consumer is lost it is
      not sent.) Nor does one below the floor: the consumer has said that it needs no Drained.
    * Of several Cancels of what is over, with different reasons: one will do.
    * A Renew whose floor is known: it moves the lease, which may end at any time anyway.
    * A Grant of a part that has its credit, has been posted, or will not be.
    """
    customer = machine._book.customers.get(peer)
    if customer is None:
        return False
    if isinstance(message, Offer):
        known = message.sequence in customer.live or message.sequence in customer.dead
        return message.sequence < customer.floor or (known and message.floor <= customer.floor)
    if isinstance(message, Cancel):
        return _idle_cancel(customer, peer, message.sequence)
    if isinstance(message, Grant):
        serving = customer.live.get(message.sequence)
        part = None if serving is None else machine._unposted_part(serving, message.part)
        return serving is None or serving.state is not Sending.MATCHED or part is None or part.credit is not None
    return isinstance(message, Renew) and message.floor <= customer.floor


def _idle_cancel(customer: Customer, peer: str, sequence: int) -> Any:
    serving = customer.live.get(sequence)
    if serving is not None:
        return (peer, sequence) if serving.state is Sending.OVER else False
    if sequence in customer.dead:
        return (peer, sequence) if customer.lost else True
    return sequence < customer.floor


def idle_at_consumer(machine: ConsumerMachine, peer: str, message: Any) -> bool:
    """The same at the consumer.

    * An Ack stops the repetition of an offer, which the walk repeats for ever.
    * Drained, and Failed once it is answered (the answer stays in the network): the offer's custody has ended.
    * Complete: its transfer is gone, or is over and has this part, or has no slot for it any more. Before that, it is
      what landed bytes are known by.
    * Ready: so many parts have asked before, or its transfer is over.
    """
    pairing = machine._pairings.get(peer)
    if isinstance(message, Ack):
        return True
    if pairing is None:
        return isinstance(message, Complete) and peer in machine._gone and _idle_complete(machine, peer, message)
    if isinstance(message, Failed) and message.sequence in pairing.open:
        return not message.stuck and machine._transfers[message.key].state is Receiving.OVER
    if isinstance(message, (Drained, Failed)):
        return message.sequence < pairing.next and message.sequence not in pairing.open
    if isinstance(message, Complete):
        return _idle_complete(machine, peer, message)
    if isinstance(message, Ready) and message.sequence < pairing.next:
        key = pairing.open.get(message.sequence)
        transfer = None if key is None else machine._transfers[key]
        over = transfer is None or transfer.state is Receiving.OVER
        return over or (transfer is not None and message.parts <= transfer.ranks[peer].wanted)
    return False


def _idle_complete(machine: ConsumerMachine, peer: str, message: Complete) -> bool:
    key, owner = machine._nonces.get(message.nonce, (None, None))
    if key is None or owner != peer:
        return True
    transfer = machine._transfers[key]
    if transfer.lands:
        return transfer.state is Receiving.OVER and not machine.awaits(peer, message)
    rank = transfer.ranks[peer]
    done = rank.custody is Target.ENDED or message.part in rank.coverage.parts
    return transfer.state is Receiving.OVER and done
