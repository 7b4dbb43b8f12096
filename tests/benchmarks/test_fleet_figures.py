"""The tables of docs/fleet.md are those of benchmarks/results, rounded, as in test_figures.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.test_figures import ROOT, fixed, head, line, result, share

FLEET = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")


def fleet_table() -> list[str]:
    """Behind its mark in docs/fleet.md."""
    names = {
        "embedded": "`BoundedAffinityRouter`", "service": "Dynamo's selection service",
        "longest": "longest match", "least_loaded": "least loaded",
    }  # fmt: skip
    traces = {"mooncake_conversation.jsonl": "conversations", "coding_agents.jsonl": "agents"}

    def told(row: dict[str, Any]) -> str:
        took = row.get("decision_us")
        return line(
            f"{traces[row['trace']]}, {names[row['router']]}", share(row["block_hit_ratio"], 3),
            fixed(row["load_routed"], 2), fixed(row["load_in_progress"], 2),
            f"{fixed(took['p50'])} us / {fixed(took['p99'] / 1e3, 1)} ms" if took else "",
        )  # fmt: skip

    return [
        *head(
            "", "block hit ratio", "blocks sent, max / mean",
            "blocks in progress over time, max / mean", "a decision, P50 / P99",
        ),
        *map(told, result("fleet")["results"]),
    ]  # fmt: skip


def publishing_table() -> list[str]:
    """Behind its mark in docs/fleet.md."""
    rows = [row for row in result("sched_events")["rows"] if not row.get("cold")]

    def told(what: str, name: str, full: bool) -> str:
        without, with_it = (
            fixed(row["cpu_us_p50"], 1)
            for row in rows if row["name"] == name and row["full"] == full
        )  # fmt: skip
        (ratio,) = (
            row["ratio"] for row in rows
            if row["name"] == f"{name}_publishing_ratio" and row["full"] == full
        )  # fmt: skip
        return line(what, f"{without} us", f"{with_it} us", fixed(ratio, 3))

    (handed,) = (row for row in rows if row["name"] == "hand_over")
    return [
        *head("call", "not publishing", "publishing", "ratio"),
        told("an admission", "admit", False),
        told("the same, pages are evicted for it", "admit", True),
        told("`finish`, about 134 pages are cached", "finish", False),
        told("the same, no page is free", "finish", True),
        line("handing over one list of changes", "", f"{fixed(handed['us_p50'], 1)} us", ""),
    ]


@pytest.mark.parametrize("make", [fleet_table, publishing_table])
def test_a_table_of_the_fleet_is_its_result_file(make: Callable[[], list[str]]) -> None:
    mark = make.__name__.replace("_", "-")
    table = "\n".join(make())
    assert f"<!-- {mark} -->\n{table}\n\n" in FLEET
