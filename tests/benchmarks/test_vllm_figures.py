"""The tables on vLLM's servers are those of benchmarks/results/vllm.json,
rounded. After a run this writes them anew:

    python -m tests.benchmarks.test_vllm_figures
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.benchmarks.test_figures import (
    DOCUMENT,
    RESULTS,
    fixed,
    head,
    line,
    page_with,
    result,
    share,
    write_table,
)

SYSTEMS = ("pull", "push", "ours", "governed")
FILE = RESULTS / "vllm.json"
MIB = 1 << 20


def runs_of(found: dict[str, Any], part: str, system: str) -> list[dict[str, Any]]:
    names = (name.split(" ") for name in found["runs"])
    return [found["runs"][" ".join(one)] for one in names if one[:2] == [part, system]]


def told(value: float, limit: float) -> str:
    return "yes" if value <= limit else "no"


Path3 = tuple[str, str, str]


def whole(found: dict[str, Any], system: str, path: Path3) -> list[float]:
    """Of runs that were not cut off; those that were have their first turns alone."""
    part, name, key = path
    of = [run[name] for run in runs_of(found, part, system)]
    return [one[key] for one in of if "first" in key or not one.get("cut_off")]


def ttft_table(found: dict[str, Any]) -> list[str]:
    def row(what: str, path: Path3, unit: float, digits: int, limit: float,
            against: tuple[str, ...]) -> str:  # fmt: skip
        by = {system: whole(found, system, path) for system in SYSTEMS}
        cells = [
            fixed(statistics.median(of) * unit, digits)
            if of
            else "cut off"
            if runs_of(found, path[0], system)
            else "not run"
            for system, of in by.items()
        ]
        against = tuple(other for other in against if by[other])
        ratios = [
            statistics.median(a / b for a, b in zip(by["ours"], by[other], strict=False))
            for other in against
        ]
        goal = f"at most {share(limit) if limit < 1 else 1} of {' and '.join(against)}"
        measured = ", ".join(share(one, 3) for one in ratios)
        return line(what, *cells, goal, measured, "yes" if max(ratios) <= limit else "no")

    both = ("pull", "push")
    turns, long = ("turns", "turns"), ("long", "long")
    return [
        *head("", *SYSTEMS, "goal for ours", "measured", "met"),
        row("turns: TTFT P50, ms", (*turns, "ttft_s"), 1e3, 0, 1, both),
        row("the same, first turns", (*turns, "ttft_first_s"), 1e3, 0, 1, both),
        row("turns: TTFT less prefill's answer, P50, ms", (*turns, "after_prefill_s"), 1e3, 1,
            0.1, both),
        row("the same, first turns", (*turns, "after_prefill_first_s"), 1e3, 1, 0.1, both),
        row("turns: MiB sent", (*turns, "bytes"), 1 / MIB, 0, 1, both),
        row("8,192 tokens: TTFT, ms", (*long, "ttft_s"), 1e3, 0, 1, both),
        row("8,192 tokens: TTFT less prefill's answer, ms", (*long, "after_prefill_s"), 1e3, 1,
            0.2, ("push", "pull")),
        row("burst: MiB sent", ("turns", "burst", "bytes"), 1 / MIB, 0, 0.25, ("pull",)),
    ]  # fmt: skip


SETS = {
    "recorded coding_agents": ("agents, a recorded trace", "above"),
    "recorded mooncake_conversation": ("chat, a recorded trace", "above"),
    "pool agents": ("agents, generated", "above"),
    "pool chat": ("chat, generated", "above"),
    "pool few": ("a few that are back within seconds, generated", "not below"),
}


def sets_table(found: dict[str, Any]) -> list[str]:
    policy = found["recipe"]["policy"]

    def mean(name: str, key: str, system: str) -> float:
        of = [run[name][key] for run in runs_of(found, name.split(" ")[0], system) if name in run]
        return statistics.mean(of)

    rows = []
    for name, (what, goal) in SETS.items():
        if not all(runs_of(found, name.split(" ")[0], one) for one in ("own", "gated", policy)):
            continue  # not run
        own, gated, ours = (mean(name, "hit_ratio", one) for one in ("own", "gated", policy))
        met = ours > own if goal == "above" else ours >= own
        blocks = fixed(mean(name, "blocks", "own"))
        rows.append(line(what, blocks, share(own, 3), share(gated, 3), share(ours, 3), goal,
                         "yes" if met else "no"))  # fmt: skip
    return [*head("", "blocks", "vLLM's own", "`gated`", f"`{policy}`", "goal", "met"), *rows]


def kills_table(found: dict[str, Any]) -> list[str]:
    rows = []
    for system in SYSTEMS[:3]:
        runs = [run["kills"] for run in runs_of(found, "kills", system)]
        if not runs:
            continue  # not run
        said = [one for run in runs for kill in run["kills"] for one in kill["outcomes"]]
        errors = sum(one.startswith("error") for one in said)
        rows.append(line(
            system, str(sum(len(run["kills"]) for run in runs)), str(len(said)),
            str(said.count("right")), str(said.count("wrong")), str(errors),
            str(said.count("hang")), str(sum(run["blocks_lost"] for run in runs)),
        ))  # fmt: skip
    return [
        *head("", "kills", "requests", "right", "wrong", "errors", "hangs", "blocks lost"),
        *rows,
    ]


def chaos_table(found: dict[str, Any]) -> list[str]:
    rows = [one for run in runs_of(found, "chaos", "governed") for one in run["chaos"]["rounds"]]
    cells = [
        line(
            row["done"],
            *(str(row[key]) for key in ("requests", "answered", "left", "errors_excused",
                                        "errors", "hangs", "wrong")),
            str(sum(row["blocks_lost"])),
            "yes" if row["goes_on"] else "no",
        )
        for row in rows
    ]  # fmt: skip
    return [
        *head("", "requests", "answered", "left", "ended with decode", "errors", "hangs", "wrong",
              "blocks lost", "goes on"),
        *cells,
    ]  # fmt: skip


def steps_of(found: dict[str, Any], system: str, side: str, key: str) -> list[float]:
    return [one[key] for run in runs_of(found, "steps", system) for one in run[system][side]]


def steps_table(found: dict[str, Any]) -> list[str]:
    def row(what: str, system: str, side: str, against: str, limit: float | None) -> str:
        cells = []
        for key in ("p50", "mean"):
            mine, other = (steps_of(found, system, one, key) for one in (side, against))
            times = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            cells += [
                f"{fixed(statistics.median(mine), 2)} / {fixed(statistics.median(other), 2)} ms",
                fixed(times, 3),
            ]
        if limit is None:
            return line(what, *cells, "stated", "")
        return line(what, *cells, f"at most {limit}", told(float(cells[1]), limit))

    loads = [
        row("loads, against the same requests and a copy of the bytes", "busy", "loads", "copies",
            None),
        row("loads, against none", "busy", "loads", "alone", None),
    ] if runs_of(found, "steps", "busy") else []  # fmt: skip
    return [
        *head("", "P50", "times", "mean", "times", "goal", "met"),
        row("idle, against no connector", "idle", "idle", "without", 1.03),
        *loads,
    ]


def order_table(found: dict[str, Any]) -> list[str]:
    """`before` is the connector that computed first; `times` is of runs side by side, and `A
    against A` how far runs of one of the two are apart."""

    def row(what: str, path: Path3, unit: float, digits: int) -> str:
        part, name, key = path
        by = {
            system: [run[name][key] for run in runs_of(found, part, system)]
            for system in ("before", "ours")
        }
        before, ours = by["before"], by["ours"]
        times = statistics.median(a / b for a, b in zip(ours, before, strict=False))
        apart = [max(of) / min(of) for of in (before, ours)]
        cells = [fixed(statistics.median(of) * unit, digits) for of in by.values()]
        return line(
            what,
            *cells,
            share(times, 2),
            share(max(apart), 2) if max(map(len, (before, ours))) > 1 else "",
        )

    turns, burst, crowd = ("turns", "turns"), ("turns", "burst"), ("crowd", "crowd")
    return [
        *head("", "before", "ours", "times", "A against A"),
        row("turns: TTFT P50, ms", (*turns, "ttft_s"), 1e3, 0),
        row("the same, first turns", (*turns, "ttft_first_s"), 1e3, 0),
        row("the same, less prefill's answer, all turns", (*turns, "after_prefill_s"), 1e3, 1),
        row("turns: MiB sent", (*turns, "bytes"), 1 / MIB, 0),
        row("burst: TTFT P50, ms", (*burst, "ttft_s"), 1e3, 0),
        row("burst: all answered, s", (*burst, "all_s"), 1, 2),
        row("burst: MiB sent", (*burst, "bytes"), 1 / MIB, 0),
        row("crowd: TTFT P50, s", (*crowd, "ttft_s"), 1, 2),
        row("crowd: all answered, s", (*crowd, "all_s"), 1, 2),
    ]


PEERS = ("pull", "ours", "drawn")


def peers_table(found: dict[str, Any]) -> list[str]:
    """One run each on the slowest machine; `times` is ours by pull."""

    def row(what: str, name: str, key: str, unit: float, digits: int, ratio: bool = True) -> str:
        by = [runs_of(found, "turns", system)[0][name][key] for system in PEERS]
        cells = [fixed(one * unit, digits) for one in by]
        return line(what, *cells, share(by[1] / by[0], 3) if ratio else "")

    return [
        *head("", *PEERS, "ours by pull"),
        row("turns answered in four minutes, of 40", "turns", "requests", 1, 0, False),
        row("first turns: TTFT P50, s", "turns", "ttft_first_s", 1, 1),
        row("the same, less prefill's answer, ms", "turns", "after_prefill_first_s", 1e3, 1),
        row("burst: TTFT P50, s", "burst", "ttft_s", 1, 1),
        row("burst: all answered, s", "burst", "all_s", 1, 1),
        row("burst: MiB sent", "burst", "bytes", 1 / MIB, 0),
    ]


TABLES = {
    "vllm-ttft": ttft_table,
    "vllm-sets": sets_table,
    "vllm-kills": kills_table,
    "vllm-chaos": chaos_table,
    "vllm-steps": steps_table,
    "vllm-order": order_table,
    "vllm-peers": peers_table,
}
FILES = {"vllm-order": "vllm_order", "vllm-peers": "vllm_peers"}
"""Of tables that are not of `vllm.json`."""

AT = {"turns": ("turns", "burst"), "long": ("long",)}
MADE_UP: dict[str, Any] = {
    "recipe": {"policy": "adaptive"},
    "runs": {
        **{
            f"{part} {system} {i}": {
                name: {
                    "ttft_s": 0.5 + wait, "ttft_first_s": 0.5 + wait, "after_prefill_s": wait,
                    "after_prefill_first_s": wait, "bytes": (4 - at) * MIB,
                    "cut_off": part == "turns" and system == "push",
                }
                for name in AT[part]
            }
            for part in AT for at, (system, wait) in
            enumerate(zip(SYSTEMS, (0.2, 0.1, 0.015, 0.015), strict=True)) for i in range(2)
        },
        **{
            f"{part} {system} 0": {
                name: {"hit_ratio": hits, "blocks": 100} for name in SETS if part in name
            }
            for system, hits in (("own", 0.5), ("gated", 0.4), ("adaptive", 0.5))
            for part in ("pool", "recorded")
        },
        **{
            f"kills {system} 0": {"kills": {"blocks_lost": lost, "kills": [
                {"outcomes": ["right", "error: x"]}, {"outcomes": ["hang", "right"]}]}}
            for system, lost in (("pull", 0), ("push", 94), ("ours", 0))
        },
        "chaos governed 0": {"chaos": {"rounds": [{
            "done": "both killed", "requests": 9, "answered": 4, "left": 1, "errors_excused": 0,
            "errors": 2, "hangs": 1, "wrong": 1, "blocks_lost": [3, 4], "goes_on": False}]}},
        "steps idle 0": {"idle": {
            "without": [{"p50": 10.0, "mean": 10.0}], "idle": [{"p50": 10.5, "mean": 11.0}]}},
        "steps busy 0": {"busy": {
            side: [{"p50": 12.0, "mean": 12.0}] for side in ("alone", "copies", "loads")}},
    },
}  # fmt: skip


def test_what_misses_its_goal_says_so() -> None:
    ttft = "\n".join(ttft_table(MADE_UP))
    for row in (
        "P50, ms | 700 | cut off | 515 | 515 | at most 1 of pull | .736 | yes |",
        "| 200.0 | 100.0 | 15.0 | 15.0 | at most .10 of pull and push | .075, .150 | no |",
        "| 4 | cut off | 2 | 1 | at most .25 of pull | .500 | no |",
    ):
        assert row in ttft
    sets = "\n".join(sets_table(MADE_UP))
    assert "| agents, generated | 100 | .500 | .400 | .500 | above | no |" in sets
    assert "seconds, generated | 100 | .500 | .400 | .500 | not below | yes |" in sets
    assert "| push | 2 | 4 | 2 | 0 | 1 | 1 | 94 |" in kills_table(MADE_UP)
    assert "| both killed | 9 | 4 | 1 | 0 | 2 | 1 | 1 | 7 | no |" in chaos_table(MADE_UP)
    assert "| 10.50 / 10.00 ms | 1.050 | 11.00 / 10.00 ms | 1.100 | at most 1.03 | no |" in (
        "\n".join(steps_table(MADE_UP))
    )


def test_the_order_is_compared_with_what_it_was() -> None:
    figures = {
        "ttft_s": 1.0, "ttft_first_s": 1.0, "after_prefill_s": 0.02, "bytes": MIB, "all_s": 3.0,
    }  # fmt: skip
    runs = {
        f"{part} {system} {i}": {
            name: {key: value * times + i * 0.1 * value for key, value in figures.items()}
            for name in (part, *(["burst"] if part == "turns" else []))
        }
        for part in ("turns", "crowd")
        for system, times in (("before", 1.0), ("ours", 0.9)) for i in range(2)
    }  # fmt: skip
    table = "\n".join(order_table({"runs": runs}))
    assert "| turns: TTFT P50, ms | 1,050 | 950 | .90 | 1.11 |" in table


def test_ours_is_compared_with_pull() -> None:
    figures = {"ttft_first_s": 2.0, "after_prefill_first_s": 0.1, "requests": 7}
    burst = {"ttft_s": 4.0, "all_s": 5.0, "bytes": 3 * MIB}
    runs = {
        f"turns {system} 0": {
            "turns": {key: value * times for key, value in figures.items()},
            "burst": {key: value * times for key, value in burst.items()},
        }
        for system, times in (("pull", 4), ("ours", 1), ("drawn", 2))
    }
    table = "\n".join(peers_table({"runs": runs}))
    assert "| first turns: TTFT P50, s | 8.0 | 2.0 | 4.0 | .250 |" in table
    assert "| turns answered in four minutes, of 40 | 28 | 7 | 14 | |" in table


def test_the_change_of_order_took_no_hits() -> None:
    """As benchmarks/results/vllm.md says."""
    before, after = result("vllm"), result("vllm_peers")
    for system in ("own", "gated", "adaptive"):
        (old,), (new,) = runs_of(before, "pool", system), runs_of(after, "pool", system)
        for name in ("pool agents", "pool chat", "pool few"):
            assert new[name]["hit_ratio"] == pytest.approx(old[name]["hit_ratio"], abs=0.003)


@pytest.mark.skipif(not FILE.exists(), reason="no quiet machine has run it")
@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_the_result_file(name: str) -> None:
    table = "\n".join(TABLES[name](result(FILES.get(name, "vllm"))))
    assert f"<!-- {name} -->\n{table}\n\n" in DOCUMENT


def write() -> None:
    """The tables anew."""
    for name, make in TABLES.items():
        mark = f"<!-- {name} -->"
        write_table(page_with(mark), mark, make(result(FILES.get(name, "vllm"))))


if __name__ == "__main__":
    write()
