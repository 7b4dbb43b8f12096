"""The table of what is left of the time is that of benchmarks/results/sched_quiet.json, rounded.
After a run this writes it anew:

    python -m tests.benchmarks.test_sched_left_figures
"""

from __future__ import annotations

from typing import Any

from benchmarks.against import shown
from tests.benchmarks.test_figures import (
    DOCUMENT,
    head,
    line,
    page_with,
    result,
    share,
    write_table,
)

MARK = "<!-- sched-left -->"
SHOWN = (
    "commit, P50", "finish, P50", "add, P50", "admission, P50", "admission, P99",
    "admission, pool full, P50",
    "admission, pool full, P99", "append_many, 1, P50", "append_many, 8, P50",
    "append_many, 64, P50", "append_many, 256, P50", "admission, host: no host, P50",
    "admission, host: in the pool, P50", "admission, host: in host, P50", "evict all, lru, P50",
    "evict all, adaptive, P50", "replay, lru, 1000, P50", "replay, adaptive, 1000, P50",
    "replay, lru, 3000, P50", "replay, adaptive, 3000, P50", "full hit over NIXL, P50",
)  # fmt: skip


def left_table(rows: list[dict[str, Any]]) -> list[str]:
    by_name = {row["name"]: row for row in rows}
    lines = head("call", "before", "now", "times as long", "the same again")
    for name in SHOWN:
        row = by_name[name]
        times = [shown(name, row[side]) for side in ("theirs_s", "ours_s")]
        lines.append(line(name, *times, share(row["ratio"]), share(row["same_ratio"])))
    return lines


def test_a_row_has_both_times_and_both_ratios() -> None:
    rows = [
        {"name": name, "ours_s": 2e-6, "theirs_s": 4e-6, "ratio": 0.5, "same_ratio": 1.004}
        for name in SHOWN
    ]
    assert left_table(rows)[4] == "| add, P50 | 4.0 us | 2.0 us | .50 | 1.00 |"


def test_the_table_is_the_result_file() -> None:
    table = "\n".join(left_table(result("sched_quiet")["rows"]))
    assert f"{MARK}\n{table}\n\n" in DOCUMENT


if __name__ == "__main__":
    write_table(page_with(MARK), MARK, left_table(result("sched_quiet")["rows"]))
