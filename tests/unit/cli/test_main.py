"""The command line: one line and exit status 2 for bad input, quick to load, and help that has a
word for each option and fits 80 columns. `prefixkv keys`: what it writes is what both kinds of
workers take."""

import errno
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

import prefixkv
from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import run as run_benchmark
from prefixkv.cli.main import app, run_app, run_command
from prefixkv.protocol.messages import PROTOCOL_VERSION
from prefixkv.serving.config import KINDS
from prefixkv.settings import load


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "Missing command"),
        ("nonsense", "nonsense"),
        ("demo --nonsense", "--nonsense"),
        ("demo --seed one", "--seed"),
        ("demo --seed -1", "--seed"),
        ("demo --no-model", "--no-model"),
        ("demo --link fast", "--link"),
        ("demo --json {tmp}/no/out.json", "--json is"),
        ("demo --json {tmp}", "--json is"),
        ("worker prefill --config {tmp}/w.toml", "there is no setting pages"),
        ("worker decode --model {tmp}", "has no config.json and no *.safetensors"),
        ("worker prefill --device cuda:99", "device is 'cuda:99'"),
        ("serve --host 0.0.0.0", "it needs api_key"),
        ("serve {tmp}", "no config.json and no *.safetensors and no tokenizer.json"),
        ("serve {tmp}/none", "there is no model folder"),
        ("serve {tmp}/w.toml", "is no folder"),
        pytest.param(
            "serve --port 0 --device nonsense", "device is 'nonsense'", marks=pytest.mark.slow
        ),  # its workers say so
        ("serve --request-log /nowhere/at/all", "request_log: '/nowhere/at/all' cannot be written"),
        ("replay none.jsonl --json {tmp}/no/p.jsonl", "--json is"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, why, tmp_path, capfd):
    (tmp_path / "w.toml").write_text("pages = 3")
    assert run_command(arguments.format(tmp=tmp_path).split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("prefixkv: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["demo", "replay {tmp}/none.jsonl"])
def test_a_device_that_takes_nothing_is_one_line_and_status_1_before_the_run(
    command, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("prefixkv.cli.replay.command.read_trace", None)  # not reached
    monkeypatch.setattr("prefixkv.cli.demo.command.run_chats", None)
    words = [*command.format(tmp=tmp_path).split(), "--json", "/dev/full"]
    assert run_command(words) == 1
    assert capfd.readouterr() == ("", "prefixkv: --json is /dev/full: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["keys", "--folder", "{tmp}"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_that_takes_nothing_is_one_line_and_status_1(words, unbuffered, tmp_path):
    command = [sys.executable, "-m", "prefixkv.cli.main", *(w.format(tmp=tmp_path) for w in words)]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False
        )
    assert (run.returncode, run.stderr) == (1, "prefixkv: stdout: No space left on device\n")
    with open(os.devnull) as unwritable:
        run = subprocess.run(
            [*command[:3], "--version"], stdout=unwritable, stderr=subprocess.PIPE, text=True,
            env=environ, check=False,
        )  # fmt: skip
    assert (run.returncode, run.stderr) == (1, "prefixkv: stdout: Bad file descriptor\n")


def test_a_disk_that_is_full_is_not_said_of_stdout() -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/model")

    app = typer.Typer()
    app.command()(full)
    with pytest.raises(OSError, match="/tmp/model"):
        run_app(app, "prefixkv", [])


def test_a_disk_that_is_full_after_the_run_is_one_line_and_status_1(tmp_path, capfd, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    )
    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "out.json"
    words = f"replay {tmp_path}/t.jsonl --capacity 10 --policy lru --json {out}"
    assert run_command(words.split()) == 1
    assert capfd.readouterr().err == f"prefixkv: --json is {out}: No space left on device\n"


def test_the_version_is_one_line(capfd):
    assert run_command(["--version"]) == 0
    told = f"prefixkv {prefixkv.__version__} (wire protocol {PROTOCOL_VERSION})\n"
    assert capfd.readouterr() == (told, "")


@pytest.mark.parametrize(
    "command", ["demo", "replay none.jsonl", "serve", "proxy", "worker decode"]
)
def test_an_unknown_variable_stops_every_command(command, capfd, monkeypatch):
    monkeypatch.setenv("PREFIXKV_PAGE_SISE", "64")
    assert run_command(command.split()) == 2
    told = "prefixkv: there is no variable PREFIXKV_PAGE_SISE; the nearest is PREFIXKV_PAGE_SIZE\n"
    assert capfd.readouterr() == ("", told)
    assert run_command([*command.split(), "--help"]) == 0


def test_loading_it_loads_neither_torch_nor_nixl():
    code = (
        "import sys, prefixkv.cli.main; print([m for m in ('torch', 'nixl', 'zmq', 'matplotlib') "
        "if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Words of each command and each group of `prefixkv`."""
    command = command or get_command(app)
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def entries(text: str) -> dict[str, str]:
    """Names and help of what is listed, by lines that are indented by two."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("  ") and line[2:3] not in (" ", ""):
            name, _, about = line.strip().partition("  ")
            found[name] = about.strip()
        elif line.startswith("   ") and name:
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif not line:
            name = ""
    return found


def check(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    listed = entries(text[text.index("ptions:") :])
    assert any(name.endswith("--help") for name in listed)
    for name, told in listed.items():
        about = re.sub(r"\[(default: .*|required|[^\]]*>=?[^\]]*)\]$", "", told)
        assert about, f"{name} has no help"
        assert not about.endswith("..."), f"{name} is cut"


CASES = [
    *(("prefixkv", run_command, path) for path in commands()),
    *(("benchmarks", run_benchmark, (name,)) for name in BENCHMARKS),
]


@pytest.mark.parametrize(
    ("of", "run", "path"), CASES, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_each_option_has_help_that_is_whole(
    of: str, run: Any, path: tuple[str, ...], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*path, "--help"]) == 0
    check(capfd.readouterr().out)


def test_the_files_are_settings_of_workers_that_know_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert run_command(["keys", "decode-0", "other", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    prefill = load(KINDS["prefill"], folder / "prefill.toml").node.control.curve
    for name in ("decode-0", "other"):
        path = folder / f"{name}.toml"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"prefixkv worker decode --config {path}\n" in shown
        node = load(KINDS["decode"], path).node
        assert node.name == name
        assert node.control.curve.server_key == prefill.public_key
        assert prefill.allowed_clients[node.control.curve.public_key] == name
    assert prefill.secret_key not in shown


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "decode-0.toml").write_text("mine")
    assert run_command(["keys", "--folder", str(tmp_path)]) == 2
    assert "its keys may be in use" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [tmp_path / "decode-0.toml"]


@pytest.mark.parametrize("names", [["prefill"], ["a", "a"], ["../a"], [""]])
def test_names_that_are_none_are_refused(names: list[str], tmp_path: Path) -> None:
    assert run_command(["keys", *names, "--folder", str(tmp_path / "k")]) == 2
    assert not (tmp_path / "k").exists()
