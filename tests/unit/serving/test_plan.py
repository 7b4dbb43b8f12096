"""Settings of the workers of `prefixkv serve`: each is used, or refused by name; and so is each
variable of the environment."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from prefixkv.errors import ConfigError
from prefixkv.serving.config import KINDS, ProxyConfig, ServeConfig
from prefixkv.serving.launch import Launch
from prefixkv.serving.plan import TABLE, ServePlan, find_workers, names_of_serve, plan
from prefixkv.serving.variables import settings_variables, without_settings
from prefixkv.settings import PREFIX, Setting, fields_of, find, load, read_toml, settings_of
from prefixkv.variables import _OF_SERVING, check_environ, known_variables
from tests.support.processes import ROOT

ENVIRON: dict[str, str] = {}


def planned(
    file: Path, text: str = "", environ: dict[str, str] = ENVIRON, **options: Any
) -> ServePlan:
    file.write_text(text, encoding="utf-8")
    tables = read_toml(file)
    found = find(ServeConfig, tables, "serve.toml", environ, options, but=(TABLE,))
    return plan(found, find_workers(tables.get(TABLE, {}), "serve.toml", environ))


def workers_of(made: ServePlan, role: str, num: int = 1) -> list[Any]:
    """What the processes of a role load from the environment that `serve` gives them."""
    launch = Launch(*made)
    return [load(KINDS[role], None, launch._environ(role, number)) for number in range(num)]


# --- one setting, at one place ----------------------------------------------------------------


def test_a_worker_has_what_its_table_says(tmp_path: Path) -> None:
    """As an operator would write it, after CASES M1."""
    made = planned(
        tmp_path / "s.toml",
        "decode = 3\npage_size = 32\ndecode_pages = 50\nchunk_tokens = 7\n"
        "[workers.decode]\npage_size = 64\n"
        "status_port = 9100\nname = 'd'\nthreads = 3\nrecord = 'at/traffic.jsonl'\n"
        "[workers.prefill]\nbind = 'tcp://127.0.0.1:29600'\nport = 9200\n",
    )
    for number, worker in enumerate(workers_of(made, "decode", 3)):
        assert (worker.worker.page_size, worker.worker.num_pages) == (64, 50)
        assert worker.worker.listen.status_port == 9100 + number
        assert worker.worker.listen.port == 0
        assert worker.worker.models.threads == 3
        assert worker.node.name == f"d-{number}"
        assert worker.node.record == f"at/traffic-{number}.jsonl"
    (prefill,) = workers_of(made, "prefill")
    assert (prefill.chunk_tokens, prefill.worker.page_size) == (7, 32)
    assert (prefill.node.bind, prefill.worker.listen.port) == ("tcp://127.0.0.1:29600", 9200)
    assert (prefill.node.name, prefill.worker.num_pages) == ("prefill-0", 1024)


def test_addresses_count_up(tmp_path: Path) -> None:
    text = (
        "prefill = 3\n[workers.prefill]\nbind = 'tcp://[::1]:29600'\n[workers.prefill.kv_events]\n"
        "endpoint = 'ipc:///run/a'\nreplay_endpoint = ''\nsnapshot_endpoint = 'tcp://127.0.0.1:*'\n"
    )
    third = workers_of(planned(tmp_path / "s.toml", text), "prefill", 3)[2].node
    assert (third.bind, third.kv_events.endpoint) == ("tcp://[::1]:29602", "ipc:///run/a-2")
    assert third.kv_events.replay_endpoint == ""
    assert third.kv_events.snapshot_endpoint == "tcp://127.0.0.1:*"


def test_what_all_workers_need_alike_is_the_front_s_too(tmp_path: Path) -> None:
    made = planned(tmp_path / "s.toml", "seed = 3")
    assert made.config.models.seed == 3
    assert {one.worker.models.seed for role in KINDS for one in workers_of(made, role)} == {3}


def test_an_option_goes_before_a_variable_and_that_before_the_file(tmp_path: Path) -> None:
    text = "context = 50\n[workers.decode]\ncontext = 60\ndevice = 'cuda:1'"

    def decode(environ: dict[str, str] = ENVIRON, **options: Any) -> Any:
        made = planned(tmp_path / "s.toml", text, environ, **options)
        (worker,) = workers_of(made, "decode")
        return worker.worker.models.context, worker.worker.models.device

    assert decode() == (60, "cuda:1")
    assert decode({"PREFIXKV_CONTEXT": "70"}) == (70, "cuda:1")
    assert decode({"PREFIXKV_CONTEXT": "70"}, context=80) == (80, "cuda:1")
    assert decode(device="cpu") == (60, "cpu")
    assert decode({"PREFIXKV_DEVICE": "cuda:7"}) == (60, "cuda:7")


def test_host_memory_is_said_in_words_or_by_a_worker_s_own_settings(tmp_path: Path) -> None:
    def decode(text: str = "", environ: dict[str, str] = ENVIRON, **options: Any) -> Any:
        made = planned(tmp_path / "s.toml", text, environ, **options)
        assert all(one.node == one.node for one in workers_of(made, "prefill"))
        found = [one.node.host_memory for one in workers_of(made, "decode", made.config.decode)]
        assert len({*map(repr, found)}) == 1  # each worker has as much
        return found[0] and (found[0].times, found[0].num_bytes, found[0].num_pages)

    assert decode() is None
    assert decode("host_memory = '8GiB'\ndecode = 2") == (4.0, 8 << 30, 0)
    assert decode("host_memory = '1.5 GB'") == (4.0, 1_500_000_000, 0)
    assert decode(environ={"PREFIXKV_HOST_MEMORY": "6x"}) == (6.0, 0, 0)
    assert decode("host_memory = '8GiB'", host_memory="512MiB") == (4.0, 512 << 20, 0)
    own = "[workers.decode.host_memory]\nnum_pages = 7\npolicy = 'lru'"
    assert decode(own) == (4.0, 0, 7)
    assert decode(environ={"PREFIXKV_HOST_MEMORY_TIMES": "5"}) == (5.0, 0, 0)
    beside = "host_memory = '3x'\n[workers.decode.host_memory]\ncopy_threads = 5"
    assert decode(beside) == (3.0, 0, 0)
    with pytest.raises(ConfigError, match=r"num_pages: beside host_memory, which says"):
        decode(own, host_memory="2x")


def test_the_front_s_addresses_and_key_are_not_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {
        "PREFIXKV_PORT": "0", "PREFIXKV_STATUS_PORT": "9000", "PREFIXKV_API_KEY": "k",
        "PREFIXKV_HOST": "127.0.0.2", "PREFIXKV_LIMITS_MAX_REQUESTS_PER_CLIENT": "3",
        "PREFIXKV_LIMITS_IDLE_TIMEOUT_S": "9", "PREFIXKV_CONTROL_HEARTBEAT_S": "2",
    }  # fmt: skip
    made = planned(tmp_path / "s.toml", environ=environ)
    for name, text in {**environ, "PREFIXKV_DEBUG": "1"}.items():
        monkeypatch.setenv(name, text)  # a child inherits the others
    launch = Launch(*made)
    for role in KINDS:
        environment = launch._environ(role, 0)
        (worker,) = workers_of(made, role)
        listen = worker.worker.listen
        assert (listen.host, listen.port, listen.status_port) == ("127.0.0.1", 0, 0)
        assert listen.api_key not in ("", "k")
        assert (listen.limits.idle_timeout_s, worker.node.control.heartbeat_s) == (9, 2)
        assert listen.limits.max_requests_per_client == 1024
        assert (environment["PREFIXKV_DEBUG"], environment["PATH"]) == ("1", os.environ["PATH"])
    front = made.config.listen
    assert (front.host, front.status_port, front.api_key) == ("127.0.0.2", 9000, "k")
    assert front.limits.max_requests_per_client == 3


D, P = "[workers.decode]\n", "[workers.prefill]\n"


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (D + "seed = 3", "workers.decode.seed", "all workers need the same; set it above"),
        (D + "page_size = 24", "workers.decode.page_size", "neither divides the other"),
        (D + "parent = 1", "workers.decode.parent", "serve sets it itself"),
        (P + "host = '127.0.0.1'", "workers.prefill.host", "serve sets it itself"),
        (P + "api_key = 'k'", "workers.prefill.api_key", "serve sets it itself"),
        ("[workers.prefill.limits]\nmax_requests_per_client = 7",
         "workers.prefill.limits.max_requests_per_client", "workers answer their front alone"),
        (D + "num_pages = 8", "workers.decode.num_pages", "it is decode_pages above the tables"),
        (P + "chunk_tokens = 8", "workers.prefill.chunk_tokens", "it is above the tables"),
        (P + "name = 'decode'", "workers.prefill.name", "of each kind would be 'decode-0'"),
        (f"decode = 2\nport = 9101\n{D}status_port = 9100", "workers.decode.status_port",
         "port 9101 is wanted twice: serve.toml: port has 9101, this 9100 to 9101, one per worker"),
        (D + "port = 8001", "workers.decode.port", "the front's status_port has 8001"),
        (f"prefill = 3\n{P}port = 9100\n{D}status_port = 9102", "workers.decode.status_port",
         "workers.prefill.port has 9100 to 9102, this 9102"),
        (f"prefill = 2\n{P}port = 9100\nbind = 'tcp://127.0.0.1:9101'", "workers.prefill.bind",
         "workers.prefill.port has 9100 to 9101, this 9101 to 9102"),
        (f"decode = 2\n{D}port = 65535", "workers.decode.port", "65536 is above 65535"),
        (f"prefill = 2\n{P}bind = 'tcp://127.0.0.1:65535'", "workers.prefill.bind",
         "the ports of 2 workers end at 65536"),
        ("decode = 2\n[workers.decode.kv_events]\ntopic = 't'",
         "workers.decode, kv_events_replay_endpoint", "port 5558 is wanted twice"),
        (f"decode = 2\n[workers.decode.control.curve]\npublic_key = '{'k' * 40}'\n"
         f"secret_key = '{'k' * 40}'",
         "workers.decode.control.curve.public_key", "a pair of keys is one worker's"),
        ("[workers.decode.control]\nsuspect_after_s = 1", "workers.decode.control.suspect_after_s",
         "1.0 is not above heartbeat_s, 1.0"),
        (D + "policy = 'lruu'", "workers.decode.policy", "the nearest is lru"),
        ("host_memory = '8GiB'\n[workers.decode.host_memory]\nnum_pages = 3",
         "workers.decode.host_memory.num_pages", "beside host_memory"),
        ("host_memory = '8'", "host_memory", "'8' is no size: 8GiB, or 4x (times the pool)"),
        ("host_memory = '-8GiB'", "host_memory", "'-8GiB' is no size"),
        ("host_memory = '0.5B'", "host_memory", "'0.5B' is none; leave it out"),
        ("host_memory = '2000x'", "host_memory", "2000.0 is above 1000"),
        (f"host_memory = '4x'\n{D}cache = false", "host_memory", "without cache nothing is kept"),
        ("[workers.dekode]\nnum_pages = 3", "workers.dekode", "the nearest is workers.decode"),
        ("[workers.decode.contrl]\nresend_s = 3", "workers.decode.contrl",
         "the nearest is workers.decode.control"),
        ("[worker.decode]\nnum_pages = 3", "worker", "the nearest is workers"),
        ("workers = 3", "workers", "3 is not a table"),
    ],
)  # fmt: skip
def test_what_workers_cannot_have_is_refused_by_name(
    tmp_path: Path, text: str, where: str, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path / "s.toml", text)
    told = str(caught.value).removeprefix("serve.toml: ").removeprefix("there is no table ")
    assert re.split("[:;]", told)[0] == where
    assert why in told


# --- every setting of every table -------------------------------------------------------------

REFUSED = {"parent", "host", "status_host", "api_key", "limits.max_requests_per_client"}
KEYS = {f"control.curve.{name}" for name in ("public_key", "secret_key", "server_key")}


def others_of(setting: Setting) -> Iterator[Any]:
    """Values of a setting that are not its default, the likely ones first."""
    default = setting.default
    for kind in setting.field.kinds:
        if kind.base is bool:
            yield not default
        elif get_origin(kind.base) is Literal:
            yield from get_args(kind.base)
        elif kind.base is int:
            yield from ((default or 0) + 3, 2 * (default or 8), 7, 64 << 20)
        elif kind.base is float:
            yield from (default * 0.9 if default else 0.5, (default or 0.5) * 1.5)
        elif kind.base is str:
            yield from ("lru", "fifo", "4x", "tcp://127.0.0.1:29700", "127.0.0.2", "eth0", "k" * 40)


def text_of(key: tuple[str, ...], value: Any) -> str:
    """A file of this one setting."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return ".".join(key) + f" = {shown}"


