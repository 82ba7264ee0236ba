"""The producer's staged prompts: which wait, which are over, and when their blocks go back to the engine."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from pushkv.core.commands import Command, Send, StageEnded, StageReleased
from pushkv.core.messages import Blocks, Offer, Ready, TransferKey
from pushkv.core.outcome import Outcome, worst
from pushkv.core.streaming import Ahead, Reach
from pushkv.errors import ProtocolError

Base = tuple[str, str, str, int]
End = tuple[int, Outcome]
"""The attempt and the outcome of a sibling that has ended."""
_REMEMBERED = 4096


class Outbox:
    """Commands that wait to be taken."""

    __slots__ = ("_commands",)

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def put(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def take(self) -> list[Command]:
        """Take all of them, in order. Of several Readys for one offer the last says all, and alone is left."""
        taken, self._commands = self._commands, []
        kept: deque[Command] = deque()
        said: set[tuple[str, int]] = set()
        for command in reversed(taken):
            if isinstance(command, Send) and isinstance(command.message, Ready):
                offer = command.peer, command.message.sequence
                if offer in said:
                    continue
                said.add(offer)
            kept.appendleft(command)
        return list(kept)


@dataclass
class Stage:
    """A prompt whose KV is (being) computed: tokens up to ``ready`` are in ``blocks``, some layers ``ahead`` of that.

    ``suspended`` while the engine wants its blocks back (preemption) and they are still read; ``blocks`` is None
    once it has them. ``done`` has the last attempt and the outcome of each sibling that has ended, ``detail`` why.
    With 0 ``siblings`` the stage waits for as many as the offers say (``told``).
    """

    transfer: str
    prompt: bytes
    prompt_tokens: int
    siblings: int
    blocks: Blocks | None = None
    ready: int = 0
    ahead: Ahead | None = None
    told: int = 0
    done: dict[Base, End] = field(default_factory=dict)
    detail: dict[Base, str] = field(default_factory=dict)
    suspended: bool = False
    over: bool = False

    @property
    def computed(self) -> Reach:
        """How far its KV is in its blocks."""
        return Reach(self.ready, self.ahead)

    def refusal(self, offer: Offer) -> tuple[Outcome, str] | None:
        """Why this offer cannot be served from this stage, None where it can."""
        if offer.prompt_tokens != self.prompt_tokens:
            lengths = f"the offer's prompt has {offer.prompt_tokens} tokens, the staged one {self.prompt_tokens}"
            return Outcome.REJECTED_PROMPT, lengths
        if offer.prompt != self.prompt:
            digests = f"the offer's digest is {offer.prompt.hex()[:16]}, the staged one's {self.prompt.hex()[:16]}"
            return Outcome.REJECTED_PROMPT, digests
        if not offer.start <= offer.stop <= self.prompt_tokens:
            asked = f"tokens {offer.start} to {offer.stop} are asked of a prompt of {self.prompt_tokens}"
            return Outcome.REJECTED_TOKENS, asked
        return None


class Stages:
    """All stages of a producer, by transfer id."""

    def __init__(self, out: Outbox, limit: int) -> None:
        self._out = out
        self._limit = limit
        self._stages: dict[str, Stage] = {}
        # Siblings that ended before their prompt was staged, so that a stage for them need not wait out its
        # deadline. A hint only: no rule rests on it, so it may be evicted.
        self._early: OrderedDict[Base, tuple[End, int]] = OrderedDict()
        # How the engine ended transfers, so that a later offer need not wait out its deadline. A hint too.
        self._withdrawn: OrderedDict[str, tuple[Outcome, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stages)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._stages

    def names(self) -> list[str]:
        """The transfer ids."""
        return list(self._stages)

    def get(self, transfer: str) -> Stage | None:
        """The stage of a transfer id that still wants serving, None where there is none."""
        stage = self._stages.get(transfer)
        return None if stage is None or stage.over else stage

    def put(self, stage: Stage) -> bool:
        """Take a stage in, or more of one; True where it is new. Raises ProtocolError and changes nothing else."""
        known = self._stages.get(stage.transfer)
        self._check(stage, known)
        if known is not None:
            known.blocks, known.ready, known.ahead = stage.blocks, stage.ready, stage.ahead
            return False
        self._stages[stage.transfer] = stage
        self._withdrawn.pop(stage.transfer, None)
        for base in [base for base in self._early if base[0] == stage.transfer]:
            stage.done[base], told = self._early.pop(base)
            stage.told = max(stage.told, told)
        return True

    def _check(self, stage: Stage, known: Stage | None) -> None:
        name, ready = stage.transfer, stage.ready
        until = ready if stage.ahead is None else stage.ahead.until
        if not 0 <= ready <= until <= stage.prompt_tokens:
            raise ProtocolError(f"{name} stages {until} of {stage.prompt_tokens} tokens: stage at most the prompt")
        if stage.siblings < 0:
            raise ProtocolError(f"{name} waits for {stage.siblings} siblings: wait for at least one")
        if known is None:
            if len(self._stages) >= self._limit:
                raise ProtocolError(f"{name} is one stage more than the limit of {self._limit}: wait for some to end")
            return
        if known.over or known.suspended:
            state = "over" if known.over else "preempted"
            raise ProtocolError(f"{name} is {state} and its blocks are still read: wait for their release")
        if (stage.prompt, stage.prompt_tokens) != (known.prompt, known.prompt_tokens):
            raise ProtocolError(f"{name} is staged already for another prompt: use a transfer id once a dispatch")
        if stage.siblings != known.siblings:
            waits, now = (each.siblings or "as many as the offers say" for each in (known, stage))
            raise ProtocolError(f"{name} waits for siblings: {waits}, and now {now}: say the same in every call")
        if ready < known.ready:
            raise ProtocolError(f"{name} goes back from {known.ready} to {ready} tokens: preempt it first")

    def suspend(self, transfer: str) -> None:
        """The engine wants the blocks back: nothing more may be posted from them."""
        stage = self.get(transfer)
        if stage is not None and stage.blocks is not None:
            stage.ready, stage.ahead, stage.suspended = 0, None, True

    def sibling_done(self, key: TransferKey, outcome: Outcome, told: int, detail: str = "") -> None:
        """One sibling has ended with this attempt. SUPERSEDED says that another follows, and that one counts.

        ``told`` is how many siblings there are by the consumer's word, 0 where it does not say.
        """
        if outcome is Outcome.SUPERSEDED:
            return
        stage = self._stages.get(key.transfer)
        if stage is None:
            self._ended_early(key, outcome, told)
            return
        stage.told = max(stage.told, told, 1)
        if key.base not in stage.done or stage.done[key.base][0] <= key.attempt:
            stage.done[key.base], stage.detail[key.base] = (key.attempt, outcome), detail

    def _ended_early(self, key: TransferKey, outcome: Outcome, told: int) -> None:
        if key.base not in self._early or self._early[key.base][0][0] <= key.attempt:
            self._early[key.base] = ((key.attempt, outcome), max(told, 1))
        if len(self._early) > _REMEMBERED:
            self._early.popitem(last=False)

    def give_up(self, transfer: str, outcome: Outcome, detail: str) -> None:
        """Wait for no more siblings than have come: end a stage that still waits for some."""
        stage = self.get(transfer)
        if stage is not None and len(stage.done) < stage.siblings:
            self.end(stage, outcome, detail)

    def end(self, stage: Stage, outcome: Outcome, detail: str = "") -> None:
        """Give a stage its outcome, once."""
        if not stage.over:
            stage.over = True
            self._out.put(StageEnded(stage.transfer, outcome, detail))

    def _end_by_siblings(self, stage: Stage) -> None:
        """The worst outcome wins, with the words of the first sibling that came to it."""
        outcome = worst(outcome for _, outcome in stage.done.values())
        details = (stage.detail.get(base, "") for base, (_, its) in stage.done.items() if its is outcome)
        self.end(stage, outcome, next(details))

    def withdraw(self, transfer: str, outcome: Outcome, detail: str) -> None:
        """The engine, or its deadline, has ended a stage: whatever is offered later is to hear so."""
        self._withdrawn[transfer] = outcome, detail
        if len(self._withdrawn) > _REMEMBERED:
            self._withdrawn.popitem(last=False)

    def withdrawn(self, transfer: str) -> tuple[Outcome, str] | None:
        """How the engine ended this transfer, None where it has not, or is at it anew."""
        return self._withdrawn.get(transfer)

    def settle(self, transfer: str, wanted: bool, reading: bool) -> bool:
        """End a stage that is done with, and release its blocks once nothing reads them; True when it is gone.

        It is done with when as many siblings as it waits for have ended, and no offer that it has met wants more.
        """
        stage = self._stages.get(transfer)
        if stage is None:
            return False
        if stage.done and len(stage.done) >= (stage.siblings or stage.told) and not wanted:
            self._end_by_siblings(stage)
        if reading or not (stage.over or stage.suspended):
            return False
        if stage.blocks is not None:
            self._out.put(StageReleased(transfer))
        stage.blocks, stage.suspended = None, False
        if stage.over:
            del self._stages[transfer]
        return stage.over
