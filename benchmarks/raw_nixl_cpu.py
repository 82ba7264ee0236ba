"""The floor to compare with: a WRITE with its notification over NIXL alone, between two processes of this machine.

What is measured stands in ``pushkv.demo.raw``. ``python benchmarks/raw_nixl_cpu.py --json``
"""

from __future__ import annotations

import argparse
import json
import statistics

from pushkv.demo.raw import SIZES, measure


def main() -> None:
    """Print a line a size, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--module", default="", help="the flavour of NIXL, by default the one PushKV would use")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    times = measure([int(size) for size in chosen.sizes.split(",")], chosen.repeats, module=chosen.module)
    if chosen.json:
        print(json.dumps({str(size): taken for size, taken in times.items()}))
        return
    for size, taken in times.items():
        median, worst = statistics.median(taken) * 1e6, max(taken) * 1e6
        print(f"{size:>12,} B  median {median:9.0f} µs  worst {worst:9.0f} µs  {size / median / 1e3:6.2f} GB/s")


if __name__ == "__main__":
    main()
