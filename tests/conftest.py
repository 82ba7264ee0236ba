"""Settings for every test."""

from __future__ import annotations

import os

# Before numpy is imported: BLAS threads that spin would take the cores from the threads under test.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# UCX warns of what tests provoke on purpose (peers that are killed).
os.environ.setdefault("UCX_LOG_LEVEL", "error")
