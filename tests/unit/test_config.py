"""Every setting out of its range is refused by a message that names it; the defaults are taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from prefixkv.admission import make_admission
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import (
    ComputeConfig,
    ControlConfig,
    CurveConfig,
    DecodeConfig,
    HostConfig,
    KVEventsConfig,
    ModelConfig,
    PrefillConfig,
    TransportConfig,
)
from prefixkv.errors import CallerError, ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.table import PageTable
from prefixkv.serving.router import BoundedAffinityRouter

KEY = "k" * 40
# For each setting with a bound, a value below it.
TOO_LOW: dict[type, dict[str, Any]] = {
    ControlConfig: {
        **dict.fromkeys(
            [
                "heartbeat_s",
                "suspect_after_s",
                "forget_after_s",
                "resend_s",
                "connect_timeout_s",
                "bootstrap_timeout_s",
                "waiting_timeout_s",
                "transfer_timeout_s",
                "longest_wait_s",
                "ack_timeout_s",
                "drain_timeout_s",
                "parked_timeout_s",
                "max_parked_per_peer",
                "max_peers",
                "max_queued_frames",
            ],
            0,
        ),
        "max_aux_bytes": -1,
        "fence_settle_s": -1e-9,
    },
    TransportConfig: {
        **dict.fromkeys(["post_bytes", "post_descriptors", "window"], 0),
        **dict.fromkeys(["lease_bytes", "copy_threads"], 0),
        "staging_bytes": (16 << 20) - 1,
        "max_bytes_per_s": -1,
        "backend": "ucx",
        **dict.fromkeys(["polling", "renew_grace_s"], -1e-9),
    },
    DecodeConfig: {
        "max_running": 0,
        "reserve_tokens": -1,
        "failure_policy": "hope",
        "max_retries": -1,
        "name": "",
        "patience_s": -1e-9,
        "waiting_timeout_s": 0,
        "evict_reserve": -1e-9,
        "reserved_pages": -1,
        "prefill_share": -1e-9,
        "record": "",
        "record_bytes": 4095,
        "record_block_tokens": 0,
        "checkpoints": -1,
        "checkpoint_tokens": 0,
    },
    ComputeConfig: {
        "below": -1,
        "down_below": -1,
        "chunk_tokens": 0,
        "itl_share": 0,
        "ask": "never",
    },
    HostConfig: {
        "times": 0,
        "num_bytes": -1,
        "num_pages": -1,
        "copy_threads": 0,
        "piece_bytes": -1,
    },
    PrefillConfig: {
        "max_running": 0,
        "follow_s": -0.1,
        "reserved_pages": -1,
        "checkpoints": -1,
        "checkpoint_tokens": 0,
        "name": "x" * 257,
    },
    ModelConfig: {},
    KVEventsConfig: {
        "dp_rank": -1,
        "keep_batches": -1,
        "keep_bytes": -1,
        "max_backlog_pages": 0,
        "heartbeat_s": 0.0,
        "endpoint": "",
        "replay_endpoint": "127.0.0.1:5558",
        "snapshot_endpoint": "tcp://127.0.0.1:99999",
    },
}


@pytest.mark.parametrize(
    ("config", "field", "near", "far"),
    [
        (DecodeConfig, "policy", "lruu", "?"),
        (PrefillConfig, "policy", "adaptiv", ""),
        (DecodeConfig, "admission", "hitaware", "lru"),
    ],
)
def test_a_policy_that_no_one_has_registered_is_refused_with_the_nearest(
    config: type, field: str, near: str, far: str
) -> None:
    named = {"lruu": "lru", "adaptiv": "adaptive", "hitaware": "hit_aware"}[near]
    with pytest.raises(ConfigError) as caught:
        config(**{field: near})
    assert str(caught.value).startswith(f"{field}: {near!r} is not one of ")
    assert str(caught.value).endswith(f"; the nearest is {named}")
    with pytest.raises(ConfigError, match=rf"^{field}: '.*' is not one of "):
        config(**{field: far})
    config(**{field: named})
    # An object is taken as it is: it has no name to look up.
    made = {"policy": make_policy, "admission": make_admission}[field](named)
    assert getattr(config(**{field: made}), field) is made


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [(config, *item) for config, fields in TOO_LOW.items() for item in fields.items()],
)
def test_a_setting_out_of_range_is_named(config: type, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        config(**{field: value})
    assert isinstance(caught.value, CallerError)
    if isinstance(value, (int, float)):
        with pytest.raises(ConfigError, match=field):
            config(**{field: float("nan")})


WRONG: dict[str, list[Any]] = {
    "int": [None, "1", 1.5, float("nan"), True, 2**62],
    "int | None": ["1", 1.5, float("nan"), True, 2**62],
    "Retarget | None": [7, "tcp://q"],
    "float": [None, "1", float("nan"), True],
    "float | None": ["1", float("nan"), True],
    "bool": [None, "no", 1],
    "str": [None, 7, b"name"],
    "str | Path | None": [7, b"path"],
    "str | Policy": [None, 7, b"lru"],
    "Literal": [None, 7, "hope"],
    "CurveConfig | None": [7, KEY],
    "ModelConfig": [None, "llama"],
    "Mapping[str, str]": [None, "--block-size", ["page_size"], {"page_size": 16}],
    "ControlConfig": [None, TransportConfig()],
    "TransportConfig": [None, ControlConfig()],
    "KVEventsConfig | None": [7, "tcp://127.0.0.1:5557"],
    "ComputeConfig | None": [7, 2048],
    "HostConfig | None": [7, "8GiB"],
    "str | Policy | None": [7, b"lru"],
}


def kind_of(hint: Any) -> str:
    """The type of a field without its bounds, as `WRONG` has it.

    >>> from prefixkv.settings import Count
    >>> kind_of(Count | None)
    'int | None'
    """
    hint = getattr(hint, "__origin__", hint) if get_origin(hint) is Annotated else hint
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(kind_of, get_args(hint)))
    if get_origin(hint) is Literal:
        return "Literal"
    if get_origin(hint) is not None:
        return str(hint).replace("collections.abc.", "")
    return "None" if hint is NoneType else str(hint.__name__)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (config, name, value)
        for config in TOO_LOW
        for name, hint in get_type_hints(config, include_extras=True).items()
        if name != "admission"  # a name, or any object: `make_admission` looks at it
        for value in WRONG[kind_of(hint)]
    ],
)
def test_a_setting_of_another_type_or_too_large_is_named(
    config: type, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=field):
        config(**{field: value})


@pytest.mark.parametrize("name", ["adaptive", "priority"])
def test_a_policy_s_setting_that_is_no_number_is_named(name: str) -> None:
    kind = type(make_policy(name))
    names = {"adaptive": "trust", "priority": "ttl_s"}
    for value in ("long", float("nan"), -1.0):
        with pytest.raises(ConfigError, match=names[name]):
            kind(**{names[name]: value})


@pytest.mark.parametrize("pages", [0, -1, 2**31, 1.5, None, "8", True, float("nan")])
def test_a_number_of_pages_is_whole_and_in_range(pages: Any) -> None:
    for make in (
        PageAllocator, lambda n: PageTable(n, 1), lambda n: PageTable(1, n),
        lambda n: RadixCache(page_size=n),
        lambda n: KVPool.create(n, 16, 1, 1, 8),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"(num_pages|max_|page_size).* is "):
            make(pages)


def test_a_rate_of_a_router_is_a_number() -> None:
    with pytest.raises(ConfigError, match="fade_s: 'long' is not a number"):
        BoundedAffinityRouter(fade_s="long")  # type: ignore[arg-type]


def test_every_number_and_choice_has_a_bound() -> None:
    unbounded = {
        "bind",
        "cache",
        "policy",
        "admission",
        "retarget",
        "curve",
        "network_is_isolated",
        "interface",
        "prove_death",
        "topic",
        "medium",
        "epoch_frames",
        "checkpoint_blocks",
        "kv_events",
        "compute",
        "host_memory",
        "model",
        "control",
        "transport",
    }
    for config, fields in TOO_LOW.items():
        if fields:
            assert {field.name for field in dataclasses.fields(config)} - unbounded == set(
                fields
            ), config
        config()  # the defaults are within their own bounds


def test_a_peer_is_suspect_only_after_more_than_a_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"suspect_after_s: 2.0 is not above heartbeat_s, 2.0"):
        ControlConfig(heartbeat_s=2.0, suspect_after_s=2.0)


@pytest.mark.parametrize("field", ["public_key", "secret_key", "server_key"])
def test_a_key_of_another_length_is_named(field: str) -> None:
    keys = {"public_key": KEY, "secret_key": KEY}
    with pytest.raises(ConfigError, match=f"{field}: has 39 characters, fewer than 40") as caught:
        CurveConfig(**{**keys, field: KEY[:-1]})
    assert KEY[:-1] not in str(caught.value), "keys are not for logs"
    CurveConfig(**keys)


@pytest.mark.parametrize("config", TOO_LOW)
def test_settings_do_not_change(config: type) -> None:
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(config)[0].name, 1)


def test_the_default_policy_is_the_caches() -> None:
    assert DecodeConfig().policy == PrefillConfig().policy == DEFAULT_POLICY


def test_decode_waits_for_memory_as_long_as_for_a_peer_unless_it_is_told_otherwise() -> None:
    control = ControlConfig(longest_wait_s=70.0)
    assert DecodeConfig(control=control).admission_wait_s == 70.0
    assert DecodeConfig(control=control, waiting_timeout_s=60.0).admission_wait_s == 60.0


def test_no_more_patience_counts_than_half_of_the_time_to_wait() -> None:
    assert DecodeConfig().admission_patience_s == 5.0
    assert DecodeConfig(waiting_timeout_s=4.0).admission_patience_s == 2.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DecodeConfig(control=ControlConfig(longest_wait_s=60.0), waiting_timeout_s=75.0),
         "waiting_timeout_s: 75.0 is above control.longest_wait_s, 60.0"),
        (lambda: DecodeConfig(waiting_timeout_s=math.inf), "inf is above control.longest"),
        (lambda: PrefillConfig(follow_s=601.0), "follow_s: 601.0 is above control.longest_wait_s"),
        (lambda: ControlConfig(forget_after_s=4.0), "suspect_after_s: 5.0 is above forget"),
        (lambda: ControlConfig(heartbeat_s=5.0), "suspect_after_s: 5.0 is not above heartbeat_s"),
        (lambda: ControlConfig(resend_s=31.0), "resend_s: 31.0 is above bootstrap_timeout_s"),
        (lambda: ControlConfig(resend_s=5.0, ack_timeout_s=4.0), "5.0 is above ack_timeout_s, 4.0"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_reserve_is_a_part_of_the_pool() -> None:
    assert DecodeConfig().for_page_manager(65_536)["evict_reserve_pages"] == 256
    assert DecodeConfig(evict_reserve=0).for_page_manager(65_536)["evict_reserve_pages"] == 0
    with pytest.raises(ConfigError, match=r"evict_reserve: 1.5 is above 1"):
        DecodeConfig(evict_reserve=1.5)
    with pytest.raises(ConfigError, match=r"prefill_share: 1.5 is above 1"):
        DecodeConfig(prefill_share=1.5)


@pytest.mark.parametrize("kind", [DecodeConfig, PrefillConfig])
def test_a_class_in_place_of_a_policy_is_told_from_an_object(kind: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"policy: Adaptive is a class, give an object: Adap\w+\(\)"
    ):
        kind(policy=Adaptive)
    with pytest.raises(
        ConfigError,
        match=r"policy: 'mine.own:Deep' names a class, .* object: Deep\(\), of module mine",
    ):
        kind(policy="mine.own:Deep")
    with pytest.raises(ConfigError, match="policy: 'adaptive:trust=2' is not one of"):
        kind(policy="adaptive:trust=2")


def test_a_class_in_place_of_an_admission_policy_is_told_from_an_object() -> None:
    with pytest.raises(ConfigError, match=r"admission: Fifo is a class, give an object: Fifo\(\)"):
        DecodeConfig(admission=type("Fifo", (), {}))  # type: ignore[arg-type]
