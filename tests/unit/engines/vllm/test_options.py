"""What `kv_connector_extra_config` may say, and what it may not."""

from typing import Any

import pytest

from prefixkv import HostConfig
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.errors import ConfigError


def test_what_is_said_is_what_is_meant() -> None:
    made = ConnectorOptions.of(
        {
            "name": "decode-3",
            "join_flights": False,
            "recompute_below": 64,
            "policy": "slru",
            "control": {
                "transfer_timeout_s": 5,
                "curve": {"public_key": "p" * 40, "secret_key": "s" * 40},
            },
            "transport": {"interface": "eth0"},
        },
        14579,
    )
    assert made.bind == "tcp://127.0.0.1:14579"
    assert (made.name, made.join_flights, made.recompute_below) == ("decode-3", False, 64)
    assert made.compute_below == 0
    assert ConnectorOptions.of({"name": "d", "compute_below": 2048}, 1).compute_below == 2048
    assert made.control.transfer_timeout_s == 5
    assert made.control.curve is not None
    assert made.control.curve.public_key == "p" * 40
    assert made.transport.interface == "eth0"
    assert (
        ConnectorOptions.of({"name": "p", "bind": "tcp://10.0.0.1:7"}, 1).bind == "tcp://10.0.0.1:7"
    )


@pytest.mark.parametrize(
    ("said", "host"),
    [
        ({}, None),
        ({"host_memory": "4x"}, HostConfig(times=4.0, policy="adaptive")),
        ({"host_memory": "8GiB"}, HostConfig(num_bytes=8 << 30, policy="adaptive")),
        ({"host_memory": "4x", "policy": "lru"}, HostConfig(times=4.0, policy="lru")),
        (
            {"host_memory": "4x", "policy": "lru", "host_policy": "slru"},
            HostConfig(times=4.0, policy="slru"),
        ),
    ],
)
def test_sizes_of_host_memory(said: dict[str, Any], host: HostConfig | None) -> None:
    assert ConnectorOptions.of({"name": "d", **said}, 1).host == host


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, 'no "name"'),
        ({"name": ""}, 'no "name"'),
        ({"name": "d", "policy": "lruu"}, "policy: 'lruu' is not one of .*; the nearest is lru"),
        ({"name": "d", "polcy": "gated"}, "there is no setting polcy; the nearest is policy"),
        ({"name": "d", "recompute_below": -1}, "recompute_below: -1 is below 0"),
        ({"name": "d", "compute_below": -1}, "compute_below: -1 is below 0"),
        (
            {"name": "d", "compute_below": 64, "recompute_below": 32},
            "compute_below: is 64, and recompute_below 32: leave out recompute_below",
        ),
        ({"name": "d", "host_memory": "300"}, "host_memory: '300' is no size: 8GiB, or 4x"),
        ({"name": "d", "host_memory": "much"}, "host_memory: 'much' is no size"),
        ({"name": "d", "host_memory": "0x"}, "host_memory: '0x' is none; leave it out"),
        ({"name": "d", "host_memory": "0GiB"}, "host_memory: '0GiB' is none; leave it out"),
        ({"name": "d", "host_memory": "4x", "host_policy": "lruu"}, "host_policy: 'lruu' is not"),
        ({"name": "d", "host_policy": "lru"}, "host_policy: is 'lru', and there is no host_memory"),
        (
            {"name": "d", "host_memory": "4x", "join_flights": False},
            "join_flights: must be true with host_memory",
        ),
        ({"name": "d", "join_flights": "yes"}, "join_flights: 'yes' is not true or false"),
        ({"name": "d", "control": 5}, "control: 5 is not a table"),
        (
            {"name": "d", "control": {"hartbeat_s": 1}},
            "no setting control.hartbeat_s; the nearest is control.heartbeat_s",
        ),
        ({"name": "d", "control": {"heartbeat_s": 0}}, "control.heartbeat_s: 0 is not above 0"),
        ({"name": "d", "transport": {"window": 0}}, "transport.window: 0 is below 1"),
        (
            {"name": "d", "control": {"curve": {"public_key": "p" * 40}}},
            "control.curve.secret_key: is missing",
        ),
    ],
)
def test_mistakes_are_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ConnectorOptions.of(said, 1)
