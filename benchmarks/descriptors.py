"""Time against the shape of blocks: ``pushkv bench descriptors``, which see, with the same options."""

from __future__ import annotations

import sys

from pushkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "descriptors", *sys.argv[1:]]))
