"""Keys, offers and machines for the tests of the protocol, small and the same everywhere."""

from __future__ import annotations

import struct
from typing import TypeVar

from pushkv.core.commands import Command, Post, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Blocks, Complete, Offer, Table, TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.receiving import Order
from pushkv.core.span import Span

PROMPT = b"p" * 32
TOKENS = 8
C = TypeVar("C")


def key(attempt: int = 0, transfer: str = "t", sibling: int = 0) -> TransferKey:
    """A key of the consumer epoch c0."""
    return TransferKey(transfer, "engine", "c0", sibling, attempt)


def blocks(*ids: int) -> Blocks:
    """One cache group's table."""
    return Blocks((Table(0, struct.pack(f"<{len(ids)}i", *ids)),))


def owed(start: int, stop: int, _end: int = TOKENS) -> tuple[Span, ...]:
    """One group of one layer: what is owed are the tokens."""
    return (Span(0, 0, 1, start, stop),) if start < stop else ()


def order(attempt: int = 0, block: int = 0, peers: tuple[str, ...] = ("p0",), transfer: str = "t") -> Order:
    """An order of all tokens into one block, half of them from each of two peers or all from one."""
    size = TOKENS // len(peers)
    shares = {peer: owed(index * size, (index + 1) * size) for index, peer in enumerate(peers)}
    return Order(key(attempt, transfer), blocks(block), PROMPT, TOKENS, 0, TOKENS, shares)


def offer(sequence: int = 1, attempt: int = 0, floor: int = 1, transfer: str = "t", prompt: bytes = PROMPT) -> Offer:
    """An offer of all tokens, as a consumer would send it."""
    nonce = f"{transfer}{sequence}".encode().ljust(16, b".")[:16]
    return Offer(
        key(attempt, transfer), sequence, floor, nonce, prompt, TOKENS, 0, TOKENS, blocks(sequence), 120.0, 10.0
    )


def complete(nonce: bytes, part: int, start: int, stop: int, whole: tuple[int, int] | None = None) -> Complete:
    """A part's notification."""
    return Complete(nonce, 0, "p0", part, owed(start, stop), None if whole is None else owed(*whole))


def producer(limits: Limits | None = None) -> ProducerMachine:
    """A producer that c0 is connected with."""
    machine = ProducerMachine(0, "p0", limits or Limits())
    machine.connected("c0", owed, 0.0)
    return machine


def consumer(limits: Limits | None = None, peers: tuple[str, ...] = ("p0",)) -> ConsumerMachine:
    """A consumer that is connected with these producers."""
    machine = ConsumerMachine(limits or Limits())
    for peer in peers:
        machine.connected(peer, 0.0)
    return machine


def stage(machine: ProducerMachine, ready: int = TOKENS, transfer: str = "t", now: float = 0.0) -> None:
    """Stage the prompt in block 7."""
    machine.stage(transfer, blocks(7), PROMPT, TOKENS, ready, now)


def sent(commands: list[Command], kind: type[C]) -> list[C]:
    """The messages of one kind among commands."""
    return [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, kind)]


def only(commands: list[Command], kind: type[C]) -> list[C]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def posted(commands: list[Command]) -> list[tuple[int, int]]:
    """The token ranges that were posted."""
    return [(post.start, post.stop) for post in only(commands, Post)]
