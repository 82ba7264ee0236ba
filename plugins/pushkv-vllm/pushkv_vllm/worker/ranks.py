"""The ranks of one engine, and what they tell each other at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Where this worker is in its engine: tensor-parallel rank ``tp`` of ``tps``, stage ``pp`` of ``pps``."""

    tp: int = 0
    tps: int = 1
    pp: int = 0
    pps: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """This worker's. Raises AssertionError before vLLM's groups are there."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp, pp = get_tp_group(), get_pp_group()
        return cls(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)

    @property
    def rank(self) -> int:
        """This worker's number in its engine."""
        return self.pp * self.tps + self.tp

    @property
    def count(self) -> int:
        """How many workers the engine has."""
        return self.tps * self.pps

    def gather(self, mine: T) -> list[T]:
        """What every rank gives, in the order of ranks. All ranks must call it."""
        if self.count == 1:
            return [mine]
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        row: list[T] = [mine] if self.tps == 1 else _all(get_tp_group(), mine)
        rows: list[list[T]] = [row] if self.pps == 1 else _all(get_pp_group(), row)
        return [one for stage in rows for one in stage]


def _all(group: Any, mine: T) -> list[T]:
    import torch

    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, mine, group=group.cpu_group)
    return gathered
