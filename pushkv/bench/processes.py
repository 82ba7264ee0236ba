"""Processes of a benchmark: started afresh, joined by pipes, ended with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from pushkv.demo.environment import belong_to_parent

Pipe: TypeAlias = "Connection[Any, Any]"
ENDING_S = 30.0


def start(context: SpawnContext, target: Callable[..., None], *arguments: Any) -> tuple[Pipe, BaseProcess]:
    """Start ``target(pipe, *arguments)``; gives the other end of its pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def stop(process: BaseProcess) -> None:
    """Wait for a process to end, and end it if it does not."""
    process.join(ENDING_S)
    if process.is_alive():
        process.kill()
        process.join()


def ready(pipes: Sequence[Pipe], seconds: float) -> list[Pipe]:
    """Those of the pipes that have something to say, at once or within so many seconds."""
    return [pipe for pipe in wait(pipes, seconds) if isinstance(pipe, Connection)]


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def engine(pipe: Pipe, name: str, core: int | None) -> Iterator[None]:
    """What an engine's process does: it ends with its parent or its ``pipe``, and tells what goes wrong as a text.

    It and the threads that it starts keep to one core; None for no core of its own.
    """
    belong_to_parent()
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"the {name} engine failed with {type(error).__name__}: {error}")
        raise
