"""``python -m pushkv`` is the command ``pushkv``."""

import sys

from pushkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
