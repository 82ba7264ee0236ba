"""``python -m pushkv.testing.soak``: run the soak and print what came of it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from pushkv.testing.broken import Broken
from pushkv.testing.soak.run import Figures, soak


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; 1 where a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m pushkv.testing.soak", description=__doc__)
    parser.add_argument("--transfers", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="one seed gives one run (default 1)")
    parser.add_argument("--episode", type=int, help="run this episode alone, as big as --each")
    parser.add_argument("--log", default="CRITICAL", help="the level at which PushKV logs (default CRITICAL)")
    parser.add_argument("--each", type=int, default=2000, help="transfers an episode (default 2000)")
    parser.add_argument("--landing", action="store_true", help="have all parts go through landing slots")
    parser.add_argument("--verify", action="store_true", help="verify bytes, of which some land as others")
    parser.add_argument("--layers", action="store_true", help="stage the layers of a chunk one after the other")
    args = parser.parse_args(argv)
    logging.getLogger("pushkv").setLevel(args.log)
    figures = Figures(args.seed)
    transfers = args.transfers if args.episode is None else args.each
    try:
        soak(
            figures,
            transfers,
            args.each,
            args.episode or 0,
            landing=args.landing,
            verify=args.verify,
            layers=args.layers,
            progress=lambda line: print(line, flush=True),
        )
    except Broken:
        print(figures.report())
        return 1
    print(figures.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
