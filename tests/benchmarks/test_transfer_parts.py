"""The parts of a transfer's time are measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import transfer_parts
from benchmarks.__main__ import run
from benchmarks.transfer_parts import PARTS


@pytest.mark.slow
def test_each_part_is_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer_parts, "LAYOUTS", ("layer_major",))
    monkeypatch.setattr(transfer_parts, "PAGES", ("random",))
    assert run(["transfer_parts", "--quick"]) == 0
    row, larger = json.loads(capfd.readouterr().out)["rows"]
    assert (row["posts"], larger["posts"]) == (4, 2)
    assert all(one["parts_ms"][part] > 0 for one in (row, larger) for part in PARTS)
