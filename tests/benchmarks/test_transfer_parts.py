"""The table on where a transfer's time goes is that of
benchmarks/results/transfer_parts.json, rounded. After a run this writes it anew:

    python -m benchmarks transfer_parts > benchmarks/results/transfer_parts.json
    python -m tests.benchmarks.test_transfer_parts
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import transfer_parts
from benchmarks.__main__ import run
from benchmarks.transfer_parts import PARTS
from tests.benchmarks.test_figures import (
    DOCUMENT,
    fixed,
    head,
    line,
    page_with,
    result,
    share,
    write_table,
)

MARK = "<!-- transfer-parts-table -->"


def parts_table() -> list[str]:
    def row(found: dict[str, Any]) -> str:
        parts = (fixed(found["parts_ms"][part], 1) for part in PARTS)
        posts = f"{found['posts']}, {found['post_mib']:g}"
        times = fixed(found["same_ms"], 1), fixed(found["stack_ms"], 1)
        by_raw = share(found["of_raw_posts_of_the_same_descriptors"])
        return line(f"`{found['layout']}`, {found['pages']}", posts, *times, *parts, by_raw)

    return [
        *head("layout, pages", "posts, MiB each", "raw posts, ms", "the stack, ms",
              *PARTS.values(), "by raw posts (aim .95)"),
        *map(row, result("transfer_parts")["rows"]),
    ]  # fmt: skip


def test_the_table_is_its_result_file() -> None:
    lines = "\n".join([MARK, *parts_table()])
    assert f"{lines}\n\n" in DOCUMENT


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


def test_parts_add_up_to_about_the_whole() -> None:
    for row in result("transfer_parts")["rows"]:
        assert abs(sum(row["parts_ms"].values()) - row["stack_ms"]) < 0.2 * row["stack_ms"]


if __name__ == "__main__":
    write_table(page_with(MARK), MARK, parts_table())
