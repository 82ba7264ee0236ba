"""Prefill's scheduler half: which prompts are computed for elsewhere, what of them is ready, whose blocks are pinned.

Every block that a part names is pinned from the plan until all ranks have reported that the transfer is over, or have
let go of it after a preemption. The engine may free the request at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pushkv_vllm.directives import Reclaim, Reports, StagePart, Tables, Unstage
from pushkv_vllm.pins import Pins
from pushkv_vllm.prompt import digest_of, refusal


@dataclass
class Prompt:
    """A prompt under way. ``planned`` tokens are named in parts, of the ``computed`` ones.

    ``round`` counts preemptions; while ``reclaiming``, blocks of the round before are still read, and parts wait.
    """

    request: str
    transfer: str
    digest: bytes
    tokens: int
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    planned: int = 0
    round: int = 0
    reclaiming: bool = False
    staged: bool = False
    done: bool = False
    over: bool = False


class PrefillScheduler:
    """``ranks`` workers stage each prompt."""

    def __init__(self, pins: Pins, ranks: int) -> None:
        self._pins = pins
        self._ranks = ranks
        self._prompts: dict[str, Prompt] = {}
        self._by_request: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._let_go: Counter[tuple[str, int]] = Counter()
        self._gone: Counter[str] = Counter()
        self._parts: list[StagePart] = []
        self._reclaims: list[Reclaim] = []
        self._unstages: list[Unstage] = []
        self.counts: Counter[str] = Counter()

    @property
    def waiting(self) -> bool:
        """Whether a worker is to report something."""
        return bool(self._prompts)

    @property
    def pinned(self) -> bool:
        """Whether blocks are pinned, or parts wait to be staged, for requests that the engine may know no more."""
        return any(prompt.done for prompt in self._prompts.values())

    def add(self, request: Any, transfer: str) -> str:
        """A prompt that is to go elsewhere has come in; why it will not, empty where it will."""
        if why := refusal(request):
            return why
        if transfer in self._prompts:
            return f"transfer {transfer} is open already; take a fresh id for each dispatch"
        digest = digest_of(request)
        self._prompts[transfer] = Prompt(request.request_id, transfer, digest, int(request.num_prompt_tokens))
        self._by_request[request.request_id] = transfer
        return ""

    def transfer_of(self, request: str) -> str:
        """The transfer of a request that is under way; empty where there is none."""
        return self._by_request.get(request, "")

    def _of(self, request: str) -> Prompt | None:
        return self._prompts.get(self._by_request.get(request, ""))

    # Each step

    def scheduled(self, request: str, tables: Sequence[Sequence[int]], *, replaces: bool) -> None:
        """The engine has given a request blocks: all of them, or more. Its lists change: they are copied."""
        prompt = self._of(request)
        if prompt is None:
            return
        if replaces or not prompt.tables:
            prompt.tables = [list(table) for table in tables]
            return
        for mine, more in zip(prompt.tables, tables, strict=True):
            mine.extend(more)

    def computes(self, request: str, tokens: int) -> None:
        """After this step ``tokens`` of the request are computed."""
        prompt = self._of(request)
        if prompt is not None and not prompt.over:
            prompt.computed = min(tokens, prompt.tokens)
            self._plan(prompt)

    def _plan(self, prompt: Prompt) -> None:
        if prompt.computed <= prompt.planned or prompt.over:
            return
        prompt.planned = prompt.computed
        tables: Tables = tuple(map(tuple, prompt.tables))
        self._pins.hold((prompt.transfer, prompt.round), (number for table in tables for number in table))
        if not prompt.reclaiming:
            self._part(prompt, tables)

    def _part(self, prompt: Prompt, tables: Tables) -> None:
        prompt.staged = True
        self._parts.append(StagePart(prompt.transfer, tables, prompt.planned, prompt.digest, prompt.tokens))

    def preempted(self, request: str) -> None:
        """The engine has taken the request's blocks back; they stay pinned until no rank reads them any more."""
        prompt = self._of(request)
        if prompt is None or prompt.over:
            return
        held = (prompt.transfer, prompt.round)
        self._parts = [part for part in self._parts if part.transfer != prompt.transfer]
        prompt.tables, prompt.computed, prompt.planned = [], 0, 0
        if not prompt.staged:
            self._pins.let_go(held)
        elif prompt.reclaiming:
            # Nothing of this round has been told to a worker yet.
            self._pins.let_go(held)
        else:
            self._reclaims.append(Reclaim(prompt.transfer, prompt.round))
            self._pins.pass_on(held, (prompt.transfer, "reclaimed"))
            prompt.round += 1
            prompt.reclaiming = True
            self.counts["preempted"] += 1

    def finished(self, request: str, *, whole: bool) -> bool:
        """The request is over; whether decode may still come for it. Without ``whole`` its transfer ends."""
        prompt = self._of(request)
        self._by_request.pop(request, None)
        if prompt is None:
            return False
        prompt.done = True
        if prompt.over:
            del self._prompts[prompt.transfer]
        elif not whole or prompt.planned < prompt.tokens:
            self._parts = [part for part in self._parts if part.transfer != prompt.transfer]
            self._unstages.append(Unstage(prompt.transfer, prompt.digest, prompt.tokens))
            return False
        return not prompt.over

    def take(self) -> tuple[tuple[StagePart, ...], tuple[Reclaim, ...], tuple[Unstage, ...]]:
        """What the workers are to do: parts, reclaims, unstages."""
        taken = tuple(self._parts), tuple(self._reclaims), tuple(self._unstages)
        self._parts, self._reclaims, self._unstages = [], [], []
        return taken

    # What the workers report

    def reports(self, reports: Reports) -> None:
        """Unpin what is read no more, and go on with parts that waited for that."""
        for key, count in reports.reclaimed.items():
            self._let_go[key] += count
            if self._let_go[key] >= self._ranks:
                del self._let_go[key]
                self._reclaimed(key[0])
        for transfer, count in reports.over.items():
            self._gone[transfer] += count
            if self._gone[transfer] >= self._ranks:
                del self._gone[transfer]
                self._over(transfer)
        self._count(reports.ended)

    def _count(self, ended: Mapping[str, str]) -> None:
        for how in ended.values():
            self.counts["sent" if how == "complete" else "not sent"] += 1

    def _reclaimed(self, transfer: str) -> None:
        self._pins.let_go((transfer, "reclaimed"))
        prompt = self._prompts.get(transfer)
        if prompt is None:
            return
        prompt.reclaiming = False
        if prompt.planned and not prompt.over:
            self._part(prompt, tuple(map(tuple, prompt.tables)))

    def _over(self, transfer: str) -> None:
        prompt = self._prompts.get(transfer)
        if prompt is None:
            return
        self._pins.let_go((transfer, "reclaimed"))
        self._pins.let_go((transfer, prompt.round))
        prompt.over = True
        if prompt.done:
            del self._prompts[transfer]
