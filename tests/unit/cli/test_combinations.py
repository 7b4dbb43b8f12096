"""Documented options in combination: each pair of their values once. A command whose options are
tried one by one may fail for weeks with two of them.

An option that is new has to get values here: the first test names it.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from prefixkv.cli.chats import command as chats
from prefixkv.cli.chats.rates import link_of
from prefixkv.cli.main import app, run_command
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.proxy.config import ProxyConfig, ServerAt
from prefixkv.serving.config import KINDS, ServeConfig
from prefixkv.serving.launch import FrontLaunch, ServeLaunch
from prefixkv.settings import load
from tests.support.pairwise import Row, all_pairs
from tests.support.patience import PATIENCE_S
from tests.support.served import Served

NOT = None  # the option is not given
SET = True  # it is given, and takes no value
OUT = "{out}"  # a file in the test's folder

REPLAY: dict[str, list[Any]] = {
    "--policy": [NOT, "lru,adaptive:trust=5", "all"],
    "--capacity": [NOT, "2,5"],
    "--pool": [NOT, "4"],
    "--bytes-per-token": [NOT, "64"],
    "--warm": [NOT, "0.5"],
    "--queue": [NOT, "3"],
    "--running": [NOT, "0", "5"],
    "--host": [NOT, "1x,4x", "7"],
    "--hints": [NOT, "10"],
    "--hints-wrong": [NOT, "0.5"],
    "--mix": [NOT, SET],
    "--requests": [NOT, "9"],
    "--page-size": [NOT, "8"],
    "--block-tokens": [NOT, "256"],
    "--json": [NOT, OUT + ".json"],
    "--check": [NOT, SET],
    "--per-request": [NOT, OUT + ".jsonl"],
    "--plot": [NOT, OUT + ".svg"],
}
DEMO: dict[str, list[Any]] = {
    "--seed": [NOT, "7"],
    "--cache": [NOT, "on", "off"],
    "--link": ["none", "500Mbit"],
    "--json": [NOT, OUT + ".json"],
}
MODEL: dict[str, list[Any]] = {
    "--seed": [NOT, "7"],
    "--dtype": [NOT, "float32", "bfloat16"],
    "--device": [NOT, "cpu"],
    "--context": [NOT, "512"],
    "--threads": [NOT, "1"],
}
LISTEN: dict[str, list[Any]] = {
    "--host": [NOT, "127.0.0.2"],
    "--port": ["0"],
    "--status-host": [NOT, "127.0.0.2"],
    "--status-port": ["0"],
    "--api-key": [NOT, "a-key"],
    "--drain-timeout-s": [NOT, "5"],
    "--request-log": [NOT, OUT + ".log"],
}
WORKER: dict[str, list[Any]] = {
    **MODEL, **LISTEN,
    "--model": [NOT, "{model}"],
    "--page-size": [NOT, "8"],
    "--num-pages": [NOT, "256"],
    "--window-pages": [NOT, "100"],
    "--name": [NOT, "other"],
    "--max-running": [NOT, "4"],
    "--cache": [NOT, "yes", "no"],
    "--policy": [NOT, "lru", "slru"],
    "--transport-staging-bytes": [NOT, str(64 << 20)],
    "--transport-interface": [NOT, "lo"],
    "--transport-backend": [NOT, "shm", "auto"],
    "--transport-max-bytes-per-s": [NOT, "100000000"],
}  # fmt: skip
COMMANDS: dict[str, dict[str, list[Any]]] = {
    "replay": REPLAY,
    "demo": DEMO,
    "serve": {
        **MODEL, **LISTEN,
        "MODEL": [NOT, "{model}"],
        "--prefill": [NOT, "2"],
        "--decode": [NOT, "2"],
        "--served-name": [NOT, "other"],
        "--page-size": [NOT, "8"],
        "--prefill-pages": [NOT, "256"],
        "--decode-pages": [NOT, "128"],
        "--prefill-window-pages": [NOT, "100"],
        "--decode-window-pages": [NOT, "50"],
        "--chunk-tokens": [NOT, "24"],
        "--checkpoints": [NOT, "5"],
        "--compute-below": [NOT, "64"],
        "--carry-on": [NOT, SET],
        "--host-memory": [NOT, "64MiB", "2x"],
        "--prefill-config": [NOT],
        "--decode-config": [NOT],
        "--answer-tokens": [NOT, "8"],
        "--tokenizer-folder": [NOT, OUT + "/tokenizer"],
        "--ray": [NOT, "auto"],
        "--ray-cpus": [NOT, "2"],
        "--ray-gpus": [NOT, "0.5"],
        "--ray-placement": [NOT, "PACK"],
    },
    "front": {
        **LISTEN,
        "MODEL": [NOT, "{model}"],
        "--workers": ["http://127.0.0.1:8100,http://127.0.0.1:8200"],
        "--workers-key": [NOT, "another"],
        "--served-name": [NOT, "other"],
        "--answer-tokens": [NOT, "8"],
        "--tokenizer-folder": [NOT, OUT + "/tokenizer"],
    },
    "worker prefill": {
        **WORKER, "--chunk-tokens": [NOT, "24"], "--bind": [NOT, "tcp://127.0.0.2:*"],
    },
    "worker decode": {
        **WORKER, "--admission": [NOT, "fifo", "priority"], "--record": [NOT, OUT + ".jsonl"],
        "--thinking": [NOT, "on", "off"],
        "--compute-below": [NOT, "64", "0"], "--compute-down-below": [NOT, "500"],
        "--compute-chunk-tokens": [NOT, "32"], "--compute-itl-share": [NOT, "0.2"],
        "--host-memory-times": [NOT, "2"], "--host-memory-num-bytes": [NOT, str(64 << 20)],
        "--host-memory-num-pages": [NOT, "600"], "--host-memory-policy": [NOT, "lru"],
        "--host-memory-copy-threads": [NOT, "1"], "--host-memory-piece-bytes": [NOT, "65536"],
    },
    "proxy": {
        **LISTEN,
        "--prefill": ["http://127.0.0.1:8100=tcp://127.0.0.1:14579"],
        "--decode": ["http://127.0.0.1:8200=decode-0"],
        "--servers-key": [NOT, "another"],
        "--answer-timeout-s": [NOT, "9"],
    },
}  # fmt: skip
# --config: the settings of tests/unit/serving/test_roles.py.
TEXTS = {"--help", "--help-all", "--config"}


def fits(row: Row) -> bool:
    """Values that contradict each other are refused, which other tests have."""
    without_ray = "--ray" in row and row["--ray"] is NOT
    model = row.get("MODEL") or row.get("--model")
    return not (
        (without_ray and any(row.get(f"--ray-{one}") for one in ("cpus", "gpus", "placement")))
        or (row.get("--check") and (row.get("--plot") or row.get("--per-request")))
        # These are of the small model.
        or (model and (row.get("--seed") or row.get("--tokenizer-folder")))
        # Two sizes of host memory, or nothing that could be kept there.
        or (row.get("--host-memory-num-bytes") and row.get("--host-memory-num-pages"))
        or (
            row.get("--cache") == "no"
            and any(row[one] for one in row if one.startswith("--host-m"))
        )
    )


def documented(command: str) -> set[str]:
    """The options in the command's `--help`, and MODEL."""
    found: Any = get_command(app)
    for word in command.split():
        found = found.commands[word]
    named = {one.opts[0] for one in found.params if not getattr(one, "hidden", False)}
    return {"MODEL" if one == "model" else one for one in named} - TEXTS - {"traces"}


