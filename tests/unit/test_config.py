"""Every setting out of its range is refused by a message that names it; the defaults are taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from prefixkv import config
from prefixkv.admission import make_admission
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import ControlConfig, CurveConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.table import PageTable
from prefixkv.settings import Field, fields_of
from tests.unit.test_settings import outside

KEY = "k" * 40
CONFIGS = [one for one in vars(config).values() if dataclasses.is_dataclass(one)]
FIELDS = [
    pytest.param(kind, field, id=f"{kind.__name__}-{field.name}")
    for kind in CONFIGS
    for field in fields_of(kind)  # type: ignore[arg-type]
    if not field.is_open  # a name or any object: `make_admission` looks at it
]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_setting_of_another_type_or_out_of_its_bounds_is_named(kind: Any, field: Field) -> None:
    """Each bound is in docs/reference/settings.md, which is written from the code."""
    needed = {one.name: KEY for one in fields_of(kind) if one.default is dataclasses.MISSING}
    bases = {one.base for one in field.kinds}
    wrong: list[Any] = [object(), b"name", [3], *([] if bases & {int, float, bool} else [7])]
    if bases & {int, float}:
        wrong += ["1", math.nan, True, *([] if float in bases else [1.5, 2**62])]

    def is_refused(value: Any) -> None:
        with pytest.raises(ConfigError, match=field.name) as caught:
            kind(**needed | {field.name: value})
        assert isinstance(caught.value, CallerError)

    for value in wrong:
        is_refused(value)
    if (values := outside(field)) is not None:
        settings(max_examples=10, deadline=None, database=None)(given(values)(is_refused))()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_defaults_are_within_their_bounds_and_settings_do_not_change(kind: Any) -> None:
    needed = {one.name: KEY for one in fields_of(kind) if one.default is dataclasses.MISSING}
    made = kind(**needed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, fields_of(kind)[0].name, 1)


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


def test_a_policy_s_setting_that_is_no_number_is_named() -> None:
    kind: Any = type(make_policy("adaptive"))
    for value in ("long", float("nan"), -1.0):
        with pytest.raises(ConfigError, match="trust"):
            kind(trust=value)


@pytest.mark.parametrize("pages", [0, -1, 2**31, 1.5, None, "8", True, float("nan")])
def test_a_number_of_pages_is_whole_and_in_range(pages: Any) -> None:
    for make in (
        PageAllocator, lambda n: PageTable(n, 1), lambda n: PageTable(1, n),
        lambda n: RadixCache(page_size=n),
        lambda n: KVPool.create(n, 16, 1, 1, 8),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"(num_pages|max_|page_size).* is "):
            make(pages)


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
    assert DecodeConfig().for_page_manager(65_536).evict_reserve_pages == 256
    assert DecodeConfig(evict_reserve=0).for_page_manager(65_536).evict_reserve_pages == 0
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
