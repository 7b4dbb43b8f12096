"""`python -m benchmarks` lists what there is, runs one, and refuses what it lacks."""

from __future__ import annotations

import inspect
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
        ("allocator --pages 10", "at least 1000"),
        ("staging_copy --rounds 0", "at least 1"),
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
