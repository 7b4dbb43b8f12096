"""Settings from a file, the environment, JSON, options and constructors: the same names, bounds
and words from each. One out of its range is refused by a message that names it; the defaults are
taken."""

import dataclasses
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv import config
from prefixkv.admission import make_admission
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cli.main import run_command
from prefixkv.config import ControlConfig, CurveConfig, DecodeConfig, KVEventsConfig, PrefillConfig
from prefixkv.engines.sglang.transfer_options import TransferOptions
from prefixkv.errors import CallerError, ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.table import PageTable
from prefixkv.serving.config import (
    KINDS,
    OPTION_NAMES,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    ProxyConfig,
    ServeConfig,
)
from prefixkv.settings import (
    Field,
    Setting,
    as_environ,
    convert,
    fields_of,
    load,
    read_tables,
    settings_of,
)


@pytest.mark.parametrize("kind", [*KINDS.values(), ServeConfig])
def test_every_setting_has_a_name_of_its_own_and_its_default(kind: type) -> None:
    settings = settings_of(kind)
    for names in ([one.name for one in settings], [one.key for one in settings]):
        assert len(set(names)) == len(names) > 20
    given = {one.name: one.default for one in settings if one.default is not None}
    in_use = {
        name: value
        for name, value in given.items()
        if not name.startswith(("kv_events", "control_curve", "compute_", "host_memory_"))
        or kind is ServeConfig
    }
    assert load(kind, options=in_use) == load(kind) == kind()


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_options_that_a_refusal_names_are_there(kind: type) -> None:
    flags = {one.option for one in settings_of(kind)}
    named = {flag for one in OPTION_NAMES.values() for flag in re.findall(r"--[a-z-]+", one)}
    assert "--page-size" in named
    assert named <= flags


def test_options_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(
        'name = "d"\npage_size = 8\nmax_running = 5\n'
        "[control]\nheartbeat_s = 2\nsuspect_after_s = 9\n[limits]\nmax_body_bytes = 10\n"
    )
    environ = {"PREFIXKV_PAGE_SIZE": "32", "PREFIXKV_CONTROL_HEARTBEAT_S": "3", "OTHER": "x",
               "PREFIXKV_CACHE": "false", "PREFIXKV_OF_OTHERS": "x"}  # fmt: skip
    made = load(DecodeWorkerConfig, file, environ, {"page_size": 64, "num_pages": None})
    assert (made.node.name, made.worker.page_size, made.worker.num_pages) == ("d", 64, 1024)
    assert (made.node.max_running, made.node.cache) == (5, False)
    control = made.node.control
    assert (control.heartbeat_s, control.suspect_after_s) == (3, 9)
    assert made.worker.listen.limits.max_body_bytes == 10
    assert made.node.kv_events is None
    set_one = load(DecodeWorkerConfig, None, {"PREFIXKV_KV_EVENTS_TOPIC": "t"})
    assert set_one.node.kv_events == KVEventsConfig(topic="t")


