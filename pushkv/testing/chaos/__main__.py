"""``python -m pushkv.testing.chaos``: run it and print what came of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pushkv.testing.broken import Broken
from pushkv.testing.chaos.parent import Chaos, Figures
from pushkv.testing.chaos.tasks import How


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 where a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m pushkv.testing.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="what is done, and to whom (default 1)")
    parser.add_argument("--tls", default="", help="UCX_TLS of the processes, as tcp (default: UCX's choice)")
    parser.add_argument("--every", type=float, default=1.5, help="mean seconds between two blows (default 1.5)")
    parser.add_argument("--landing", action="store_true", help="have all parts go through landing slots")
    parser.add_argument("--verify", action="store_true", help="verify bytes")
    args = parser.parse_args(argv)
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    figures = Figures(args.seed, os.environ.get("UCX_TLS", ""))
    try:
        Chaos(figures, args.every, How(args.landing, args.verify)).run(args.seconds)
    except Broken:
        print(figures.report())
        return 1
    print(figures.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
