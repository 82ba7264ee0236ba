"""The producer's stages on its transfer thread: calls of the engine behind their fences, and how they end."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

import msgspec

from pushkv.backends.answers import has_passed
from pushkv.backends.base import Fence
from pushkv.core.commands import Command, StageEnded, StageReleased
from pushkv.core.messages import Blocks
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.errors import PushKVError
from pushkv.runtime.ending import Ending
from pushkv.runtime.side import Shared, Side

log = logging.getLogger(__name__)

_WAITS, _PASSED = "waits", "passed"


class Call(msgspec.Struct, frozen=True, eq=False):
    """One call of the engine's to stage a prompt, on its way to the machine; made on the engine's thread, at once."""

    transfer: str
    blocks: Blocks
    prompt: bytes
    prompt_tokens: int
    ready: int
    siblings: int
    deadline: float | None
    fence: Fence
    ending: Ending
    layers: tuple[int, ...] | None = None


class Staging(Side):
    """The part of the producer's side that has to do with stages."""

    def __init__(self, shared: Shared, machine: ProducerMachine) -> None:
        super().__init__(shared, machine)
        self.machine = machine
        self._fenced: deque[Call] = deque()
        self._open: set[str] = set()
        """Stages that the machine has and that have no outcome yet."""
        self._holding: dict[str, Ending] = {}
        """The endings of stages whose blocks the machine holds."""

    def end_all(self, now: float, outcome: Outcome, detail: str) -> None:
        """End every stage, and refuse every offer from now on."""
        for transfer in sorted({*self._open, *(call.transfer for call in self._fenced)}):
            self.unstage(transfer, now, outcome, detail)
        self.machine.close(now, outcome, detail)
        self.run_commands()

    def refuse_new(self, outcome: Outcome, detail: str) -> None:
        """Refuse offers from now on; offers and stages that have not met end, what has met goes on."""
        self.machine.close(self.shared.clock(), outcome, detail)
        self.run_commands()
        self.measure()

    def stage(self, call: Call) -> None:
        """Stage once the fence has passed; calls for one prompt keep their order."""
        self._fenced.append(call)
        self.pass_fences(self.shared.clock())

    def preempt(self, transfer: str) -> None:
        """Take a stage's blocks back, also those of calls whose fence has not passed."""
        dropped = self._drop_fenced(transfer)
        self.machine.preempt(transfer)
        self.run_commands()
        if dropped and transfer not in self._holding:
            self._pending.append(StageReleased(transfer))
        self.run_commands()

    def unstage(
        self,
        transfer: str,
        now: float,
        outcome: Outcome = Outcome.CANCELLED,
        detail: str = "cancelled by the producer's engine",
    ) -> None:
        """End a stage, also calls for it whose fence has not passed."""
        dropped = self._drop_fenced(transfer)
        self.machine.unstage(transfer, now, outcome, detail)
        self.run_commands()
        if dropped:
            self._never_staged(dropped[-1], outcome, detail)

    def _drop_fenced(self, transfer: str) -> list[Call]:
        """Forget the calls whose fence has not passed; those of the stage that has not ended are returned."""
        dropped = [call for call in self._fenced if call.transfer == transfer]
        if dropped:
            self._fenced = deque(call for call in self._fenced if call.transfer != transfer)
        for call in dropped:
            if call.ending.outcome is not None:
                self._let_go(call)
        return [call for call in dropped if call.ending.outcome is None]

    def pass_fences(self, now: float) -> bool:
        """Take in the calls that have passed their fence and all before them for the same prompt; others do not wait.

        Each is taken off the queue for its turn alone, so that none is lost should the thread get stuck in one.
        """
        behind: set[str] = set()
        passed = False
        for _ in range(len(self._fenced)):
            call = self._fenced.popleft()
            verdict = _WAITS if call.transfer in behind else _verdict(call.fence)
            if verdict == _WAITS:
                behind.add(call.transfer)
                self._fenced.append(call)
            else:
                passed = self.each([verdict], partial(self._through, call, now))
        return passed

    def _through(self, call: Call, now: float, verdict: str) -> None:
        if call.ending.outcome is not None:  # ended meanwhile: nothing is read from these blocks
            self._let_go(call)
        elif verdict == _PASSED:
            self._take_in(call, now)
        else:
            self._announce(call, now)
            self._refuse(call, Outcome.TRANSPORT_ERROR, verdict, now)

    def _take_in(self, call: Call, now: float) -> None:
        if self.transport is None:
            self._refuse(call, Outcome.TRANSPORT_ERROR, self.grounded, now)
            return
        try:
            self.machine.stage(
                call.transfer, call.blocks, call.prompt, call.prompt_tokens, call.ready, now,
                call.siblings, call.deadline, call.layers,
            )  # fmt: skip
        except Exception as error:
            if not isinstance(error, PushKVError):
                log.exception("%s cannot be staged.", call.transfer)
            self._refuse(call, Outcome.REJECTED_TOKENS, str(error) or type(error).__name__, now)
            return
        self._open.add(call.transfer)
        self._holding[call.transfer] = call.ending
        self.run_commands()

    def _refuse(self, call: Call, outcome: Outcome, detail: str, now: float) -> None:
        """What cannot be staged ends, together with what was staged before under its id."""
        self.machine.unstage(call.transfer, now, outcome, detail)
        self.run_commands()
        self._never_staged(call, outcome, detail)

    def _announce(self, call: Call, now: float) -> None:
        """Have the machine know of a prompt whose KV has gone wrong, so that whoever has offered hears of its end."""
        if call.transfer in self._holding or self.transport is None:
            return
        try:
            self.machine.stage(call.transfer, call.blocks, call.prompt, call.prompt_tokens, 0, now, call.siblings)
        except Exception:  # numbers that cannot be, too: its offers wait for another stage
            return
        self._open.add(call.transfer)
        self._holding[call.transfer] = call.ending

    def _never_staged(self, call: Call, outcome: Outcome, detail: str) -> None:
        """End and release what the machine has never had, or has no more; what it holds it releases itself."""
        if call.ending.outcome is None:
            self._pending.append(StageEnded(call.transfer, outcome, detail))
            self.run_commands()
        self._let_go(call)

    def _let_go(self, call: Call) -> None:
        """Release the blocks of a call whose stage has ended, unless the machine holds that stage's.

        What has been released is not so again: by now the engine may have staged under this id anew.
        """
        if self._holding.get(call.transfer) is call.ending:
            return
        if not call.ending.released and not self._has_successor(call):
            self._pending.append(StageReleased(call.transfer))
            self.run_commands()
        call.ending.release()

    def _has_successor(self, call: Call) -> bool:
        fenced = (other.ending for other in self._fenced if other.transfer == call.transfer)
        return call.transfer in self._holding or any(ending is not call.ending for ending in fenced)

    def account(self, command: Command) -> None:
        """Take note of what becomes of stages."""
        if isinstance(command, StageEnded):
            self._open.discard(command.transfer)
        elif isinstance(command, StageReleased):
            self._holding.pop(command.transfer, None)


def _verdict(fence: Fence) -> str:
    """Whether a fence has passed, or what it raised: the work before it has gone wrong, and so has the KV."""
    try:
        return _PASSED if has_passed(fence) else _WAITS
    except BaseException as error:  # it is the backend's, and may be of somebody's plug-in: the thread goes on
        log.exception("A fence failed.")
        return f"its fence failed: {error or type(error).__name__}"
