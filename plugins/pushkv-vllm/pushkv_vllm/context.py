"""Decode context parallelism: tensor-parallel ranks that would hold copies of a head share its tokens out.

vLLM deals a request's tokens out in runs of ``cp_kv_cache_interleave_size`` to ``decode_context_parallel_size``
neighbouring ranks. A block number names a block on each of them, so that to the scheduler a block is of as many
tokens as they hold together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pushkv.core.layouts import Shard, shard
from pushkv.errors import ConfigError


@dataclass(frozen=True)
class Context:
    """``size`` ranks share tokens out in runs of ``width``."""

    size: int = 1
    width: int = 1

    @classmethod
    def of(cls, parallel_config: Any) -> Context:
        """An engine's. Raises ConfigError for prefill context parallelism, whose ranks are numbered otherwise."""
        pcp = int(getattr(parallel_config, "prefill_context_parallel_size", 1) or 1)
        if pcp > 1:
            raise ConfigError(
                f"prefill_context_parallel_size is {pcp}, and this connector does not know its ranks; set it to 1. "
                "decode_context_parallel_size is served, on prefill engines too."
            )
        size = int(getattr(parallel_config, "decode_context_parallel_size", 1) or 1)
        width = int(getattr(parallel_config, "cp_kv_cache_interleave_size", 1) or 1)
        return cls(size, width) if size > 1 else cls()

    def tokens_a_block(self, spec: Any) -> int:
        """Of how many tokens a block is to the scheduler, in a cache group with this spec."""
        return int(spec.block_size) * (self.size if self.deals_out(spec) else 1)

    def deals_out(self, spec: Any) -> bool:
        """Whether the group's tokens are shared out: since vLLM 0.32 some groups may be held whole by every rank."""
        return self.size > 1 and bool(getattr(spec, "dcp_sharded", True))

    def share(self, heads: int, rank: int, ranks: int, *, dealt: bool) -> Shard:
        """What tensor-parallel rank ``rank`` of ``ranks`` holds. Raises GeometryError where numbers do not divide."""
        if not dealt:
            return shard(heads, rank, ranks)
        return shard(heads, rank, ranks, stripes=self.size, width=self.width)
