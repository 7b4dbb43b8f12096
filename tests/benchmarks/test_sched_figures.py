"""The table on what the scheduler's calls take against a former commit is that of
benchmarks/results/sched_speed.json, rounded. After a run this writes it anew:

    python -m tests.benchmarks.test_sched_figures
"""

from __future__ import annotations

import re
from typing import Any

from tests.benchmarks.test_figures import DOCUMENT, head, line, page_with, result, share

MARK = "<!-- sched-speed -->\n"


def speed_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    def told(name: str, row: dict[str, Any]) -> str:
        sides = [row["warm"], row["cold"]]
        ratios = " / ".join(share(one["ratio"]) for one in sides)
        same = " / ".join(share(one["same_against_same"]) for one in sides)
        if "aim" not in sides[0]:
            return line(name, ratios, same, "", "")
        aims = " / ".join(share(one["aim"]) for one in sides)
        met = " / ".join("yes" if one["met"] else "no" for one in sides)
        return line(name, ratios, same, aims, met)

    return [
        *head("call", "times as long, warm / cold", "the former by itself", "aim", "met"),
        *(told(name, row) for name, row in rows.items()),
    ]


def test_what_misses_its_aim_says_so() -> None:
    def side(ratio: float, **more: Any) -> dict[str, Any]:
        return {"ratio": ratio, "same_against_same": 1.01, **more}

    rows = {
        "add": {"warm": side(1.05), "cold": side(0.9)},
        "commit": {
            "warm": side(0.64, aim=0.75, met=True), "cold": side(0.72, aim=0.7, met=False),
        },
    }  # fmt: skip
    assert speed_table(rows)[2:] == [
        "| add | 1.05 / .90 | 1.01 / 1.01 | | |",
        "| commit | .64 / .72 | 1.01 / 1.01 | .75 / .70 | yes / no |",
    ]


def test_the_table_is_the_result_file() -> None:
    rows = result("sched_speed")["rows"]
    for row in rows.values():
        for one in row.values():
            assert one.get("met") in (None, one["ratio"] <= one.get("aim", 0))
    table = "\n".join(speed_table(rows))
    assert f"{MARK}{table}\n\n" in DOCUMENT


def write() -> None:
    page = page_with(MARK.strip())
    text = page.read_text(encoding="utf-8")
    table = "\n".join(speed_table(result("sched_speed")["rows"])) + "\n"
    text, num = re.subn(rf"({MARK})(?:\|.*\n)*", lambda one: one[1] + table, text)
    assert num == 1, f"{page} has no table of it"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
