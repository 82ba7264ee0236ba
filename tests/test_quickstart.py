"""``examples/quickstart.py`` runs as it stands, and stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.py"


@pytest.mark.processes
def test_the_quickstart_moves_a_prompts_kv_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART)], capture_output=True, text=True, timeout=90, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "prefill: Outcome.COMPLETE, 204800 bytes sent" in done.stdout
    assert "decode: Outcome.COMPLETE, every byte right, by UCX" in done.stdout


def test_the_quickstart_is_under_sixty_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) < 60
