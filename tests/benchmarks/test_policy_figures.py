"""The tables of eviction policies, in docs/policies.md, are those of
benchmarks/results/replay.json, rounded. After another run of the benchmark this writes them anew:

    python -m tests.benchmarks.test_policy_figures
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads import WORKLOADS
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, make_policy, policy_names
from tests.benchmarks.test_figures import fixed, head, line, share

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "policies.md"

CONVERSATION, AGENTS = "mooncake_conversation", "coding_agents"
BOTH = f"{CONVERSATION}+{AGENTS}"
RECORDED = {CONVERSATION: "conversation", AGENTS: "agents", BOTH: "both at once"}
COMPARED = tuple(dict.fromkeys((DEFAULT_POLICY, "lru", "gated", "gittins")))
OPTIMUM = "optimum"
LOSS = 0.005
"""A share of the hit ratio: what is less than so far behind is level."""

RESULT = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text(encoding="utf-8"))
CAPACITIES = sorted({row["capacity_blocks"] for row in RESULT["rows"]})


def ratios(trace: str, **told: Any) -> dict[tuple[str, int], float]:
    """(policy, capacity): block hit ratio, where this was told: a queue, hints."""
    asked = {"queue": 0, "hints_minutes": None, "hints_wrong": 0.0} | told
    return {
        (row["policy"], row["capacity_blocks"]): row["block_hit_ratio"]
        for row in RESULT["rows"]
        if row["trace"] == trace and all(row[key] == asked[key] for key in asked)
    }


def named(policy: str) -> str:
    if policy == OPTIMUM:
        return "no policy can exceed"
    return f"**`{policy}`**, the default" if policy == DEFAULT_POLICY else f"`{policy}`"


def shipped() -> list[str]:
    """The names of prefixkv's own policies; tests register others."""
    return [
        name for name in policy_names() if type(make_policy(name)).__module__[:9] == "prefixkv."
    ]


def rest() -> list[str]:
    return [name for name in shipped() if name not in COMPARED]


def whole_table(trace: str) -> Callable[[], list[str]]:
    """All policies on one trace, at all capacities."""

    def table() -> list[str]:
        found = ratios(trace)
        return [
            *head("blocks", *(f"{capacity:,}" for capacity in CAPACITIES)),
            *(
                line(named(policy), *(share(found[policy, size], 3) for size in CAPACITIES))
                for policy in (*COMPARED, *rest(), OPTIMUM)
            ),
        ]

    return table


def generated_table() -> list[str]:
    """The policies that are compared, on the generated traces."""
    return [
        *head("workload", "blocks", *(named(policy) for policy in (*COMPARED, OPTIMUM))),
        *(
            line(
                name, f"{size:,}",
                *(share(ratios(name)[policy, size], 3) for policy in (*COMPARED, OPTIMUM)),
            )
            for name in WORKLOADS
            for size in (3000, 10_000)
        ),
    ]  # fmt: skip


def losses() -> list[tuple[str, int, str, float, float]]:
    """Wherever another of those that are compared hits more: trace, blocks, which, its ratio and
    the default's."""
    found = []
    for trace in (*RECORDED, *WORKLOADS):
        of = ratios(trace)
        for size in CAPACITIES:
            other = max(COMPARED, key=lambda policy: of[policy, size])
            best, own = of[other, size], of[DEFAULT_POLICY, size]
            if own < (1 - LOSS) * best:
                found.append((trace, size, other, best, own))
    return found


def losses_table() -> list[str]:
    return [
        *head("trace", "blocks", "better", "it hits", "the default", "KV sent, times its"),
        *(
            line(
                RECORDED.get(trace, f"{trace}, generated"), f"{size:,}", f"`{other}`",
                share(best, 3), share(own, 3), fixed((1 - own) / (1 - best), 2),
            )
            for trace, size, other, best, own in losses()
        ),
    ]  # fmt: skip


def hints_table() -> list[str]:
    rows = []
    for trace in (CONVERSATION, AGENTS):
        most = ratios(trace)
        for policy in dict.fromkeys(("lru", DEFAULT_POLICY)):
            for what, told in (
                ("none", {}),
                ("true", {"hints_minutes": 10.0}),
                ("wrong in one of five", {"hints_minutes": 10.0, "hints_wrong": 0.2}),
            ):
                of = ratios(trace, **told)
                cells = (
                    f"{share(of[policy, size], 3)} "
                    f"({fixed(of[policy, size] / most[OPTIMUM, size], 2)})"
                    for size in CAPACITIES[:5]
                )
                rows.append(line(RECORDED[trace], f"`{policy}`", what, *cells))
    return [
        *head("trace", "policy", "hints", *(f"{size:,}" for size in CAPACITIES[:5])),
        *rows,
    ]


def times_table() -> list[str]:
    times = RESULT["us_per_request"]
    names = (*COMPARED, *rest())
    return [
        *head("", *(f"`{name}`" for name in names)),
        line("us a request", *(fixed(times[name]) for name in names)),
        line("times `lru`'s", *(fixed(times[name] / times["lru"], 2) for name in names)),
    ]


