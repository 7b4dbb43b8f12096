"""The shell function of docs/start.md that asks a server, as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.served import ROOT, Serve

PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_two_prompts_are_hit_as_the_page_says(serve: Serve) -> None:
    asked = re.search(r"```sh\n(ask\(\) .*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert asked is not None
    assert "prefixkv serve --compute-below 0\n" in PAGE  # as `serve` is here
    script = asked[1].replace("http://127.0.0.1:8000/v1", serve.url)
    assert script != asked[1]
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == asked[2]
