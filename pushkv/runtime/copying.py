"""Gathers and scatters beside the transfer thread, which would be away from its peers while bytes are copied.

Where a device copies by itself they are queued by the transfer thread: two threads of Python hinder each other more
than planning a part takes.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from pushkv.backends.answers import has_passed
from pushkv.backends.base import Fence

log = logging.getLogger(__name__)

Job = Callable[[], Fence]
Told = Callable[[str], object]
"""What is called when a copy has ended, with what went wrong; empty for nothing."""


class Copier(ABC):
    """Runs copies in the order they are given. All but the copying happens on the transfer thread."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Fence | str, Told]] = deque()
        self._fenced: list[tuple[Fence, Told]] = []
        self._open = 0

    @property
    def busy(self) -> bool:
        """Whether a copy has not been told of."""
        return self._open > 0

    def submit(self, job: Job, told: Told, *, quick: bool = False) -> None:
        """Have a copy made, and be told of its end by :meth:`poll`. A ``quick`` one is queued on a device at once."""
        self._open += 1
        if quick and not self.occupied:
            self.run(job, told)
        else:
            self._start(job, told)

    @property
    def occupied(self) -> bool:
        """Whether copies that were submitted before are still to be begun, so that another has to wait."""
        return False

    @abstractmethod
    def _start(self, job: Job, told: Told) -> None:
        """Run the job, now or soon."""

    def run(self, job: Job, told: Told) -> None:
        """Run a job and remember how it ended."""
        try:
            self._ended.append((job(), told))
        except BaseException as error:  # it is the backend's, and may be of somebody's plug-in: the thread goes on
            self._ended.append((str(error) or type(error).__name__, told))

    def poll(self) -> list[Callable[[], object]]:
        """The copies that have ended and not been told of, as calls that tell it."""
        over: list[Callable[[], object]] = []
        while self._ended:
            fence, told = self._ended.popleft()
            if isinstance(fence, str):
                over.append(_telling(told, fence))
            else:
                self._fenced.append((fence, told))
        waiting = []
        for fence, told in self._fenced:
            verdict = _verdict(fence)
            if verdict is None:
                waiting.append((fence, told))
            else:
                over.append(_telling(told, verdict))
        self._fenced = waiting
        self._open -= len(over)
        return over

    def close(self) -> None:  # noqa: B027  # an inline one holds nothing
        """End; what has been given is done first."""


def _telling(told: Told, error: str) -> Callable[[], object]:
    return lambda: told(error)


def _verdict(fence: Fence) -> str | None:
    """What became of the work before a fence: empty if all is well, None while it runs."""
    try:
        return "" if has_passed(fence) else None
    except BaseException as error:
        return str(error) or type(error).__name__


class CopyThread(Copier):
    """Copies on a thread of their own, which is started with the first one."""

    def __init__(self, name: str, prepare: Callable[[], object]) -> None:
        """``prepare`` is called on the thread before anything is copied."""
        super().__init__()
        self._name, self._prepare = name, prepare
        self._jobs: SimpleQueue[tuple[Job, Told] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = self._made = 0

    @property
    def occupied(self) -> bool:
        """Whether the thread has anything to do."""
        return self._made < self._given

    def _start(self, job: Job, told: Told) -> None:
        self._given += 1
        self._jobs.put((job, told))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException:  # the jobs will say so, each for itself
            log.exception("The copy thread could not be prepared.")
        while (given := self._jobs.get()) is not None:
            self.run(*given)
            self._made += 1

    def close(self) -> None:
        """End after what has been given."""
        self._jobs.put(None)
