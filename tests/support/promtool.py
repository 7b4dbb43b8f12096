"""promtool, where it is installed (Debian's and Ubuntu's package `prometheus` has it)."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "docs" / "ops"


def promtool(*arguments: str, given: str | None = None) -> str:
    """Run promtool in docs/ops; its output. AssertionError where it finds something wrong; skips,
    aloud, where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run(
        [program, *arguments], input=given, cwd=OPS, text=True, timeout=60, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
