"""`prefixkv replay` with its options in combination: each pair of their values once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from prefixkv.cli.main import app, run_command
from tests.support.pairwise import Row, all_pairs

NOT = None  # the option is not given
SET = True  # it is given, and takes no value
OPTIONS: dict[str, list[Any]] = {
    "--policy": [NOT, "lru,adaptive:trust=5", "all"],
    "--capacity": [NOT, "2,5"],
    "--pool": [NOT, "4"],
    "--bytes-per-token": [NOT, "64"],
    "--warm": [NOT, "0.5"],
    "--running": [NOT, "0", "5"],
    "--host": [NOT, "1x,4x", "7"],
    "--hints": [NOT, "10"],
    "--block-tokens": [NOT, "256"],
    "--json": [NOT, "out.json"],
    "--check": [NOT, SET],
    "--plot": [NOT, "out.svg"],
}


def fits(row: Row) -> bool:
    return not (row.get("--check") and row.get("--plot"))  # refused, which another test has


def test_each_option_has_values_here() -> None:
    command: Any = get_command(app)
    named = {one.opts[0] for one in command.commands["replay"].params}
    assert named - {"traces", "--help"} == set(OPTIONS)
    assert len(OPTIONS) <= 12


@pytest.mark.parametrize("row", all_pairs(OPTIONS, fits), ids=str)
def test_replay(
    row: Row, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = int(row["--block-tokens"] or 512)
    with Path("blocks.jsonl").open("w") as lines:
        for turn in range(12):
            ids = [turn % 3 * 100 + at for at in range(1 + turn // 3)]
            entry = {"timestamp": 1000 * turn, "input_length": size * len(ids), "hash_ids": ids}
            lines.write(json.dumps(entry) + "\n")
    with Path("tokens.jsonl").open("w") as lines:
        for turn in range(12):
            lines.write(json.dumps([turn % 3, *range(40 + 20 * (turn // 3))]) + "\n")
    words = [
        word
        for name, value in row.items()
        if value is not NOT
        for word in ([name] if value is SET else [name, value])
    ]
    assert run_command(["replay", "blocks.jsonl", "tokens.jsonl", *words]) == 0
    out, err = capfd.readouterr()
    assert not err
    assert ("no cache finds more" if row["--check"] else "different blocks of") in out
    if row["--json"]:
        results = json.loads(Path("out.json").read_text())
        ratio = "token_bound" if row["--check"] else "token_hit_ratio"
        assert all(0 <= one[ratio] <= 1 for one in results)
    if row["--plot"]:
        assert Path("out.svg").read_text().rstrip().endswith("</svg>")
