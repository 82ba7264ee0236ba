"""How long planning takes and how many descriptors come of it, beside a stock connector's index lists.

    python benchmarks/plan.py            a table
    python benchmarks/plan.py --json     the same as JSON

One request of 1,024 blocks over 64 layers, K and V, unless a row says otherwise. The stock way numbers each block
in each region in the request's order and hands both lists to NIXL, which joins neighbours that ascend on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pushkv.core.geometry import BlockTable, Geometry
from pushkv.core.layouts import dense_array, group_of_layers, group_of_tensor, shard
from pushkv.core.plan import plan_copy
from pushkv.core.template import PairTemplate

LAYERS, BLOCKS, HELD = 64, 8192, 1024
HEADS, SIZE, CONTENT = 8, 16, 128
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]


@dataclass(frozen=True)
class Row:
    """One line of the report. Times are medians in milliseconds, memory is the peak of one plan in bytes."""

    case: str
    plan_ms: float
    index_ms: float | None
    descriptors: int
    run_bytes_p50: int
    peak_bytes_a_piece: float
    stock_ms: float | None = None
    stock_descriptors: int | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over the stock way's."""
        return self.plan_ms / self.stock_ms if self.stock_ms else None


def layer_outer(rank: int = 0, ranks: int = 1, order: str = "SBHNC", size: int = SIZE) -> Geometry:
    """A tensor a layer, each a region of its own."""
    share = shard(HEADS, rank, ranks)
    sizes = {"S": 2, "B": BLOCKS * SIZE // size, "H": share.head_stop - share.head_start, "N": size, "C": CONTENT}
    arrays = {name: dense_array(order, sizes, 2, "bfloat16", region) for region, name in enumerate(NAMES)}
    return Geometry((group_of_layers(arrays, order, share),))


def block_outer() -> Geometry:
    """One tensor for all layers, a block in one piece."""
    sizes = {"B": BLOCKS, "L": LAYERS, "S": 2, "H": HEADS, "N": SIZE, "C": CONTENT}
    return Geometry(
        (group_of_tensor(NAMES, dense_array("BLSHNC", sizes, 2, "bfloat16"), "BLSHNC", shard(HEADS, 0, 1)),)
    )


def milliseconds(work: Callable[[], object], repeat: int) -> float:
    """The median over ``repeat`` calls."""
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def stock_index(ids: NDArray[np.int32], regions: int) -> NDArray[np.int32]:
    """Every block in every region, numbered region by region in the order in which the request lists its blocks."""
    return (np.arange(regions, dtype=np.int32)[:, None] * BLOCKS + ids[None, :]).ravel()


def stock_descriptors(source: NDArray[np.int32], target: NDArray[np.int32]) -> int:
    """What NIXL is left with: neighbours in list order that ascend by one on both sides are joined."""
    follows = (np.diff(source) == 1) & (np.diff(target) == 1)
    return int(source.size - follows.sum())


def measure(
    case: str, source: Geometry, target: Geometry, tables: list[BlockTable], repeat: int, regions: int
) -> Row:
    """Plan one request; ``regions`` is how many the stock way would list, 0 where it has no way."""
    template, tokens = PairTemplate(source, target), (0, HELD * SIZE)
    lists = [tables[0]], [tables[1]]
    made = plan_copy(source, target, *lists, tokens, template=template)
    plan_ms = milliseconds(lambda: plan_copy(source, target, *lists, tokens, template=template), repeat)
    fresh = iter([plan_copy(source, target, *lists, tokens, template=template) for _ in range(repeat)])
    index_ms = milliseconds(lambda: next(fresh).source_index, repeat) if made.source_index is not None else None
    tracemalloc.start()
    plan_copy(source, target, *lists, tokens, template=template)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    row = Row(case, plan_ms, index_ms, made.descriptors, made.run_bytes_p50, peak / made.descriptors_before)
    if not regions:
        return row
    both = [stock_index(table.ids, regions) for table in tables]
    stock_ms = milliseconds(lambda: [stock_index(table.ids, regions) for table in tables], repeat)
    return Row(*list(asdict(row).values())[:6], stock_ms, stock_descriptors(*both))


def request_rows(repeat: int) -> Iterator[Row]:
    """The plans of one request."""
    rng = np.random.default_rng(0)
    scattered = [BlockTable(0, rng.permutation(BLOCKS)[:HELD].astype(np.int32)) for _ in range(2)]
    falling = [BlockTable(0, np.arange(HELD - 1, -1, -1, dtype=np.int32) + start) for start in (64, 4096)]
    yield measure("layer-outer, scattered", layer_outer(), layer_outer(), scattered, repeat, 2 * LAYERS)
    yield measure("layer-outer, falling", layer_outer(), layer_outer(), falling, repeat, 2 * LAYERS)
    yield measure("block-outer, scattered", block_outer(), block_outer(), scattered, repeat, 1)
    yield measure("block-outer, falling", block_outer(), block_outer(), falling, repeat, 1)
    sharded = layer_outer(1, 8), layer_outer(0, 4)
    yield measure("TP 8 to 4 (HND), scattered", *sharded, scattered, repeat, 0)
    tokens_outer = layer_outer(order="SBNHC"), layer_outer(order="SBNHC", size=32)
    halves = BlockTable(0, rng.permutation(BLOCKS // 2)[: HELD // 2].astype(np.int32))
    yield measure("block 16 to 32 (NHD), scattered", *tokens_outer, [scattered[0], halves], repeat, 0)
    wide = layer_outer(), layer_outer(size=32)
    yield measure("block 16 to 32 (HND), scattered", *wide, [scattered[0], halves], 3, 0)


def template_rows(repeat: int) -> dict[str, float]:
    """What is made once a rank pair, in milliseconds."""

    def made(source: Geometry, target: Geometry) -> object:
        template = PairTemplate(source, target)
        return template.lattice(), template.grain

    addresses = [(layer << 32) + side * BLOCKS * 32768 for layer in range(LAYERS) for side in range(2)]

    def stock() -> object:
        return [(base + block * 32768, 32768, 0) for base in addresses for block in range(BLOCKS)]

    return {
        "template, equal": milliseconds(lambda: made(layer_outer(), layer_outer()), repeat),
        "template, TP 8 to 4": milliseconds(lambda: made(layer_outer(1, 8), layer_outer(0, 4)), repeat),
        "template, TP 8 to 4 (NHD)": milliseconds(
            lambda: made(layer_outer(1, 8, "SBNHC"), layer_outer(0, 4, "SBNHC")), repeat
        ),
        "template, HND to NHD": milliseconds(lambda: made(layer_outer(), layer_outer(order="SBNHC")), repeat),
        "check of a stranger's": milliseconds(lambda: layer_outer().check(), repeat),
        "stock, a descriptor a block and region": milliseconds(stock, 1),
    }


def show(rows: list[Row], once: dict[str, float]) -> None:
    """Print both tables."""
    line = "{:<34}{:>9}{:>10}{:>12}{:>15}{:>9}{:>10}{:>8}{:>12}"
    print(
        line.format(
            "one request", "plan ms", "index ms", "runs", "run p50", "B/piece", "stock ms", "ratio", "stock runs"
        )
    )
    for row in rows:
        numbers = [f"{row.plan_ms:.2f}", f"{row.index_ms:.2f}" if row.index_ms is not None else "-"]
        numbers += [f"{row.descriptors:,}", f"{row.run_bytes_p50:,}", f"{row.peak_bytes_a_piece:.0f}"]
        numbers += [f"{row.stock_ms:.3f}" if row.stock_ms is not None else "-"]
        numbers += [f"{row.ratio:.1f}" if row.ratio is not None else "-"]
        numbers += [f"{row.stock_descriptors:,}" if row.stock_descriptors is not None else "-"]
        print(line.format(row.case, *numbers))
    print(f"\n{'once a rank pair':<44}{'ms':>9}")
    for name, taken in once.items():
        print(f"{name:<44}{taken:9.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeat", type=int, default=20, help="measure each this often and take the median")
    chosen = parser.parse_args()
    rows, once = list(request_rows(chosen.repeat)), template_rows(chosen.repeat)
    if chosen.json:
        print(json.dumps({"plans": [{**asdict(row), "ratio": row.ratio} for row in rows], "once_ms": once}, indent=2))
    else:
        show(rows, once)


if __name__ == "__main__":
    main()
