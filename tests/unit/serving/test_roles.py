"""Settings of the workers of `prefixkv serve`: each is used, or refused by name; and so is each
variable of the environment."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prefixkv.config import _OF_SERVING, check_environ, known_variables
from prefixkv.errors import ConfigError
from prefixkv.serving.config import (
    KINDS,
    FrontConfig,
    ListenSettings,
    ProxyConfig,
    ServeConfig,
    ServerAt,
    role_environs,
)
from prefixkv.serving.launch import ServeLaunch
from prefixkv.settings import PREFIX, fields_of, load, settings_of
from tests.support.processes import ROOT

ENVIRON: dict[str, str] = {}


def workers_of(
    config: ServeConfig, role: str, text: str, file: Path, environ: dict[str, str] = ENVIRON
) -> list[Any]:
    """What the processes of a role load from the environment that `serve` gives them, if `text` is
    in the role's file."""
    file.write_text(text, encoding="utf-8")
    config = replace(config, **{f"{role}_config": str(file)})
    return [load(KINDS[role], None, one) for one in role_environs(config, role, "k", environ)]


# --- one setting, at one place ----------------------------------------------------------------


def test_a_worker_has_what_its_file_says_and_else_what_serve_says(tmp_path: Path) -> None:
    """As an operator would write it, after CASES M1."""
    config = ServeConfig(decode=3, page_size=32, decode_pages=50, chunk_tokens=7)
    text = (
        "page_size = 64\nstatus_port = 9100\nname = 'd'\nthreads = 3\n"
        "record = 'at/traffic.jsonl'\n[control]\nheartbeat_s = 2"
    )
    workers = workers_of(config, "decode", text, tmp_path / "d.toml")
    for number, worker in enumerate(workers):
        assert (worker.worker.page_size, worker.worker.num_pages) == (64, 50)
        assert worker.worker.listen.status_port == 9100 + number
        assert worker.worker.listen.port == 0
        assert worker.worker.models.threads == 3
        assert worker.node.name == f"d-{number}"
        assert worker.node.record == f"at/traffic-{number}.jsonl"
        assert worker.node.control.heartbeat_s == 2
    text = "bind = 'tcp://127.0.0.1:29600'\nport = 9200\n"
    (prefill,) = workers_of(config, "prefill", text, tmp_path / "p.toml")
    assert (prefill.chunk_tokens, prefill.worker.page_size) == (7, 32)
    assert (prefill.node.bind, prefill.worker.listen.port) == ("tcp://127.0.0.1:29600", 9200)
    assert (prefill.node.name, prefill.worker.num_pages) == ("prefill-0", 1024)


def test_host_memory_is_said_in_words_or_by_the_role(tmp_path: Path) -> None:
    def decode(text: str = "", environ: dict[str, str] = ENVIRON, **serve: Any) -> Any:
        config = ServeConfig(**serve)
        found = [
            one.node.host_memory
            for one in workers_of(config, "decode", text, tmp_path / "d.toml", environ)
        ]
        assert len({*map(repr, found)}) == 1  # each worker has as much
        return found[0] and (found[0].times, found[0].num_bytes, found[0].num_pages)

    assert decode() is None
    assert decode(host_memory="8GiB", decode=2) == (4.0, 8 << 30, 0)
    assert decode(host_memory="1.5 GB") == (4.0, 1_500_000_000, 0)
    own = "[host_memory]\nnum_pages = 7\npolicy = 'lru'"
    assert decode(own) == decode(own, host_memory="3x") == (4.0, 0, 7)
    assert decode(environ={"PREFIXKV_HOST_MEMORY_TIMES": "5"}) == (5.0, 0, 0)
    assert decode("[host_memory]\ncopy_threads = 5", host_memory="3x") == (3.0, 0, 0)


def test_a_variable_that_serve_has_too_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {
        "PREFIXKV_PORT": "0", "PREFIXKV_STATUS_PORT": "9000", "PREFIXKV_API_KEY": "front",
        "PREFIXKV_HOST": "127.0.0.2", "PREFIXKV_LIMITS_MAX_REQUESTS_PER_CLIENT": "3",
        "PREFIXKV_SEED": "3", "PREFIXKV_CONTROL_HEARTBEAT_S": "2",
    }  # fmt: skip
    config = load(ServeConfig, None, environ)
    for name, text in {**environ, "PREFIXKV_DEBUG": "1"}.items():
        monkeypatch.setenv(name, text)
    launch = ServeLaunch(config)
    for role in KINDS:
        (environment,) = launch.environs[role]
        (worker,) = workers_of(config, role, "", tmp_path / "r.toml", environ)
        listen = worker.worker.listen
        assert (listen.host, listen.port, listen.status_port) == ("127.0.0.1", 0, 0)
        assert listen.api_key not in ("", "front")
        assert (worker.node.control.heartbeat_s, worker.worker.models.seed) == (2, 3)
        assert listen.limits.max_requests_per_client == 1024
        assert (environment["PREFIXKV_DEBUG"], environment["PATH"]) == ("1", os.environ["PATH"])


