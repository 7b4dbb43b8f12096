"""docs/security.md lists what others can make a process hold, where that is bounded; each row
names the tests of its bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS = ("tests/unit/serving/test_serving_bounds.py",)
TESTS = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def rows() -> list[list[str]]:
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    table = text.partition("## What is bounded")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_of(row: list[str]) -> list[str]:
    return re.findall(r"`(test_\w+)`", row[-1])


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_each_row_has_a_bound_and_is_attacked(row: list[str]) -> None:
    assert len(row) == 4
    assert row[2]
    assert names_of(row)
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in TESTS.findall(path.read_text(encoding="utf-8"))
    }
    assert set(names_of(row)) <= there


def test_each_attack_is_of_a_row() -> None:
    named = {name for row in rows() for name in names_of(row)}
    for path in ATTACKS:
        text = (ROOT / path).read_text(encoding="utf-8")
        attacks = {
            name for name in TESTS.findall(text)
            if "memory.grown()" in text.partition(f"def {name}(")[2].partition("\ndef ")[0]
        }  # fmt: skip
        assert attacks, path
        assert attacks <= named
