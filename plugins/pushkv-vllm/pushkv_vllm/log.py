"""Where this package logs: vLLM gives handlers to its own loggers alone."""

from __future__ import annotations

import logging

import vllm
from vllm.logger import init_logger

from pushkv_vllm import compat

logger = init_logger("vllm.pushkv")


def adopt() -> None:
    """Have what the library logs go where vLLM's own does."""
    library = logging.getLogger("pushkv")
    for handler in logging.getLogger("vllm").handlers:
        if handler not in library.handlers:
            library.addHandler(handler)
    library.setLevel(logging.INFO)
    library.propagate = False


def announce() -> None:
    """Warn, once an engine, where this vLLM is not one that the connector knows."""
    if why := compat.concern(str(vllm.__version__)):
        logger.warning("%s", why)
