"""Telling a process's death, and whether its bytes may still arrive."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pushkv.transport.base import Host
from pushkv.transport.host import ProcessWatch, this_host
from pushkv.transport.sockets import Drain, carrying, connections, is_local, orphans

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, remote: str, state: str, inode: int, queues: str = "00000000:00000000") -> str:
    return f"   0: {local} {remote} {state} {queues} 00:00000000 00000000     0        0 {inode} 1 0 20 4\n"


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def drained() -> bool:
    """What a fresh drain says after two looks."""
    drain = Drain()
    return not drain.look() and drain.look()


def host_of(process: subprocess.Popen[bytes]) -> Host:
    with open(f"/proc/{process.pid}/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    return Host(this_host().machine, process.pid, started)


def test_this_process_is_told_apart() -> None:
    host = this_host()
    assert host.pid == os.getpid()
    assert host.started > 0
    assert "/" in host.machine
    watch = ProcessWatch.on(host)
    assert watch is not None
    assert watch.same_network
    assert not watch.dead()
    watch.close()


def test_death_is_seen_also_of_a_zombie(sleeper: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch.on(host_of(sleeper))
    assert watch is not None
    assert not watch.dead()
    sleeper.kill()
    end = time.monotonic() + 5.0
    while not watch.dead():
        assert time.monotonic() < end
    watch.close()
    assert watch.dead()
    sleeper.wait()


def test_a_reused_pid_fools_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    # The pid lives, but it is another process than the one that said its name.
    earlier = dataclasses.replace(host_of(sleeper), started=host_of(sleeper).started - 1)
    watch = ProcessWatch.on(earlier)
    assert watch is not None
    assert watch.dead()


def test_a_process_that_is_gone_already_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    host = host_of(sleeper)
    sleeper.kill()
    sleeper.wait()
    watch = ProcessWatch.on(host)
    assert watch is not None
    assert watch.dead()


def test_a_process_runs_until_it_is_stopped_or_dead(sleeper: subprocess.Popen[bytes]) -> None:
    """Whether or not it has anything to say. Our own says nothing of itself."""
    watch, own = ProcessWatch.on(host_of(sleeper)), ProcessWatch.on(this_host())
    assert watch is not None
    assert own is not None
    assert watch.running()
    assert not own.running()
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert not watch.running()
    assert not watch.dead()
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    assert watch.running()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not watch.running()
    watch.close()
    own.close()


@pytest.mark.parametrize("change", [{"machine": "elsewhere/1"}, {"machine": ""}, {"started": 0}])
def test_what_cannot_be_watched_is_not(sleeper: subprocess.Popen[bytes], change: dict[str, str | int]) -> None:
    assert ProcessWatch.on(dataclasses.replace(host_of(sleeper), **change)) is None


def test_closing_a_watch_on_the_living_keeps_it_alive(sleeper: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch.on(host_of(sleeper))
    assert watch is not None
    watch.close()
    watch.close()
    assert not watch.dead()


def test_a_connection_without_a_living_other_end_is_an_orphan() -> None:
    ours, theirs = "0100007F:1000", "0100007F:2000"
    living = connections(HEAD + line(ours, theirs, "01", 11) + line(theirs, ours, "01", 22))
    assert orphans(living, {"11"}) == []
    closing = connections(HEAD + line(ours, theirs, "08", 11) + line(theirs, ours, "05", 0))
    assert [one.inode for one in orphans(closing, {"11"})] == ["11"]
    gone = connections(HEAD + line(ours, theirs, "08", 11))
    assert [one.inode for one in orphans(gone, {"11"})] == ["11"]
    assert orphans(gone, {"99"}) == [], "somebody else's"


def test_a_connection_nobody_accepted_yet_counts() -> None:
    listening = line("0100007F:1000", "00000000:0000", "0A", 11)
    waiting = line("0100007F:1000", "0100007F:2000", "08", 0)
    table = connections(HEAD + listening + waiting)
    assert len(orphans(table, {"11"})) == 1
    assert orphans(table, set()) == []


def test_a_connection_to_another_machine_is_none() -> None:
    # 192.0.2.77 is a documentation address, which no machine has.
    table = connections(HEAD + line("0100007F:1000", "4D0200C0:2000", "01", 11))
    assert orphans(table, {"11"}) == []


def test_mapped_addresses_match_plain_ones() -> None:
    six = line("0000000000000000FFFF00000100007F:1000", "0000000000000000FFFF00000100007F:2000", "01", 11)
    four = line("0100007F:2000", "0100007F:1000", "01", 22)
    assert orphans(connections(HEAD + six) + connections(HEAD + four), {"11"}) == []


def test_local_addresses() -> None:
    assert is_local("0100007F")
    assert is_local("00000000000000000000000001000000")
    assert not is_local("4D0200C0")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_dead_peers_connection_is_found_until_it_is_closed(reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'x' * 1000); input()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        accepted, _ = server.accept()
        assert len(accepted.recv(1000, socket.MSG_PEEK | socket.MSG_WAITALL)) == 1000
        if reset:
            accepted.sendall(b"never read")  # a process that dies with unread bytes resets the connection
        process.kill()
        process.communicate()
        assert not drained()
        assert accepted.recv(1000) == b"x" * 1000, "what came before the reset can still be read"
        assert not drained(), "reading is not the end of it: it may not be in its place yet"
        accepted.close()
        assert drained()


def test_sockets_that_never_received_anything_do_not_count() -> None:
    with socket.socket() as unconnected, socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM):
        unconnected.bind(("127.0.0.1", 0))
        assert drained()
        assert unconnected.fileno() >= 0


def test_bytes_at_either_end_are_on_their_way() -> None:
    ours, theirs = "0100007F:1000", "0100007F:2000"
    empty = connections(HEAD + line(ours, theirs, "01", 11) + line(theirs, ours, "01", 22))
    unread = connections(HEAD + line(ours, theirs, "01", 11, "00000000:00000005") + line(theirs, ours, "01", 22))
    unsent = connections(HEAD + line(ours, theirs, "01", 11) + line(theirs, ours, "01", 22, "00000007:00000000"))
    assert carrying(empty, empty, {"11"}) == set()
    assert carrying(empty, unread, {"11"}) == carrying(unsent, empty, {"11"}) == {"11"}
    assert carrying(unsent, unread, {"99"}) == set()


def test_bytes_that_a_forked_child_keeps_coming_are_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import os, socket, time; "
            f"s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); s.sendall(b'x' * 1000); "
            "child = os.fork(); print(child, flush=True) if child else time.sleep(60); input()"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        accepted, _ = server.accept()
        assert len(accepted.recv(1000, socket.MSG_PEEK | socket.MSG_WAITALL)) == 1000
        try:
            process.kill()
            process.wait()
            assert not drained()
            accepted.recv(1000)
            assert drained()
        finally:
            os.kill(child, signal.SIGKILL)
            accepted.close()
            process.communicate()


def test_a_busy_connection_need_be_empty_only_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with busy, accepted:
            drain = Drain()
            assert not drain.look()
            busy.sendall(b"more, from the living")
            assert drain.look()
            assert not drained()