def choices_of(command: str) -> dict[str, list[Any]]:
    """Values of the options that the command has."""
    there = documented(command)
    return {name: values for name, values in COMMANDS[command].items() if name in there}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_documented_option_has_values_here(command: str) -> None:
    choices = choices_of(command)
    assert documented(command) == set(choices)
    rows = all_pairs(choices, fits)
    for name, values in choices.items():
        assert {row[name] for row in rows} == set(values)
    assert all(fits(row) for row in rows)


def words(row: Mapping[str, Any], **places: Any) -> list[str]:
    """The row as a command line."""
    found = []
    for name, value in row.items():
        if value is NOT:
            continue
        said = [] if value is SET else [str(value).format(**places)]
        if name == "--cache" and value in ("yes", "no"):
            found.append({"yes": "--cache", "no": "--no-cache"}[value])
        else:
            found += said if name == "MODEL" else [name, *said]
    return found


def rows_of(command: str) -> list[Any]:
    rows = all_pairs(choices_of(command), fits)
    return [pytest.param(row, id=str(number)) for number, row in enumerate(rows)]


# --- replay -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of("replay"))
def test_replay(row: Row, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = int(row["--block-tokens"] or 512)
    blocks, tokens = tmp_path / "blocks.jsonl", tmp_path / "tokens.jsonl"
    with blocks.open("w") as lines:
        for turn in range(12):
            ids = [turn % 3 * 100 + at for at in range(1 + turn // 3)]
            entry = {"timestamp": 1000 * turn, "input_length": size * len(ids), "output_length": 4}
            lines.write(json.dumps(entry | {"hash_ids": ids}) + "\n")
    with tokens.open("w") as lines:
        for turn in range(12):
            lines.write(json.dumps([turn % 3, *range(40 + 20 * (turn // 3))]) + "\n")
    told = words(row, out=tmp_path / "out", model=tmp_path)
    # Traces of unlike blocks are not mixed.
    traces = [blocks, blocks] if row["--mix"] else [blocks, tokens]
    assert run_command(["replay", *map(str, traces), *told]) == 0, capfd.readouterr().err
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    said = "different blocks of"
    if row["--check"]:
        said = "no cache finds more"
    assert said in out
    if row["--json"]:
        results = json.loads((tmp_path / "out.json").read_text())
        ratio = "token_bound" if row["--check"] else "token_hit_ratio"
        assert all(0 <= one[ratio] <= 1 for one in results)
    if row["--per-request"]:
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(0 <= one["hit_tokens"] <= one["tokens"] for one in rows)
    if row["--plot"]:
        assert (tmp_path / "out.svg").read_text().rstrip().endswith("</svg>")


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "row"),
    [
        pytest.param(command, *one.values, id=f"{command} {one.id}")
        for command in ("serve", "front", "worker prefill", "worker decode", "proxy")
        for one in rows_of(command)
    ],
)
def test_settings_are_made_of_each_row(
    command: str, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself, up to where it would start."""
    made: list[Any] = []

    def note(*given: Any) -> int:
        made.append(given)
        return 0

    monkeypatch.setattr("prefixkv.cli.serve.is_there", lambda name: True)
    monkeypatch.setattr("prefixkv.serving.process.run_worker", note)
    monkeypatch.setattr("prefixkv.proxy.server.run_proxy", note)
    monkeypatch.setattr("prefixkv.serving.launch.run_front", note)
    told = words(row, out=tmp_path / "out", model=tmp_path)
    if row.get("--ray"):  # Ray is not installed here
        named = {name[2:].replace("-", "_"): row[name] for name in row if name[:2] == "--"}
        options = named | {"model": row["MODEL"] and str(tmp_path)}
        made.append([lambda: ServeLaunch(load(ServeConfig, options=options))])
    else:
        assert run_command([*command.split(), *told]) == 0
    (given,) = made
    if command == "serve":
        launch = given[0]()
        for role, kind in KINDS.items():
            load(kind, None, launch.environ(role, 0))
    elif command == "front":
        assert isinstance(given[0](), FrontLaunch)
    elif command == "proxy":
        assert isinstance(given[0], ProxyConfig)
        assert all(isinstance(one, ServerAt) for servers in given[1:] for one in servers)
    else:
        assert isinstance(given[0], KINDS[command.split()[1]])


# --- processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Reference(small_model(0, trial=False)).save(folder)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def few(command: str) -> list[Any]:
    """Three rows: each of them is processes. Not with Ray, which is not installed, and not with
    what models of full attention refuse: `tests/integration/serving` has it."""
    choices = {
        name: values[:1] if re.match("--(ray|check|.*window-pages)", name) else values
        for name, values in choices_of(command).items()
    }
    return [pytest.param(row, id=str(at)) for at, row in enumerate(all_pairs(choices, fits)[:3])]


@pytest.mark.slow
@pytest.mark.parametrize("row", few("serve"))
def test_serve_answers(row: Row, model: Path, tmp_path: Path) -> None:
    with Served("serve", *words(row, model=model, out=tmp_path / "out")) as serve:
        name = row["--served-name"] or (model.name if row["MODEL"] else "small")
        url = serve.line(f"{name}: ").split()[1]
        assert row["--host"] is NOT or row["--host"] in url
        body = {"model": name, "prompt": [*range(40)], "max_tokens": 3, "temperature": 0}
        for hit in (0, 32):
            asked = urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(),
                {"content-type": "application/json",
                 "authorization": f"Bearer {row['--api-key']}"},
            )  # fmt: skip
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                usage = json.load(answer)["usage"]
            assert usage["prefixkv"]["decode_hit_tokens"] >= hit or row["--decode"] == "2"
        serve.signal()
        assert serve.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "row"),
    [
        pytest.param(role, *one.values, id=f"{role} {one.id}")
        for role in KINDS
        for one in few(f"worker {role}")
    ],
)
def test_a_worker_starts_and_drains(role: str, row: Row, model: Path, tmp_path: Path) -> None:
    with Served("worker", role, *words(row, model=model, out=tmp_path / "out")) as worker:
        info = json.loads(worker.line("ready ").removeprefix("ready "))
        assert info["name"] == (row["--name"] or f"{role}-0")
        assert info["page_size"] == int(row["--page-size"] or 16)
        assert info["num_pages"] == int(row["--num-pages"] or 1024)
        worker.signal()
        assert worker.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", few("proxy"))
def test_a_proxy_listens(row: Row, tmp_path: Path) -> None:
    with Served("proxy", *words(row, out=tmp_path / "out")) as proxy:
        assert proxy.line("http") or proxy.line("")
        proxy.signal()
        assert proxy.ended() == 0


@pytest.mark.parametrize("row", rows_of("demo"))
def test_demo_takes_each_row(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as its workers, which would start here."""
    made: list[Any] = []
    monkeypatch.setattr(chats, "run", lambda *given: made.append(given) or 0)
    assert run_command(["demo", *words(row, out=tmp_path / "out")]) == 0
    ((seed, caches, links, _, json_path),) = made
    assert seed == int(row["--seed"] or 1)
    assert list(caches) == {None: [True, False], "on": [True], "off": [False]}[row["--cache"]]
    assert list(links) == ([] if row["--link"] == "none" else [link_of(row["--link"])])
    assert (json_path is None) == (row["--json"] is NOT)
