"""Settings: typos, values out of range, and what they become."""

from __future__ import annotations

from typing import Any

import pytest

from pushkv import EndpointConfig, Limits, NixlConfig, read_config
from pushkv.config import LONGEST
from pushkv.errors import ConfigError


def test_plain_data_becomes_a_config() -> None:
    config = read_config(
        EndpointConfig,
        {
            "engine": "p",
            "rank": "3",
            "peers": ["a", "b"],
            "nixl": {"backend": "LIBFABRIC", "parameters": {"num_threads": "2"}},
            "limits": {"deadline": 30},
        },
    )
    assert config == EndpointConfig(
        engine="p",
        rank=3,
        peers=("a", "b"),
        nixl=NixlConfig(backend="LIBFABRIC", parameters={"num_threads": "2"}),
        limits=Limits(deadline=30.0),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engin": "p"}, "There is no setting 'engin'; did you mean 'engine'?"),
        ({"engine": "p", "advertize": "h:1"}, "There is no setting 'advertize'; did you mean 'advertise'?"),
        ({"engine": "p", "nixl": {"backnd": "UCX"}}, "There is no setting 'nixl.backnd'; did you mean 'backend'?"),
        ({"engine": "p", "limits": {"dedline": 1}}, "There is no setting 'limits.dedline'; did you mean 'deadline'?"),
        ({"engine": "p", "zzz": 1}, "There is no setting 'zzz'; the settings are engine, rank, bind"),
        ({"engine": "p", 7: 1}, "There is no setting '7'"),
        ({}, "Object missing required field `engine`; see pushkv.config.EndpointConfig."),
        ({"engine": "p", "rank": "first"}, "Expected `int`, got `str` - at `$.rank`"),
        ({"engine": "p", "transport": "nccl"}, "Invalid enum value 'nccl' - at `$.transport`"),
        ({"engine": "p", "nixl": {"backend": "MOONCAKE"}}, "Invalid enum value 'MOONCAKE' - at `$.nixl.backend`"),
        ({"engine": "p", "limits": 3}, "`$.limits` (3 was given)"),
        ({"engine": "p", "limits": {"lease": "x"}}, "`$.limits.lease` ('x' was given)"),
        ({"engine": "p", "transport": "nccl"}, "('nccl' was given: choose 'nixl' or 'memory')"),
        ({"engine": "p", "peers": ["a", 1.5]}, "`$.peers[1]`"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(EndpointConfig, settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": ""}, "engine is ''; give a name of 1 to 200 characters."),
        ({"engine": "x" * 201}, "give a name of 1 to 200 characters."),
        ({"rank": -1}, "rank is -1; count ranks from 0."),
        ({"silence": 0}, "silence is 0; give seconds above 0, at most a day."),
        ({"stall": float("nan")}, "stall is nan; give seconds above 0, at most a day."),
        ({"connect_timeout": -1.0}, "connect_timeout is -1.0"),
        ({"transport": "nccl"}, "transport is 'nccl'; choose 'nixl' or 'memory'."),
        ({"limits": Limits(resend=0)}, "limits.resend is 0; give a number above 0."),
        ({"limits": Limits(window=0)}, "limits.window is 0"),
        ({"limits": Limits(deadline=LONGEST + 1)}, "limits.deadline is 86401.0 s; give at most a day (86400 s)."),
        ({"limits": Limits(lease=1e9)}, "limits.lease is 1000000000.0 s"),
        ({"limits": Limits(resend_most=float("inf"))}, "limits.resend_most is inf s; give at most a day"),
        ({"limits": Limits(window=1.5)}, "limits.window is 1.5: expected `int`, got `float`"),  # type: ignore[arg-type]
        ({"limits": None}, "limits is None: expected"),
        ({"rank": 1 << 31}, "rank is 2147483648"),
        ({"rank": "0"}, "rank is '0': expected `int`, got `str`"),
        ({"engine": 5}, "engine is 5: expected `str`, got `int`"),
        ({"engine": "\ud800"}, "give a name of 1 to 200 characters"),
        ({"peers": "10.0.0.1"}, "peers is '10.0.0.1': expected `array`, got `str`"),
        ({"allow": "10.0.0.0/8"}, "allow is '10.0.0.0/8': expected `array`, got `str`"),
        ({"quarantine_limit": float("nan")}, "quarantine_limit is nan; give a share"),
        ({"idle_poll": float("inf")}, "idle_poll is inf"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EndpointConfig(**{"engine": "p", **values})
    assert message in str(error.value)


def test_an_unknown_nixl_backend() -> None:
    with pytest.raises(ConfigError, match=r"nixl\.backend is 'GDS'; choose 'UCX' or 'LIBFABRIC'"):
        NixlConfig(backend="GDS")  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [None, "engine", [("engine", "p")]])
def test_settings_that_are_no_mapping(settings: Any) -> None:
    with pytest.raises(ConfigError, match="give a mapping of names to values"):
        read_config(EndpointConfig, settings)


def test_a_negative_delay_of_the_progress_thread() -> None:
    with pytest.raises(ConfigError, match=r"nixl\.progress_thread_delay_us is -1; give 0 or more"):
        NixlConfig(progress_thread_delay_us=-1)


def test_values_out_of_range_are_found_in_plain_data_too() -> None:
    with pytest.raises(ConfigError, match=r"limits\.resend is 0"):
        read_config(EndpointConfig, {"engine": "p", "limits": {"resend": 0}})
