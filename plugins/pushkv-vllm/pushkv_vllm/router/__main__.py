"""``python -m pushkv_vllm.router``."""

import sys

from pushkv_vllm.router.cli import main

sys.exit(main())
