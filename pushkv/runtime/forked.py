"""What belongs to one process: a child that was forked has its objects, and none of its threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from os import getpid
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from pushkv.errors import ForkedProcess

T = TypeVar("T", bound="OfOneProcess")
C = TypeVar("C", bound="ClosedOnLeaving")


def _guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def in_its_process(self: OfOneProcess, *args: Any, **kwargs: Any) -> Any:
        if getpid() != self._process:  # as _forked says, which would be a call more for each of an engine's
            raise ForkedProcess(
                f"{type(self).__name__}.{call.__name__} is called in process {getpid()}, and process "
                f"{self._process} made it: a forked child has none of its threads; make another here, or spawn"
            )
        return call(self, *args, **kwargs)

    return in_its_process


class OfOneProcess:
    """Base of what works with threads of the process that made it.

    In another process every public method and property of its subclasses raises ForkedProcess, before it touches
    anything: sockets and descriptors are shared with the parent, and whoever waits for its threads waits for ever.
    """

    _process: int

    def __new__(cls: type[T], *_: Any, **__: Any) -> T:
        made = super().__new__(cls)
        made._process = getpid()
        return made

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, member in list(vars(cls).items()):
            if name.startswith("_"):
                continue
            if isinstance(member, property) and member.fget is not None:
                setattr(cls, name, member.getter(_guarded(member.fget)))
            elif isinstance(member, FunctionType):
                setattr(cls, name, _guarded(member))

    @property
    def _forked(self) -> bool:
        """Whether this is another process than the one that made it."""
        return getpid() != self._process


class ClosedOnLeaving(OfOneProcess):
    """What a ``with`` block closes, in the process that made it. Leaving the block in another does nothing."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Close it; whether all of it ended in time."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._forked:
            self.close()
