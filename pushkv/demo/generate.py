"""Greedy generation with one process: the reference the demo compares with, and its decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pushkv.demo.model import DecodeInput, Model, choose
from pushkv.demo.paged import BlockIds, BlockPool, PagedCache, blocks_for

SAFE_GAP = 1e-3
"""Two logits that are nearer than this may be swapped by the order of a sum."""


@dataclass
class Sequence_:
    pass
