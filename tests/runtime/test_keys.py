"""Cluster keys and the gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from zmq.utils import z85

from pushkv.cli import main
from pushkv.errors import ConfigError
from pushkv.runtime.gate import Gate
from pushkv.runtime.keys import VARIABLE, ClusterKey, load_keys, new_key, parse_key


def ask(gate: Gate, address: str, mechanism: bytes, *credentials: bytes) -> bytes:
    reply = gate.decide([b"1.0", b"7", b"pushkv", address.encode(), b"", mechanism, *credentials])
    assert reply[:2] == [b"1.0", b"7"]
    return reply[2]


def client(key: ClusterKey) -> bytes:
    return z85.decode(key.pair("dial").public)


def test_a_key_reads_back_and_is_never_shown() -> None:
    text = new_key()
    key = parse_key(f" {text}\n")
    assert key == parse_key(text)
    assert text not in repr(key)
    assert key.raw.hex() not in repr(key)
    assert key.fingerprint in repr(key)


def test_roles_and_keys_give_different_pairs() -> None:
    one, other = parse_key(new_key()), parse_key(new_key())
    publics = {one.pair("dial").public, one.pair("listen").public, other.pair("dial").public}
    assert len(publics) == 3
    assert one.pair("dial") == ClusterKey(one.raw).pair("dial")


@pytest.mark.parametrize("text", ["", "x", "pushkv1-", "pushkv1-AAAA", "pushkv1-" + "A" * 42, "pushkv1-é" + "A" * 42])
def test_what_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError, match="keygen") as caught:
        parse_key(text)
    assert len(text) < 9 or text not in str(caught.value)


def test_keys_come_from_the_environment() -> None:
    one, two = new_key(), new_key()
    assert load_keys("", {}) == ()
    assert load_keys("", {VARIABLE: f"{one},{two}"}) == (parse_key(one), parse_key(two))
    with pytest.raises(ConfigError, match="3 cluster keys; at most two"):
        load_keys("", {VARIABLE: ",".join((one, two, new_key()))})


def test_a_key_file_is_made_for_its_owner_and_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    assert main(["keygen", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    (first,) = load_keys(str(file))
    assert main(["keygen", str(file)]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["keygen", str(file), "--rotate"]) == 0
    keys = load_keys(str(file))
    assert (keys[0], len(keys)) == (first, 2)
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(file), "--rotate"]) == 1
    assert "two keys already" in capsys.readouterr().err


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(new_key())
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(str(file))
    file.chmod(0o600)
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "missing"))


def test_keygen_prints_a_key() -> None:
    done = subprocess.run([sys.executable, "-m", "pushkv", "keygen"], capture_output=True, text=True, check=True)
    parse_key(done.stdout)


def test_the_gate_wants_one_of_the_keys() -> None:
    old, new, other = (parse_key(new_key()) for _ in range(3))
    gate = Gate((old, new))
    assert ask(gate, "10.0.0.1", b"CURVE", client(old)) == b"200"
    assert ask(gate, "10.0.0.1", b"CURVE", client(new)) == b"200"
    assert ask(gate, "10.0.0.1", b"CURVE", client(other)) == b"400"
    assert ask(gate, "10.0.0.1", b"CURVE", z85.decode(old.pair("listen").public)) == b"400"
    assert ask(gate, "10.0.0.1", b"NULL") == b"400"
    assert ask(gate, "10.0.0.1", b"PLAIN", b"user", b"word") == b"400"
    assert ask(gate, "10.0.0.1", b"CURVE") == b"400"
    assert gate.counts == {"another cluster key": 2, "no cluster key": 3}


def test_without_keys_only_plain_connections_pass() -> None:
    gate = Gate()
    assert ask(gate, "127.0.0.1", b"NULL") == b"200"
    assert ask(gate, "127.0.0.1", b"CURVE", b"\0" * 32) == b"400"


def test_the_gate_keeps_to_its_addresses() -> None:
    gate = Gate(allow=("10.1.0.0/16", "fd00::7"))
    assert ask(gate, "10.1.2.3", b"NULL") == b"200"
    assert ask(gate, "::ffff:10.1.2.3", b"NULL") == b"200"
    assert ask(gate, "fd00::7", b"NULL") == b"200"
    assert ask(gate, "10.2.0.1", b"NULL") == b"400"
    assert ask(gate, "what", b"NULL") == b"400"
    with pytest.raises(ConfigError, match=r"10\.1\.0\.0/99"):
        Gate(allow=("10.1.0.0/99",))


@pytest.mark.parametrize("request_", [[], [b"1.0"], [b"2.0", b"1", b"", b"", b"", b"NULL"], [b"1.0"] * 5])
def test_a_malformed_request_is_no_crash(request_: list[bytes]) -> None:
    assert Gate().decide(request_)[2] == b"500"


def test_a_key_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"cluster key file {path} is no text"):
        load_keys(str(path))


def test_what_is_no_key_is_found_by_its_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(f"# ours\n{new_key()}\n{new_key()[:20]}\n")
    with pytest.raises(ConfigError, match=rf"{file}, key 2: a cluster key of 20 characters"):
        load_keys(str(file))
    with pytest.raises(ConfigError, match=r"PUSHKV_CLUSTER_KEY, key 1"):
        load_keys(environment={"PUSHKV_CLUSTER_KEY": "half"})


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ConfigError, match="is no file's name"):
        load_keys("/etc/pushkv\0key")
