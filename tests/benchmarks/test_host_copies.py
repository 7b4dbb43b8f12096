"""The benchmark of copies to host memory still runs, and moves the bytes that it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import host_copies as bench
from benchmarks.__main__ import run


def test_each_shape_is_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(bench, "ROUND_BYTES", 4 << 20)
    out = tmp_path / "host_copies.json"
    assert run(["host_copies", "--rounds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["shape"], row["what"]) for row in found["rows"]] == [
        (shape, what) for shape in bench.SHAPES for what in ("load", "write")
    ]
    for row in found["rows"]:
        assert len(row["order_1_by_rows"]) == len(row["order_1_by_rows_cpu"]) == 3
        assert row["rows_gb_s"] > 0


def test_every_way_copies_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "POOL_BYTES", 4 << 20)
    case = bench._Case(*bench.SHAPES["8B, TP4, layer_major"])
    host, device = np.array([5, 1, 2], np.int32), np.array([0, 7, 3], np.int32)
    rows = case.rows(host, device)
    for is_load in (True, False):
        for way in (
            lambda: bench._by_rows(rows, is_load),  # noqa: B023
            lambda: case.by_pieces(host, device, is_load),  # noqa: B023
            lambda: case.order(host, device, is_load, 2),  # noqa: B023
        ):
            for number, (ours, theirs) in enumerate(rows):
                ours[:], theirs[:] = number, number + 1
            way()
            assert all((a == b).all() for a, b in rows)
            assert {int(a[0]) - number for number, (a, _) in enumerate(rows[:200])} == {is_load ^ 1}
    case.close()
