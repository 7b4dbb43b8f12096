"""The help of every command: each option has a word, and a terminal of 80 columns cuts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import run as run_benchmark
from prefixkv.cli.main import app, run_command


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