def outcomes(
    kind: type, setting: Setting, file: Path, under: tuple[str, ...], made: Any
) -> list[str]:
    """What becomes of each value, up to the first that is taken: "changed", "same", the error."""
    found: list[str] = []
    # Decode's checkpoints are to compute from.
    needs_compute = kind is KINDS["decode"] and setting.path == "checkpoints"
    beside = text_of((*under, "compute", "below"), 512) + "\n" if needs_compute else ""
    plain = made(beside)
    for value in others_of(setting):
        if value != setting.default and "changed" not in found:
            try:
                text = beside + text_of((*under, *setting.key), value)
                found.append("changed" if made(text) != plain else "same")
            except ConfigError as error:
                found.append(str(error))
    return found


CLASSES = {**{f"worker {role}": kind for role, kind in KINDS.items()}, "serve": ServeConfig,
           "proxy": ProxyConfig}  # fmt: skip
OF_A_TABLE = [
    pytest.param(role, one, id=f"{role} {one.path}")
    for role, kind in KINDS.items()
    for one in settings_of(kind)
    if not one.field.is_mapping
]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "setting"), OF_A_TABLE)
def test_each_key_of_a_worker_s_table_reaches_the_worker_or_is_refused(
    role: str, setting: Setting, tmp_path: Path
) -> None:
    file = tmp_path / "s.toml"

    def made(text: str) -> Any:
        decided = planned(file, text)
        launch = Launch(*decided)
        launch._key = "k"
        return [load(KINDS[role], None, launch._environ(role, number)) for number in range(2)]

    found = outcomes(KINDS[role], setting, file, ("workers", role), made)
    assert found
    assert "same" not in found
    refused = setting.path in {*REFUSED, *KEYS, "seed", "model", "dtype", *names_of_serve(role)}
    assert ("changed" not in found) == refused, found
    for why in found:
        assert why == "changed" or setting.field.name in why or "control.curve." in why


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

    declared = {name for kind in CLASSES.values() for name in names_of(kind)}
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
    """What is missing here belongs into `_OF_SERVING` of prefixkv/variables.py."""
    assert settings_variables() <= known_variables()
    check_environ(dict.fromkeys(known_variables(), "x"))
    of_serving = {PREFIX + name for name in _OF_SERVING}
    assert of_serving <= settings_variables(), "no command has it any more"


def test_a_child_inherits_what_is_no_setting() -> None:
    environ = {"PATH": "x", "PREFIXKV_DEBUG": "1", "PREFIXKV_PORT": "1", "PREFIXKV_POLICY": "lru",
               "PREFIXKV_CHUNK_TOKENS": "3", "PREFIXKV_SERVERS_KEY": "k"}  # fmt: skip
    assert without_settings(environ) == {"PATH": "x", "PREFIXKV_DEBUG": "1"}
