"""The conformance suite in `inside/`, run by the interpreter that has SGLang's wheel.

`PREFIXKV_ENGINE_PYTHON` is that of `python -m benchmarks env sglang-trees`. Nothing here starts a
server: see docs/sglang.md for those.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INSIDE = Path(__file__).with_name("inside")
PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="PREFIXKV_ENGINE_PYTHON is not set")
@pytest.mark.parametrize("part", sorted(path.name for path in INSIDE.glob("test_*.py")))
def test_the_suite_holds_on_sglangs_own_pools(part: str) -> None:
    command = [PYTHON, "-B", "-m", "pytest", "-q", "-rs", "-W", "ignore", "-o",
               "faulthandler_timeout=0", str(INSIDE / part)]  # fmt: skip
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert " skipped" not in told.stdout
