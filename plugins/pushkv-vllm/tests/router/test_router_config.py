"""The router's settings and command line."""

from __future__ import annotations

import pytest

from pushkv.errors import ConfigError
from pushkv_vllm.router.cli import main, read_config
from pushkv_vllm.router.config import (
    DecodeServer,
    Mode,
    PrefillServer,
    RouterConfig,
    Shape,
    parse_decode,
    parse_prefill,
)

P = PrefillServer("http://p:1", "p", 7100)
D = DecodeServer("http://d:1")


def test_servers_are_read() -> None:
    text = "http://10.0.0.1:8100/,kv=tcp://10.0.0.1:7100,engine=P0,tp=2,dp=4"
    assert parse_prefill(text) == PrefillServer("http://10.0.0.1:8100", "10.0.0.1", 7100, "P0", 2, 4)
    assert parse_prefill("https://p,kv=[fe80::1]:1") == PrefillServer("https://p", "fe80::1", 1)
    assert parse_decode("http://10.0.0.2:8200") == DecodeServer("http://10.0.0.2:8200")


@pytest.mark.parametrize(("text", "word"), [
    ("10.0.0.1:8100,kv=p:1", "10.0.0.1:8100"),
    ("ftp://p,kv=p:1", "ftp"),
    ("http://,kv=p:1", "http://"),
    ("http://p?x=1", "x=1"),
    ("http://p,kv=p", "'p'"),
    ("http://p,kv=p:99999", "99999"),
    ("http://p,kv=p:0", "p:0"),
    ("http://p,tp=two", "'two'"),
    ("http://p,dp=0", "'0'"),
    ("http://p,port=1", "port=1"),
    ("http://p,tp", "'tp'"),
    ("http://p,tp=1,tp=2", "tp=2"),
])  # fmt: skip
def test_servers_that_cannot_be_read(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_prefill(text)
    assert word in str(failure.value)


@pytest.mark.parametrize(("settings", "word"), [
    ({"prefill": ()}, "0 prefill"),
    ({"decode": ()}, "0 decode"),
    ({"prefill": (P, P)}, "2 times"),
    ({"decode": (DecodeServer(P.url),)}, "2 times"),
    ({"attempts": 0}, "attempts is 0"),
    ({"silence": 0.0}, "silence is 0.0"),
    ({"max_queue": -1}, "max_queue is -1"),
    ({"prefill": (PrefillServer("http://p:1"),)}, "kv=HOST:PORT"),
    ({"shape": Shape.STOCK}, "engine=ID"),
])  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError) as failure:
        RouterConfig(**{"prefill": (P,), "decode": (D,)} | settings)  # type: ignore[arg-type]
    assert word in str(failure.value)


def test_in_sequence_prefill_tells_where_its_connector_is() -> None:
    assert RouterConfig((PrefillServer("http://p:1"),), (D,), mode=Mode.SEQUENTIAL).prefill[0].kv_port == 0


def test_the_command_line() -> None:
    config = read_config(["--prefill", "http://p:1,kv=p:7100", "--prefill", "http://q:1,kv=q:7100", "--decode",
                          "http://d:1", "--mode", "sequential", "--shape", "stock", "--max-queue", "7", "--silence",
                          "1.5", "--forward", "X-A", "--decode-alone"])  # fmt: skip
    assert [server.url for server in config.prefill] == ["http://p:1", "http://q:1"]
    assert (config.mode, config.shape, config.max_queue, config.silence) == (Mode.SEQUENTIAL, Shape.STOCK, 7, 1.5)
    assert (config.forward, config.decode_alone) == (("X-A",), True)


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prefill", "http://p:1", "--decode", "http://d:1"]) == 2
    assert "kv=HOST:PORT" in capsys.readouterr().err