@pytest.mark.parametrize(
    ("role", "text", "why"),
    [
        ("decode", "seed = 3", "r.toml: seed: serve sets it"),
        ("decode", "parent = 1", "r.toml: parent: serve sets it"),
        ("prefill", "api_key = 'k'", "r.toml: api_key: serve sets it"),
        ("prefill", "[limits]\nmax_requests_per_client = 7", "a worker answers its front alone"),
        ("decode", "[control]\nsuspect_after_s = 1",
         "r.toml: control.suspect_after_s: 1.0 is not above heartbeat_s, 1.0"),
        ("decode", "policy = 'lruu'", "r.toml: policy: .*the nearest is lru"),
        ("decode", "[contrl]\nresend_s = 3", "there is no table contrl; the nearest is control"),
        ("decode", "chunk_tokens = 3", "there is no setting chunk_tokens"),
    ],
)  # fmt: skip
def test_what_workers_cannot_have_is_refused_by_name(
    tmp_path: Path, role: str, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        workers_of(ServeConfig(), role, text, tmp_path / "r.toml")


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        ({"host_memory": "8"}, r"host_memory: '8' is no size: 8GiB, or 4x"),
        ({"host_memory": "-8GiB"}, "host_memory: '-8GiB' is no size"),
        ({"host_memory": "0.5B"}, "host_memory: '0.5B' is none; leave it out"),
        ({"host_memory": "2000x"}, "host_memory_times: 2000.0 is above 1000"),
        ({"ray_cpus": 3}, "ray_cpus: is of --ray, which is not set"),
        ({"decode_config": "none.toml"}, "none.toml is not read"),
    ],
)
def test_what_serve_cannot_have_is_refused_by_name(serve: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServeLaunch(ServeConfig(**serve))


@pytest.mark.parametrize(
    "workers",
    ["", "127.0.0.1:8000", "http://a:1,", "http://a:1 http://b:2", "http://[::", "http://a:99999"],
)
def test_a_front_needs_urls_of_workers(workers: str) -> None:
    if " " in workers:
        FrontConfig(workers=workers.replace(" ", ", "))
    else:
        with pytest.raises(ConfigError, match=r"workers: .* is no worker: http://HOST:PORT"):
            FrontConfig(workers=workers)


@pytest.mark.parametrize("url", ["http://me:pass,word@h", "me:pass/word@h:80", "http://:word@p@h"])
def test_a_url_that_is_refused_keeps_its_password(url: str) -> None:
    """What stderr has is kept in logs."""
    for text in (url, f"http://a,{url}"):
        for make in (lambda url: FrontConfig(workers=url), lambda url: ServerAt.of(f"{url}=a")):
            with pytest.raises(ConfigError, match=r"@.*h") as refused:
                make(text)
            assert "word" not in str(refused.value)


@pytest.mark.parametrize("key", ["key\n", " key", "k\ney", "clé"])
def test_a_key_is_what_a_header_carries(key: str) -> None:
    """The front would never reach a worker, and a proxy answer each request by 500."""
    for make in (
        lambda: FrontConfig(workers="http://a:1", workers_key=key),
        lambda: ProxyConfig(servers_key=key),
        lambda: ListenSettings(api_key=key),
    ):
        with pytest.raises(ConfigError, match="_key: has characters that a header cannot carry"):
            make()


# --- every setting ------------------------------------------------------------------------------

CLASSES = (*KINDS.values(), ServeConfig, FrontConfig, ProxyConfig)


def test_each_setting_is_read_somewhere() -> None:
    """One that nothing reads would be ignored, however well it is checked."""
    read = set()
    for path in (ROOT / "prefixkv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Call):  # one that is read by its name is an argument
                read |= {one.value for one in node.args if isinstance(one, ast.Constant)}

    def names_of(kind: type) -> Iterator[str]:
        for field in fields_of(kind):
            yield field.name
            if field.table is not None and is_dataclass(field.table):
                yield from names_of(field.table)

    declared = {name for kind in CLASSES for name in names_of(kind)}
    assert len(declared) > 80
    assert declared - read == set()


# --- variables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PREFIXKV_PAGE_SISE", "PREFIXKV_PAGE_SIZE"),
        ("PREFIXKV_CONTROL_HARTBEAT_S", "PREFIXKV_CONTROL_HEARTBEAT_S"),
        ("PREFIXKV_DEBUGG", "PREFIXKV_DEBUG"),
        ("PREFIXKV_ADMISION", "PREFIXKV_ADMISSION"),
        ("PREFIXKV_ENGINE_PYTON", "PREFIXKV_ENGINE_PYTHON"),
        ("PREFIXKV_page_size", ""),
        ("PREFIXKV_", ""),
        ("PREFIXKV_XYZZY", ""),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environ({"PATH": "x", "PREFIXKV_PORT": "1", variable: "64"})
    hint = f"; the nearest is {nearest}" if nearest else ""
    assert str(caught.value) == f"there is no variable {variable}{hint}"


def test_every_variable_that_the_tree_reads_is_known() -> None:
    """Names in code are read there, but for those of tests that are wrong on purpose."""
    named = re.compile(rf"\b{PREFIX}[A-Z][A-Z_]+\b")
    folders = (
        "prefixkv", "benchmarks", "fuzz", "tests/integration", "tests/support", "tests/laws", ".ci",
    )  # fmt: skip
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix == ".py" or path.name == "run"
    ]
    found = {name for text in texts for name in named.findall(text)}
    assert len(found) > 15
    check_environ(dict.fromkeys(found, "x"))


def test_the_settings_of_all_commands_are_known_where_only_the_core_is() -> None:
    """What is missing here belongs into `_OF_SERVING` of prefixkv/config.py."""
    have = {setting.variable for kind in CLASSES for setting in settings_of(kind)}
    assert have <= known_variables()
    check_environ(dict.fromkeys(known_variables(), "x"))
    assert {PREFIX + name for name in _OF_SERVING} <= have, "no command has it any more"
