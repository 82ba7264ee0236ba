"""Who plays in a fault test: the children, their memory, and a push from one to another."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.blocks import Blocks
from faults.children import Place, move, play, play_two
from runtime.actors import Actor, launch
from runtime.scene import until

HERE = Place()
LARGE = 112
"""Blocks of 1 MiB: more than the kernel's buffers between two processes hold."""
SMALL = 2


@dataclass
class Player:
    """A child and its blocks."""

    child: Actor
    blocks: Blocks

    def ask(self, name: str, *arguments: Any) -> Any:
        return self.child.ask(name, *arguments)

    def stop(self) -> None:
        """Stop the child; none of its threads runs when this returns."""
        self.child.signal(signal.SIGSTOP)
        until(self._stopped, "the stop")

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.child.process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def go_on(self) -> None:
        """Continue it."""
        self.child.signal(signal.SIGCONT)


def _launch(work: Callable[..., None], place: Place, *arguments: Any) -> Actor:
    """Start a child; over LIBFABRIC twice more where it ends as it starts.

    Its tcp provider now and then has a descriptor of its own closed meanwhile (``fi_enable`` says EBADF; seen once in
    hundreds of starts), and the agent does not come up. An operator would start it again, too.
    """
    for _ in range(2 if place.backend == "LIBFABRIC" else 0):
        with contextlib.suppress(EOFError):
            return launch(work, place, *arguments)
    return launch(work, place, *arguments)


@dataclass
class Cast:
    """Starts children; :meth:`end` kills them, stopped or not."""

    players: list[Player] = field(default_factory=list)

    def _add(self, blocks: Blocks, child: Actor) -> Player:
        self.players.append(Player(child, blocks))
        return self.players[-1]

    def producer(self, engine: str, place: Place = HERE, **settings: Any) -> Player:
        blocks = Blocks.make(filled=True)
        return self._add(blocks, _launch(play, place, "producer", engine, blocks, settings))

    def consumer(self, engine: str, place: Place = HERE, **settings: Any) -> Player:
        blocks = Blocks.make(filled=False)
        return self._add(blocks, _launch(play, place, "consumer", engine, blocks, settings))

    def two_producers(self, place: Place = HERE) -> Player:
        blocks = Blocks.make(filled=True)
        return self._add(blocks, launch(play_two, place, blocks))

    def movers(self, place: Place = HERE, other: Place = HERE) -> tuple[Player, Player]:
        """Two data movers that know each other: one that WRITEs, and its target."""
        pair = []
        for agent, where in (("writer", place), ("target", other)):
            blocks = Blocks.make(filled=agent == "writer")
            pair.append(self._add(blocks, _launch(move, where, agent, blocks)))
        writer, target = pair
        writer.ask("meet", *target.ask("introduction"))
        target.ask("meet", *writer.ask("introduction"))
        number = writer.ask("post", 0, 0)
        assert writer.ask("status", number, 10.0) == "done", "the way is open"
        return writer, target

    def end(self) -> None:
        for player in self.players:
            player.child.kill()
            player.child.pipe.close()
            player.blocks.free()


def connect(consumer: Player, producer: Player) -> None:
    consumer.ask("connect", producer.ask("address"))


def push(producer: Player, consumer: Player, name: str, first: int = 130, source: int = 7) -> None:
    """A small push that must come to a good end, as between any two that have nothing to do with a fault."""
    consumer.blocks.paint(first, SMALL)
    consumer.ask("offer", name, first, SMALL)
    producer.ask("stage", name, source, SMALL)
    assert consumer.ask("outcome", name) == "complete", consumer.ask("detail", name)
    assert producer.ask("outcome", name) == "complete", producer.ask("detail", name)
    assert consumer.ask("wait_released", name)
    assert producer.ask("wait_released", name)
    assert consumer.blocks.hold(first, SMALL, source)
    consumer.blocks.paint(first, SMALL)


def offered(producer: Player, count: int) -> None:
    """Wait until the producer has as many open offers and stages."""
    until(lambda: producer.ask("custody") == count, "the offers")


def posted(producer: Player, count: int) -> None:
    """Wait until the producer has handed over as many WRITEs."""
    until(lambda: producer.ask("stats").get("writes", 0) == count, "the WRITE")
