"""TTFT and TPOT against load, push and pull: ``pushkv bench serve``, which see, with the same options."""

from __future__ import annotations

import sys

from pushkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
