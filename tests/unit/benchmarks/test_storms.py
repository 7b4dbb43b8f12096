"""The chaos tool itself: a short storm on each transport finds nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_short_storm_finds_nothing(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "storm.json"
    options = ["--duration", "10", "--transport", transport]
    run(["chaos", *options, "--json", str(path)])
    (found,) = json.loads(path.read_text())["rows"]
    assert sum(found["faults"].values()) > 5
    assert found["outcomes"]["finished"] > 50
    off = [name for name, ok in found["checks"].items() if not ok]
    assert off in ([], ["all is served after the storm"])  # which a busy machine may spoil
