"""What NIXL's own backends tell of the way they took, read from their logs: there is no other word of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOGGING = {"UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "INFO"}
"""Environment under which the lines are written."""

_LINE = re.compile(r"\]\s+\|(.*)\|\s*$")
_WRITE = re.compile(r"remote memory write by ucp_put\S*( from (?P<source>\S+( memory)?) to (?P<target>\S+))?")


@dataclass(frozen=True)
class UcxLanes:
    """By what UCX writes memory of other processes, in its words for the largest sizes (``"rc_mlx5/mlx5_0"``)."""

    writes: tuple[str, ...]

    @property
    def over_tcp(self) -> bool:
        """Whether every lane is TCP."""
        return bool(self.writes) and all(re.fullmatch(r"tcp/\S+", lane) for lane in self._lanes())

    def _lanes(self) -> list[str]:
        """Each lane of lines such as ``"52% on tcp/lo and 48% on tcp/eth0"``."""
        return [lane for line in self.writes for lane in re.findall(r"[\w^]+/[\w:.]+", line)]


def ucx_lanes(log: str) -> UcxLanes:
    """What UCX_PROTO_INFO=y printed about WRITEs."""
    writes: list[str] = []
    of_writes = False
    for line in log.splitlines():
        cells = _LINE.search(line)
        if cells is None:
            of_writes = of_writes and "+---" in line
            continue
        columns = [cell.strip() for cell in cells[1].split("|")]
        if len(columns) == 1:
            of_writes = of_writes if "cfg#" in columns[0] else _WRITE.search(columns[0]) is not None
        elif of_writes and columns[0].endswith("inf"):
            writes.append(columns[-1])
    return UcxLanes(tuple(dict.fromkeys(writes)))


@dataclass(frozen=True)
class LibfabricRails:
    """Over what NIXL's LIBFABRIC goes.

    ``provider`` of its ``rails``, empty where it does not say; ``fallback``: it found no EFA and took TCP;
    ``accelerator`` as it sees the host (``"CUDA"``, ``"NEURON"``, ``"SYSTEM"``); ``as_system_memory``: it registered
    device memory as the host's, without an error.
    """

    provider: str = ""
    rails: int = 0
    fallback: bool = False
    accelerator: str = ""
    as_system_memory: bool = False


def libfabric_rails(log: str) -> LibfabricRails:
    """What NIXL_LOG_LEVEL=INFO made its LIBFABRIC backend print."""
    rails = re.search(r"Created (\d+) rails using provider=(\S+)", log)
    runtime = re.search(r"System runtime: (\w+)", log)
    return LibfabricRails(
        provider=rails[2] if rails else "",
        rails=int(rails[1]) if rails else 0,
        fallback="(TCP fallback)" in log,
        accelerator=runtime[1] if runtime else "",
        as_system_memory="falling back to system memory registration" in log,
    )