def running_table() -> list[str]:
    """Hits by the number of requests that run; in brackets the share of the pool that they hold."""
    path = ROOT / "benchmarks" / "results" / "host_tier.json"
    found = {
        (row["trace"], row["policy"], row["capacity_blocks"], row["running"]): row
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    }
    counts = sorted({running for *_, running in found})

    def cell(trace: str, policy: str, blocks: int, running: int) -> str:
        row = found[trace, policy, blocks, running]
        held = row["running_blocks"] / blocks
        return share(row["block_hit_ratio"], 3) + (f" ({share(held)})" if running else "")

    return [
        *head("trace", "policy", "blocks", *(f"`--running {running}`" for running in counts)),
        *(
            line(
                RECORDED[trace], f"`{policy}`", f"{blocks:,}",
                *(cell(trace, policy, blocks, running) for running in counts),
            )
            for trace, policy, blocks in sorted({key[:3] for key in found}, reverse=True)
        ),
    ]  # fmt: skip


def small_pools_table() -> list[str]:
    """Of each trace, by the best of the others: the default, and what settings near it reach."""
    file = ROOT / "benchmarks" / "results" / "small_pools.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    lines = []
    for row in rows:
        others = {name: row[name] for name in COMPARED[1:]}
        best = max(others, key=lambda name: others[name])
        lines.append(
            line(
                row["workload"], str(row["seed"]), f"`{best}`", share(others[best], 3),
                share(row["adaptive"], 3), fixed(row["of_best"], 2),
                f"{fixed(row['least_of_best'], 2)} to {fixed(row['most_of_best'], 2)}",
            )
        )  # fmt: skip
    return [
        *head("workload", "seed", "best of the others", "it hits", "the default", "by the best",
              "with settings a tenth off"),
        *lines,
    ]  # fmt: skip


TABLES: dict[str, Callable[[], list[str]]] = {
    "replay-conversation": whole_table(CONVERSATION),
    "replay-agents": whole_table(AGENTS),
    "replay-both": whole_table(BOTH),
    "replay-generated": generated_table,
    "replay-losses": losses_table,
    "replay-hints": hints_table,
    "replay-times": times_table,
    "replay-running": running_table,
    "small-pools": small_pools_table,
}


@pytest.mark.parametrize("mark", TABLES)
def test_a_table_of_policies_is_its_result_file(mark: str) -> None:
    table = f"<!-- {mark} -->\n" + "\n".join(TABLES[mark]()) + "\n\n"
    assert DOCUMENT.read_text(encoding="utf-8").count(table) == 1, (
        f"{mark}: run python -m tests.benchmarks.test_policy_figures"
    )


def test_the_result_is_of_todays_policies_and_default() -> None:
    assert RESULT["recipe"]["default_policy"] == DEFAULT_POLICY
    for trace in RECORDED:
        assert {policy for policy, _ in ratios(trace)} == {*shipped(), "gated", OPTIMUM}


def test_every_policy_has_a_row_that_says_where_it_wins_and_loses() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("| policy | wins on | loses on |\n")[2].partition("\n\n")[0]
    listed = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    ]
    assert sorted(listed) == sorted([*shipped(), "gated"])


def test_the_figures_of_the_text_are_the_results() -> None:
    """ "A against B of `lru`" at so many blocks, and one alone."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for trace, policy, size in (
        ("retrieval", "aged", 3000), ("retrieval", "slru", 20_000), (CONVERSATION, "fifo", 20_000),
    ):  # fmt: skip
        if policy in shipped():
            of = ratios(trace)
            own, lru = share(of[policy, size], 3), share(of["lru", size], 3)
            assert f"{own} against {lru} of `lru`" in text, (trace, policy)
    assert f"agents get {share(ratios(AGENTS)['slru', 3000], 3)} at 3,000 blocks" in text


def test_no_policy_exceeds_the_optimum_and_partial_blocks_are_alike() -> None:
    for row in RESULT["rows"]:
        most = ratios(row["trace"])[OPTIMUM, row["capacity_blocks"]]
        assert row["block_hit_ratio"] <= most, row
    assert "under no policy" in RESULT["recipe"]["partial_blocks"]


def test_hints_are_worth_what_they_have_to_be() -> None:
    """On the conversation trace .8 of the optimum with true hints; nowhere below no hints where one
    of five is wrong."""
    most = ratios(CONVERSATION)
    true = ratios(CONVERSATION, hints_minutes=10.0)
    for size in (3000, 6000):
        assert true[DEFAULT_POLICY, size] >= 0.8 * most[OPTIMUM, size]
    for trace in (CONVERSATION, AGENTS):
        none = ratios(trace)
        wrong = ratios(trace, hints_minutes=10.0, hints_wrong=0.2)
        for size in CAPACITIES:
            assert wrong[DEFAULT_POLICY, size] >= none[DEFAULT_POLICY, size], (trace, size)


def write() -> None:
    """Put the tables behind their marks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for mark, table in TABLES.items():
        new = f"<!-- {mark} -->\n" + "\n".join(table()) + "\n\n"
        text = re.sub(rf"<!-- {mark} -->\n(?:\|.*\n)*\n?", lambda _, new=new: new, text)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
