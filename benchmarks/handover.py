"""Latency of a handover by size, what idling costs: ``pushkv bench handover``, which see, with the same options."""

from __future__ import annotations

import sys

from pushkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "handover", *sys.argv[1:]]))
