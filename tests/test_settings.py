"""Settings from a file, the environment and options."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from prefixkv.config import KVEventsConfig
from prefixkv.errors import ConfigError
from prefixkv.serving.config import (
    KINDS,
    OPTION_NAMES,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    ServeConfig,
)
from prefixkv.serving.settings import as_environ, load, settings_of


@pytest.mark.parametrize("kind", [*KINDS.values(), ServeConfig])
def test_every_setting_has_a_name_of_its_own_and_its_default(kind: type) -> None:
    settings = settings_of(kind)
    for names in ([one.name for one in settings], [one.key for one in settings]):
        assert len(set(names)) == len(names) > 20
    given = {one.name: one.default for one in settings if one.default is not None}
    in_use = {
        name: value
        for name, value in given.items()
        if not name.startswith(("kv_events", "control_curve"))
    }
    assert load(kind, options=in_use) == load(kind) == kind()


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_options_that_a_refusal_names_are_there(kind: type) -> None:
    flags = {"--" + one.name.replace("_", "-") for one in settings_of(kind)}
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
        ("pages = 3", "there is no setting pages"),
        ("[control]\nbeat = 3", "there is no setting control.beat"),
        ("control = 3", "there is no setting control"),
        ("page_size = '8'", "page_size is '8', a whole number is needed"),
        ("page_size = true", "page_size is True, a whole number is needed"),
        ("cache = 1", "cache is 1, true or false is needed"),
        ("page_size = 0", "page_size is 0"),
        ("max_running = 0", "max_running is 0"),
        ("port = 70000", "port is 70000"),
        ("host = '0.0.0.0'", "it needs api_key"),
        ("layout = 'x'", "layout_major or page_major is needed"),
        ("page_size = ", "worker.toml: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why.replace("layout_major", "layer_major")):
        load(PrefillWorkerConfig, file)


def test_what_is_wrong_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PREFIXKV_PAGE_SIZE is 'many', a whole number"):
        load(ServeConfig, None, {"PREFIXKV_PAGE_SIZE": "many"})
    with pytest.raises(ConfigError, match="PREFIXKV_CACHE is 'yes', true or false"):
        load(DecodeWorkerConfig, None, {"PREFIXKV_CACHE": "yes"})
    with pytest.raises(ConfigError, match="No such file"):
        load(ServeConfig, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"control\.curve\.secret_key: needed"):
        load(PrefillWorkerConfig, None, {"PREFIXKV_CONTROL_CURVE_PUBLIC_KEY": "x" * 40})
    with pytest.raises(ConfigError, match="decode is 0"):
        load(ServeConfig, options={"decode": 0})


def test_settings_travel_to_a_child_as_variables() -> None:
    known = {one.name: one for one in settings_of(DecodeWorkerConfig)}
    sent = {"cache": False, "page_size": 4, "api_key": "k", "control_heartbeat_s": 0.5}
    environ = as_environ(sent, known)
    assert environ["PREFIXKV_CACHE"] == "false"
    made = load(DecodeWorkerConfig, None, {**os.environ, **environ})
    assert (made.node.cache, made.worker.page_size) == (False, 4)
    assert (made.worker.listen.api_key, made.node.control.heartbeat_s) == ("k", 0.5)