def test_a_file_may_have_the_names_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    key = "x" * 40
    file.write_text(
        f"[control.curve]\npublic_key = '{key}'\nsecret_key = '{key}'\n"
        f"[control.curve.allowed_clients]\n'{key}' = 'decode-0'\n"
    )
    curve = load(PrefillWorkerConfig, file).node.control.curve
    assert curve is not None
    assert curve.allowed_clients == {key: "decode-0"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("num_page = 3", "there is no setting num_page; the nearest is num_pages"),
        ("nonsense = 3", "there is no setting nonsense$"),
        ("heartbeat_s = 3", "there is no setting heartbeat_s; the nearest is control.heartbeat_s"),
        ("[control]\nbeat_s = 3", "there is no setting control.beat_s; the nearest is control.hea"),
        ("[contrl]\nresend_s = 3", "there is no table contrl; the nearest is control"),
        ("[limits.control]\nresend_s = 3", "no table limits.control; the nearest is control"),
        ("control = 3", "control: 3 is not a table of settings"),
        ("policy = 'lruu'", r"worker.toml: policy: 'lruu' is not one of .*; the nearest is lru$"),
        ("model = 'm'\nseed = 3", "worker.toml: seed: 3 is of the small model, and model is 'm'"),
        (
            "[limits]\nmax_requests_per_client = 3",
            "worker.toml: limits.max_requests_per_client: is of a front or a proxy",
        ),
        ("[model]\nmodel = 'x'", "model: a table is not a string"),
        ("page_size = '8'", "page_size: '8' is not a whole number"),
        ("page_size = true", "page_size: True is not a whole number"),
        ("cache = 1", "cache: 1 is not true or false"),
        ("policy = 1", "policy: 1 is not a string"),
        ("page_size = 0", "page_size: 0 is below 1"),
        ("max_running = 0", "max_running: 0 is below 1"),
        ("port = 70000", "port: 70000 is above 65535"),
        ("[control.curve]", "control.curve.public_key: is missing"),
        ("[control]\nresend_s = nan", "control.resend_s: nan is not a number"),
        ("[control]\nresend_s = 31", "control.resend_s: 31.0 is above bootstrap_timeout_s, 30.0"),
        ("host = '0.0.0.0'", "host: '0.0.0.0' may be reached .* it needs api_key"),
        ("layout = 'x'", "layout: 'x' is not one of layer_major, page_major"),
        ("dtype = 'x'", "dtype: 'x' is not one of float32, bfloat16, float16"),
        ("page_size = ", "worker.toml: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load(PrefillWorkerConfig, file)


def test_what_is_wrong_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^PREFIXKV_PAGE_SIZE: 'many' is not a whole number$"):
        load(ServeConfig, None, {"PREFIXKV_PAGE_SIZE": "many"})
    with pytest.raises(ConfigError, match=r"^PREFIXKV_PAGE_SIZE: '\\udcff' is not a whole number$"):
        load(ServeConfig, None, {"PREFIXKV_PAGE_SIZE": os.fsdecode(b"\xff")})
    with pytest.raises(ConfigError, match=r"^PREFIXKV_CACHE: 'yes' is not true or false$"):
        load(DecodeWorkerConfig, None, {"PREFIXKV_CACHE": "yes"})
    with pytest.raises(ConfigError, match="No such file"):
        load(ServeConfig, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"^control\.curve\.secret_key: is missing$"):
        load(PrefillWorkerConfig, None, {"PREFIXKV_CONTROL_CURVE_PUBLIC_KEY": "x" * 40})
    with pytest.raises(ConfigError, match=r"^--tokenizer-folder: is of the small model"):
        load(ServeConfig, options={"model": "m", "tokenizer_folder": "f"})
    with pytest.raises(ConfigError, match=r"^--decode: 0 is below 1$"):
        load(ServeConfig, options={"decode": 0})
    with pytest.raises(ConfigError, match=r"^PREFIXKV_POLICY: 'lruu' is not one of .* is lru$"):
        load(PrefillWorkerConfig, None, {"PREFIXKV_POLICY": "lruu"})
    with pytest.raises(ConfigError, match=r"^--admission: 'fifoo' is not one of .* is fifo$"):
        load(DecodeWorkerConfig, options={"admission": "fifoo"})
    with pytest.raises(ConfigError, match=r"^decode: policy: 'lruu' is not one of .* is lru$"):
        convert(DecodeConfig, {"policy": "lruu"}, "decode")
    with pytest.raises(ConfigError, match=r"^decode: max_retries: -1 is below 0$"):
        convert(DecodeConfig, {"max_retries": -1}, "decode")
    with pytest.raises(ConfigError, match=r"^decode: control.suspect_after_s: 1.0 is not"):
        convert(DecodeConfig, {"control": {"suspect_after_s": 1}}, "decode")
    with pytest.raises(ConfigError, match=r"^decode: a list is not a table of settings$"):
        convert(DecodeConfig, [3], "decode")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workers = 3", "there is no setting workers"),
        ("[workers.decode]", "there is no table workers"),
        ("ray_cpus = 3", "ray_cpus: is of --ray, which is not set"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_serve_s_file_is_named(
    tmp_path: Path, text: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert run_command(["serve", "--config", str(file)]) == 2
    assert capfd.readouterr().err.startswith(f"prefixkv: {file}: {why}")


def test_an_error_does_not_show_a_key() -> None:
    for wrong in ({"secret_key": "hush"}, {"secret_key": ["hush"], "public_key": "x" * 40}):
        with pytest.raises(ConfigError) as caught:
            convert(ControlConfig, {"curve": wrong}, "control")
        assert "hush" not in str(caught.value)


def test_json_may_leave_out_a_table_by_null() -> None:
    assert convert(ControlConfig, {"curve": None}, "x") == ControlConfig()
    assert convert(DecodeConfig, {"max_retries": None, "kv_events": None}, "x") == DecodeConfig()


def test_settings_travel_to_a_child_as_variables() -> None:
    key = "x" * 40
    sent = {"cache": False, "page_size": 4, "api_key": "k", "control_heartbeat_s": 0.5,
            "control_curve_public_key": key, "control_curve_secret_key": key,
            "control_curve_allowed_clients": {key: "decode-0"}}  # fmt: skip
    environ = as_environ(DecodeWorkerConfig, sent)
    assert environ["PREFIXKV_CACHE"] == "false"
    made = load(DecodeWorkerConfig, None, {**os.environ, **environ})
    assert (made.node.cache, made.worker.page_size) == (False, 4)
    assert (made.worker.listen.api_key, made.node.control.heartbeat_s) == ("k", 0.5)
    assert made.node.control.curve is not None
    assert made.node.control.curve.allowed_clients == {key: "decode-0"}


# --- every bound, from every source ---------------------------------------------------------------

SETTINGS = {
    one.path: pytest.param(role, one, id=f"{role}-{one.path}")
    for role, kind in KINDS.items()
    for one in settings_of(kind)
}


def outside(field: Field) -> st.SearchStrategy[Any] | None:
    """Values of a field's type that are just, or far, out of its bounds; None: it has none."""
    tries: list[st.SearchStrategy[Any]] = []
    for kind in field.kinds:
        if get_origin(kind.base) is Literal:
            tries.append(st.sampled_from(["hope", "?"]))
        for meta in kind.metas:
            number = st.integers if kind.base is int else partial(st.floats, allow_infinity=False)
            if meta.ge is not None:
                tries.append(number(-(2**40), meta.ge).filter(lambda n, low=meta.ge: n < low))
            if meta.gt is not None:
                tries.append(number(-(2**40), meta.gt))
            if meta.le is not None:
                high = 2**62 if kind.base is int else 2.0**62
                tries.append(number(meta.le, high).filter(lambda n, top=meta.le: n > top))
            if meta.min_length:
                tries.append(st.just("x" * (meta.min_length - 1)))
            if meta.max_length:
                tries.append(st.just("x" * (meta.max_length + 1)))
    return st.one_of(tries) if tries else None


def owner_of(kind: type, setting: Setting) -> type:
    """The class that declares the setting."""
    for field in fields_of(kind):
        if field == setting.field:
            return kind
        if field.table is not None and field.name not in setting.field.but:
            try:
                return owner_of(field.table, setting)
            except LookupError:
                continue
    raise LookupError(setting.path)


def nested(key: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {key[0]: nested(key[1:], value) if len(key) > 1 else value}


@pytest.mark.slow
@pytest.mark.parametrize(("role", "setting"), SETTINGS.values())
def test_each_bound_holds_from_each_source(
    role: str, setting: Setting, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, field = KINDS[role], setting.field
    values = outside(field)
    if values is None:  # a switch, a table, or a text of any length
        assert field.kinds[0].base in (bool, str) or field.is_mapping
        return
    owner = owner_of(kind, setting)
    needed = {one.name: "k" * 40 for one in fields_of(owner) if one.default is MISSING}

    @given(values)
    @settings(max_examples=4, deadline=None, database=None)
    def refused(value: Any) -> None:
        reasons = set()
        with pytest.raises(ConfigError) as caught:
            owner(**{**needed, field.name: value})
        assert str(caught.value).startswith(f"{field.name}: ")
        reasons.add(str(caught.value).partition(": ")[2])
        with pytest.raises(ConfigError) as caught:
            convert(kind, nested(setting.key, value), "x.json")
        assert str(caught.value).startswith(f"x.json: {setting.path}: ")
        reasons.add(str(caught.value).partition(f"{setting.path}: ")[2])
        with pytest.raises(ConfigError) as caught:
            load(kind, environ={setting.variable: str(value)})
        assert str(caught.value).startswith(f"{setting.variable}: ")
        reasons.add(str(caught.value).partition(": ")[2])
        assert run_command(["worker", role, f"{setting.option}={value}"]) == 2
        said = capfd.readouterr().err
        assert said.startswith(f"prefixkv: {setting.option}: ")
        assert said.count("\n") == 1
        reasons.add(said.strip().partition(f"{setting.option}: ")[2])
        assert len(reasons) == 1, reasons

    refused()


@pytest.mark.parametrize("kind", [*KINDS.values(), ServeConfig, ProxyConfig, TransferOptions])
def test_each_number_has_a_bound_and_each_default_is_within(kind: type) -> None:
    for setting in settings_of(kind):
        for one in setting.field.kinds:
            if one.base in (int, float):
                assert any((meta.ge, meta.gt) != (None, None) for meta in one.metas), setting.path
        if setting.default is not None:
            setting.field.convert(setting.default, setting.path)
            assert read_tables(kind, nested(setting.key, setting.default), "x") == {
                setting.name: setting.default
            }


# --- help -----------------------------------------------------------------------------------------


def test_a_setting_for_a_child_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="there is no setting 'num_page'; the nearest is num_pages"
    ):
        as_environ(DecodeWorkerConfig, {"name": "a", "num_page": 3})


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
