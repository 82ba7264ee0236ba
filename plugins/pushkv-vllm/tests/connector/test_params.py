"""What requests may ask for, and how what cannot be followed is told."""

from __future__ import annotations

from typing import Any

import pytest

from pushkv.errors import ConfigError
from pushkv_vllm.params import DecodeLeg, ParamsError, PrefillLeg, answer, parse
from pushkv_vllm.settings import read_settings

DECODE = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.7", "remote_port": 7100}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"something": "else"}])
def test_nothing_of_ours(params: object) -> None:
    assert parse("r", params, {}) is None


def test_both_legs() -> None:
    assert parse("r", {"do_remote_decode": True, "transfer_id": "t"}, {}) == PrefillLeg("t")
    assert parse("r", DECODE, {}) == DecodeLeg("t", "10.0.0.7:7100")


def test_all_that_decode_may_say() -> None:
    more = {"n": 3, "attempt": 2, "deadline": 5, "remote_dp_rank": 4}
    assert parse("2_r", DECODE | more, {}) == DecodeLeg("t", "10.0.0.7:7104", 2, 3, 2, 5.0)


def test_a_sibling_is_told_from_a_name_only_where_n_is_said() -> None:
    assert parse("2_r", DECODE, {}) == DecodeLeg("t", "10.0.0.7:7100")


def test_an_engine_by_its_name_and_a_host_of_version_six() -> None:
    named = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "P0"}
    assert parse("r", named, {"P0": "h:1"}) == DecodeLeg("t", "h:1")
    assert parse("r", DECODE | {"remote_host": "fe80::1"}, {}) == DecodeLeg("t", "[fe80::1]:7100")


def test_what_prefill_answers_is_what_decode_may_be_sent() -> None:
    told = answer("t", "P0", "10.0.0.7", 7100, 2, "r")
    assert parse("d", told, {}) == DecodeLeg("t", "10.0.0.7:7100")
    stock = {"remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size"}
    assert stock <= told.keys()


def test_a_prefill_leg_of_a_router_for_the_stock_connectors() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
    assert parse("r", asked, {}) == PrefillLeg("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer_id": None}, "transfer_id of r is None; give both legs the same text"),
        ({"transfer_id": ""}, "transfer_id of r is ''"),
        ({"transfer_id": "x" * 513}, "1 to 512 characters"),
        ({"transfer_id": "a\nb"}, "transfer_id of r"),
        ({"do_remote_decode": True}, "at once; give one of them"),
        ({"remote_host": None}, r"names prefill engine None and remote_host None; .*known: P1"),
        ({"remote_host": "http://x"}, "remote_host 'http://x'"),
        ({"remote_port": None}, "remote_port of r is None"),
        ({"remote_port": 70000}, "remote_port of r is 70000"),
        ({"remote_port": True}, "remote_port of r is True"),
        ({"remote_dp_rank": -1}, "remote_dp_rank of r is -1"),
        ({"n": 0}, "n of r is 0; give a whole number from 1"),
        ({"n": "2"}, "n of r is '2'"),
        ({"deadline": 0}, "deadline of r is 0"),
        ({"deadline": "soon"}, "deadline of r is 'soon'"),
    ],
)
def test_what_cannot_be_followed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        parse("r", DECODE | changes, {"P1": "h:1"})


def test_parameters_that_are_no_mapping_and_a_sibling_too_many() -> None:
    with pytest.raises(ParamsError, match=r"are \[1\]; give a mapping"):
        parse("r", [1], {})
    with pytest.raises(ParamsError, match="sibling 2 of n = 2"):
        parse("2_r", DECODE | {"n": 2}, {})


class TestSettings:
    def test_defaults_stay_on_this_machine(self) -> None:
        endpoint = read_settings(None).endpoint("P0", 1, 0, "cpu")
        assert (endpoint.bind, endpoint.advertise, endpoint.engine, endpoint.rank) == ("127.0.0.1:0", "", "P0", 1)

    def test_beyond_it(self) -> None:
        nixl = {"backend": "LIBFABRIC"}
        where = {"host": "0.0.0.0", "advertise": "10.0.0.7", "key_file": "k"}
        settings = read_settings({**where, "nixl": nixl, "silence": 20, "stall": 30})
        endpoint = settings.endpoint("P0", 0, 7100, "cpu")
        assert (endpoint.bind, endpoint.advertise) == ("0.0.0.0:7100", "10.0.0.7:0")
        assert endpoint.nixl.backend == "LIBFABRIC"
        assert (endpoint.silence, endpoint.stall) == (20, 30)
        assert endpoint.free_tail

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"prot": 1}, "no setting 'prot'; did you mean 'port'"),
            ({"deadline": 0}, "deadline is 0"),
            ({"silence": -1}, "silence is -1"),
            ({"port": 70000}, "port is 70000"),
            ({"idle_wait": 1}, "idle_wait is 1"),
            ({"switch_interval": 1}, "switch_interval is 1"),
            ({"layout": "HND"}, "layout"),
        ],
    )
    def test_what_is_wrong_is_named(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_settings(given)


@pytest.mark.parametrize(
    ("extra", "device", "way", "slots"),
    [
        ({}, "cpu", "direct", None),
        ({}, "cuda", "auto", (4 << 28, 1 << 28)),
        ({"landing": "direct"}, "cuda", "direct", None),
        ({"landing": "landing"}, "cpu", "landing", None),
        ({"slot_bytes": 1 << 20}, "cuda", "auto", (4 << 20, 1 << 20)),
        ({"landing": "auto", "landing_bytes": 1 << 25, "slot_bytes": 1 << 20}, "cpu", "auto", (1 << 25, 1 << 20)),
    ],
)
def test_gpus_get_landing_slots_and_others_none(
    extra: dict[str, object], device: str, way: str, slots: tuple[int, int] | None
) -> None:
    endpoint = read_settings(extra).endpoint("P0", 0, 0, device)
    assert endpoint.landing == way
    if slots is not None:
        assert (endpoint.landing_bytes, endpoint.slot_bytes) == slots
