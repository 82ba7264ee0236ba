"""What was measured, as lines for people, and where and when."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def surroundings() -> dict[str, Any]:
    """The machine and the moment: what a reader of the figures needs to know."""
    from pushkv.discovery import own_distribution
    from pushkv.transport.nixl_import import find_nixl

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "nixl": ".".join(map(str, find_nixl().version)),
        "pushkv": own_distribution()[1],
    }


def line_of(bench: str, row: Row) -> str:
    """A row or cell as a line."""
    return {"descriptors": _shape, "handover": _size, "serve": _cell}[bench](row)


def _shape(row: Row) -> str:
    ways = ", ".join(f"{way} {row[f'{way}_ms']:8.1f} ms" for way in ("raw", "direct", "landing", "auto"))
    shape = f"{row['regions']:>4} x {row['pieces_a_region']:>5} x {row['piece']:>8} B"
    return f"{shape}: {ways}; raw / landing {row['raw_over_landing']:.2f}"


def _size(row: Row) -> str:
    return (
        f"{row['bytes']:>10} B: raw WRITE {row['raw_write_ms_p50']:8.3f} ms, "
        f"handover {row['handover_ms_p50']:8.3f} ms ({row['beyond_raw_ms_p50']:+.3f}), "
        f"offer seen after {row['offer_seen_ms_p50']:.2f} ms "
        f"(at most {row['offer_seen_ms_max']:.2f}); {row['path']}"
    )


def _cell(row: Row) -> str:
    against = f", {row['tpot_over_none'] - 1:+.1%} of none" if "tpot_over_none" in row else ""
    return (
        f"{row['length']:>6} tokens, {row['rate']:>4g} QPS, {row['mode']:>12}: TTFT {row['ttft_ms_p50']:8.1f} ms "
        f"(prefill done after {row['prefill_ms_p50']:7.1f}), TPOT {row['tpot_ms_mean']:6.2f} ms{against}"
    )


def closing_lines(result: Row) -> list[str]:
    """What is said at the end, beyond the rows."""
    if result["bench"] == "handover":
        shares = result["idle_share_of_a_core"].items()
        return [f"an idle {side}: {share:.2%} of a core" for side, share in shares]
    if result["bench"] != "serve":
        return []
    cells = [cell for cell in result["cells"] if "tpot_over_none" in cell and cell["mode"] != "none"]
    worst: dict[str, Row] = {}
    for cell in cells:
        if cell["mode"] not in worst or cell["tpot_over_none"] > worst[cell["mode"]]["tpot_over_none"]:
            worst[cell["mode"]] = cell
    return [
        f"{mode}: TPOT at most {cell['tpot_over_none'] - 1:+.1%} of no transfer "
        f"({cell['length']} tokens, {cell['rate']:g} QPS)"
        for mode, cell in worst.items()
    ]
