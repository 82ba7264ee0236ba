"""Two network namespaces joined by virtual links that can lose everything.

They have no name: each lives as long as a process that holds it or runs in it, and each holder ends when the pipe to
the test closes, however that came about. So nothing stays behind, and nothing is seen outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from runtime.scene import until

CONTROL, DATA = "control0", "data0"
LINKS = (CONTROL, DATA)
NOBODY = "02:00:00:00:00:0e"
"""A hardware address that no interface has: what is sent to it vanishes, and nobody is told."""


def missing() -> str:
    """What this machine lacks for namespaces; empty where nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if lacking:
        return f"network namespaces need the commands {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


class TwoNetworks:
    """Namespaces 0 and 1 with one link for control and one for data between them."""

    def __init__(self) -> None:
        self.holders = [
            subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            for _ in range(2)
        ]
        try:
            for holder in self.holders:
                until(lambda pid=holder.pid: _apart(pid), "the namespace")
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        for number, link in enumerate(LINKS):
            peer = ["peer", "name", link, "address", _hardware(number, 1), "netns", str(self.holders[1].pid)]
            self.ip(0, "link", "add", link, "address", _hardware(number, 0), "type", "veth", *peer)
        for side in range(2):
            self.ip(side, "link", "set", "lo", "up")
            for link in LINKS:
                self.ip(side, "address", "add", f"{self.address(side, link)}/24", "dev", link)
                # No address by itself: it could not be used for a second, and be chosen nevertheless.
                self.ip(side, "link", "set", link, "addrgenmode", "none")
                self.ip(side, "link", "set", link, "up")
        for link in LINKS:
            self.heal(link)

    def address(self, side: int, link: str) -> str:
        """An address out of the blocks reserved for examples, so that it is nobody else's."""
        return f"{('192.0.2', '198.51.100')[LINKS.index(link)]}.{1 + side}"

    def network(self, side: int) -> int:
        """The process whose network namespace this is."""
        return self.holders[side].pid

    def lose(self, link: str) -> None:
        """From now on what enters the link, either way, is lost without a word."""
        for side in range(2):
            self._send_to(side, link, NOBODY)

    def heal(self, link: str) -> None:
        """Deliver again."""
        for side in range(2):
            self._send_to(side, link, _hardware(LINKS.index(link), 1 - side))

    def _send_to(self, side: int, link: str, hardware: str) -> None:
        address = self.address(1 - side, link)
        self.ip(side, "neighbour", "replace", address, "lladdr", hardware, "nud", "permanent", "dev", link)

    def ip(self, side: int, *arguments: str) -> None:
        """Run ip in a namespace."""
        enter = ["nsenter", "--target", str(self.holders[side].pid), "--net"]
        subprocess.run([*enter, "ip", *arguments], check=True, capture_output=True)

    def close(self) -> None:
        """Let the namespaces go."""
        for holder in self.holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait()


def _hardware(link: int, side: int) -> str:
    return f"02:00:00:00:{link:02x}:{1 + side:02x}"


def _apart(pid: int) -> bool:
    """Whether the process is in a network namespace of its own by now and is what it is to become."""
    ours, theirs = os.stat("/proc/self/ns/net").st_ino, os.stat(f"/proc/{pid}/ns/net").st_ino
    return ours != theirs and Path(f"/proc/{pid}/comm").read_text().strip() == "cat"
