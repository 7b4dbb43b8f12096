"""The tables of docs/benchmarks.md and of the pages in benchmarks/results are those of the result
files, rounded.

Each function makes one table, line by line, from a result file; one of the pages has to have these
very lines behind the table's mark. `figures` are pieces of sentences, made the same way.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "benchmarks.md", *sorted(RESULTS.glob("*.md"))]
FIRST_PAGE = PAGES[0].read_text(encoding="utf-8")
DOCUMENT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
MIB = 1 << 20


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def fixed(value: float, digits: int = 0) -> str:
    """Halves are rounded up, as a reader would.

    >>> fixed(0.3505, 3), fixed(1009.5)
    ('0.351', '1,010')
    """
    unit = Decimal(1).scaleb(-digits)
    return f"{Decimal(str(value)).quantize(unit, ROUND_HALF_UP):,}"


def share(value: float, digits: int = 2) -> str:
    """Without the 0 before the point."""
    return fixed(value, digits).removeprefix("0")


def line(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def head(*cells: str) -> list[str]:
    return [line(*cells), "| --- " * len(cells) + "|"]


def write_table(path: Path, mark: str, lines: list[str]) -> None:
    """Put these lines in the place of the table behind a document's mark."""
    text, table = path.read_text(encoding="utf-8"), "\n".join(lines)
    text, num = re.subn(rf"({mark}\n)(?:\|.*\n)+", lambda found: f"{found[1]}{table}\n", text)
    assert num == 1, f"{path.name} has no table {mark}"
    path.write_text(text, encoding="utf-8")


def page_with(mark: str) -> Path:
    """The one page that has this mark on a line of its own."""
    (page,) = (one for one in PAGES if f"{mark}\n" in one.read_text(encoding="utf-8"))
    return page


def ms(seconds: float) -> str:
    """Tenths below 0.1 s, or as far as the other figure of the pair has them."""
    return f"{fixed(seconds * 1e3, 1)} ms" if seconds < 0.1 else f"{fixed(seconds * 1e3)} ms"


# --- the cache ------------------------------------------------------------------------------------


def radix_table() -> list[str]:
    rows = result("radix")["rows"]

    def row(name: str, **where: Any) -> dict[str, Any]:
        (found,) = [
            row for row in rows
            if row["name"] == name and all(row.get(key) == where[key] for key in where)
        ]  # fmt: skip
        return found  # type: ignore[no-any-return]

    def told(what: str, found: dict[str, Any]) -> str:
        if "peer_us" not in found:
            return line(what, f"{fixed(found['us'], 1)} us", "", "")
        ratio = share(found["ratio_to_peer"])
        return line(what, f"{fixed(found['us'], 1)} us", f"{fixed(found['peer_us'], 1)} us", ratio)

    return [
        *head("operation, page 16", "prefixkv", "SGLang", "ratio"),
        told("match 32k tokens, 32 nodes",
             row("match_prefix", tokens=32768, nodes=32, page_size=16)),
        told("match 131k tokens, 64 nodes",
             row("match_prefix", tokens=131072, nodes=64, page_size=16)),
        told("insert a new leaf of 32k tokens",
             row("insert_new_leaf", tokens=32768, page_size=16)),
        told("lock and unlock, depth 64", row("lock_unlock", depth=64)),
        told("evict one page of 1,000,000 leaves (`gated`)",
             row("evict_one_page", policy="gated", leaves=1_000_000)),
    ]  # fmt: skip


def reserve_table() -> list[str]:
    return [
        *head("`evict_reserve`", "hit rate", "runs for 100 new pages", "an admission, P50"),
        *(
            line(
                f"{case['reserve']:g}", f"{case['token_hit_rate']:.2%}",
                fixed(case['runs_per_100_new_pages']), f"{fixed(case['admit_cpu_us_p50'])} us",
            )
            for case in result("eviction_reserve")["cases"]
        ),
    ]  # fmt: skip


def host_hits_table() -> list[str]:
    """The real scheduler, and in brackets the replay."""

    def both(row: dict[str, Any], where: str) -> str:
        mine, replay = share(row["scheduler"][where], 3), share(row["replay"][where], 3)
        return mine if mine == replay else f"{mine} ({replay})"

    return [
        *head("trace", "blocks", "policy", "in the pool", "in host memory, 4x", "in both"),
        *(
            line(
                row["trace"].split("_")[1], f"{row['capacity']:,}", f"`{row['policy']}`",
                *(both(row, where) for where in ("pool", "host", "both")),
            )
            for row in result("host_hits")["rows"]
        ),
    ]  # fmt: skip


def host_turns_table() -> list[str]:
    """Both by today, median and each pair; in brackets today by today."""

    def ratios(row: dict[str, Any], key: str) -> str:
        mine, again = row[f"{key}_both_by_today"], row[f"{key}_today_by_today"]
        each = ", ".join(fixed(one, 2) for one in mine["ratios"])
        return f"{fixed(mine['median'], 2)}: {each} ({fixed(again['median'], 2)})"

    return [
        *head("prefill's pool", "first token, P50", "P99", "between tokens, P99", "bytes sent"),
        *(
            line(
                row["prefill"],
                *(ratios(row, key) for key in ("later_ttft_p50_ms", "later_ttft_p99_ms",
                                               "itl_p99_ms", "sent_mib")),
            )
            for row in result("host_turns")["rows"]
        ),
    ]  # fmt: skip


def checkpoints_table() -> list[str]:
    """Of each trace, size and policy, with each number of slots."""
    return [
        *head("trace", "blocks", "policy", "dense", "30 slots", "100", "300", "by dense, 300"),
        *(
            line(
                few["trace"].split("_")[1], f"{few['capacity']:,}", f"`{few['policy']}`",
                share(many["dense"], 3), *(share(one["resume"], 3) for one in (few, some, many)),
                share(many["resume_by_dense"], 2),
            )
            for few, some, many in batched_rows(result("checkpoints")["rows"], 3)
        ),
    ]  # fmt: skip


def splits_table() -> list[str]:
    """Of each model, size and policy: one pool, decode, and prefill at its best."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result("splits")["rows"]:
        key = row["trace"].split("_")[1], row["model"], row["blocks"], row["policy"]
        cases.setdefault(key, []).append(row)
    lines = []
    for (trace, model, blocks, policy), (one, decode, *prefill) in cases.items():
        best = max(prefill, key=lambda row: row["resume_ratio"])
        lines.append(
            line(
                trace, model, f"{blocks:,}", f"`{policy}`", share(one["dense_ratio"], 3),
                share(decode["dense_ratio"], 3), f"{best['checkpoints']:,} ({best['share']:.1%})",
                share(best["dense_ratio"], 3), share(best["resume_ratio"], 3),
            )
        )  # fmt: skip
    return [
        *head("trace", "model", "blocks", "policy", "one pool", "decode", "prefill's checkpoints",
              "there found", "goes on behind"),
        *lines,
    ]  # fmt: skip


def batched_rows(rows: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def host_copies_table() -> list[str]:
    def ratios(row: dict[str, Any], way: str) -> str:
        return f"{fixed(row[f'{way}_by_rows'][0], 2)} ({fixed(row[f'{way}_by_rows_cpu'][0], 2)})"

    return [
        *head("pool", "copy", "rows, KiB", "rows", "the same again", "pieces", "an order",
              "by two threads"),
        *(
            line(
                row["shape"], row["what"], fixed(row["row_bytes"] / 1024),
                f"{fixed(row['rows_gb_s'], 1)} GB/s",
                *(ratios(row, way) for way in ("rows_again", "copy", "order_1", "order_2")),
            )
            for row in result("host_copies")["rows"]
        ),
    ]  # fmt: skip


def host_copies_figures() -> dict[str, str]:
    """Of copies to and from host pages, by a memcpy of the same rows; the goal was .7."""
    rows = result("host_copies")["rows"]

    def least(way: str) -> str:
        return fixed(min(row[way][0] for row in rows), 2).removeprefix("0")

    low = sum(row["order_1_by_rows"][0] < 0.7 for row in rows)
    return {
        "host copies, pieces": f"{least('copy_by_rows')} of that speed at least",
        "host copies, an order": f"{least('order_1_by_rows')} ({low} of {len(rows)} below .7)",
        "host copies, processor": f"{least('order_1_by_rows_cpu')} by processor time",
        "host copies, missed": f"{least('order_1_by_rows')} of a memcpy of the same rows at least, "
        f"not .7 ({least('order_1_by_rows_cpu')} by processor time)",
        "host copies, load": f"load {fixed(result('host_copies')['recipe']['load_average'][0])}, "
        "two cores",
    }


def host_identity_table() -> list[str]:
    keys = ("finished", "left", "cut", "refused", "host_loads", "host_loaded_pages",
            "computed_requests", "retractions", "tokens", "different")  # fmt: skip
    return [
        *head("", "answers to their ends", "left", "cut", "refused", "loads", "pages loaded",
              "computed by decode", "retracted", "tokens compared", "other tokens"),
        *(
            line(row["case"], *(fixed(row[key]) for key in keys))
            for row in result("host_identity")["rows"]
        ),
    ]  # fmt: skip


def host_admission_figures() -> dict[str, str]:
    """Of an admission, beside one without host memory."""
    rows = {row["kind"]: row for row in result("host_admission")["rows"]}

    def more(kind: str) -> str:
        return fixed(rows[kind]["more_us"], 1)

    return {
        "an admission without a hit": f"{more('in the pool')} us longer than "
        f"{fixed(rows['no host']['us'])} us (the same again {more('no host again')})",
        "an admission with a hit": f"{more('in host')} us, half of it there "
        f"{more('half in host')} us",
    }


def checkpoint_figures() -> dict[str, str]:
    """Of looking for a checkpoint behind a match."""
    look = result("checkpoints")["recipe"]["look_us"]
    return {
        "a look": f"{fixed(look['match'], 1)} us for a match of 8,192 tokens, "
        f"{fixed(look['found'], 1)} us more to find its checkpoint, {fixed(look['none'], 1)} us "
        "where there is none",
    }


def waiting_pairs(what: str) -> list[tuple[float, float]]:
    """Of each case, in the table's order: this figure without and with protecting what waits."""
    rows = result("waiting")["rows"]
    with_it = [row for row in rows if row["protect"]]
    without = (
        next(
            one for one in rows
            if one == row | {"protect": False, **{key: one[key] for key in _MEASURED}}
        )
        for row in with_it
    )  # fmt: skip
    return [(one[what], row[what]) for one, row in zip(without, with_it, strict=True)]


def waiting_table() -> list[str]:
    rows = result("waiting")["rows"]

    def pair(row: dict[str, Any], what: str, digits: int) -> str:
        (without,) = (one for one in rows if one == row | {
            "protect": False, **{key: one[key] for key in _MEASURED}})  # fmt: skip
        before, after = without[what], row[what]
        gain = f"{after / before - 1:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
        return f"{fixed(before, digits)}, {fixed(after, digits)}, {gain}"

    return [
        *head("trace", "blocks", "`admission`", "waiting", "hits", "TTFT P50, s", "TTFT mean, s"),
        *(
            line(
                row["trace"].split("_")[1], f"{row['blocks']:,}", f"`{row['admission']}`",
                row["waiting"], pair(row, "block_hit_ratio", 3), pair(row, "ttft_s_p50", 1),
                pair(row, "ttft_s_mean", 1),
            )
            for row in rows
            if row["protect"]
        ),
    ]  # fmt: skip


_MEASURED = (
    "waited", "block_hit_ratio", "ttft_s_mean", "ttft_s_p50", "requests_a_second",
)  # fmt: skip


SWITCHED = {
    "protection, by hits first": (("hit_aware", True, False), ("hit_aware", False, False)),
    "protection, first come, first served": (("fifo", True, False), ("fifo", False, False)),
    "order: by hits instead of by arrival": (("hit_aware", False, False), ("fifo", False, False)),
    "nothing: pauses .1 s longer": (("hit_aware", False, True), ("hit_aware", False, False)),
}
"""What is compared: the case with it, and the case without it."""


def seed_differences(trace: str, waiting: int, switched: str, what: str) -> list[float]:
    """Of each seed: how much higher this figure is with what is switched than without it."""
    with_it, without = (
        {
            row["seed"]: row[what]
            for row in result("waiting_seeds")["rows"]
            if (row["trace"], row["waiting"]) == (trace, waiting)
            and (row["admission"], row["protect"], row["pause_more_s"] > 0) == case
        }
        for case in SWITCHED[switched]
    )
    return [with_it[seed] - without[seed] for seed in sorted(without)]


def waiting_seeds_table() -> list[str]:
    rows = result("waiting_seeds")["rows"]

    def mean(values: list[float], digits: int) -> str:
        error = statistics.stdev(values) / len(values) ** 0.5
        middle = fixed(statistics.mean(values), digits).replace(
            "-" + fixed(0, digits), fixed(0, digits)
        )
        sign = "" if middle.startswith("-") or not float(middle) else "+"
        return f"{sign}{middle} ({fixed(error, digits)})"

    lines = head(
        "trace", "waiting", "switched on", "hits", "first tokens within 1 s", "TTFT mean, s",
        "TTFT P50, s", "TTFT P50, s, by seed",
    )  # fmt: skip
    for trace, waiting in dict.fromkeys((row["trace"], row["waiting"]) for row in rows):
        for switched in SWITCHED:

            def of(
                what: str, trace: str = trace, waiting: int = waiting, on: str = switched
            ) -> Any:
                return seed_differences(trace, waiting, on, what)

            p50 = of("ttft_s_p50")
            lines.append(
                line(
                    trace.split("_")[1], str(waiting), switched, mean(of("block_hit_ratio"), 3),
                    mean(of("soon"), 3), mean(of("ttft_s_mean"), 1), mean(p50, 1),
                    f"{fixed(min(p50), 1)} to {fixed(max(p50), 1)}",
                )
            )  # fmt: skip
    return lines


def host_tier_rows(running: int) -> list[dict[str, Any]]:
    return [row for row in result("host_tier")["rows"] if row["running"] == running]


def host_tier_table() -> list[str]:
    """Twice the pool and more, one request at a time."""
    lines = head(
        "trace", "blocks", "policy", "too long", "the pool alone", "host 2x", "4x", "16x",
        "written, 4x", "loaded, 4x",
    )  # fmt: skip
    for row in host_tier_rows(1):
        _, *tiers = row["host"]
        asked = row["hit_tokens"] / 512 / row["block_hit_ratio"]
        lines.append(
            line(
                row["trace"].split("_")[1], f"{row['capacity_blocks']:,}", f"`{row['policy']}`",
                f"{row['too_long']}", share(row["block_hit_ratio"], 3),
                *(share(tier["block_hit_ratio"], 3) for tier in tiers),
                share(tiers[1]["written_blocks"] / asked, 3),
                share(tiers[1]["loaded_blocks"] / asked, 3),
            )
        )  # fmt: skip
    return lines


def rule_table() -> list[str]:
    """The best fixed number of tokens of each row, and the rule."""
    lines = head(
        "trace, blocks", "prefill's cache, tokens/s", "link", "host", "best fixed number: P50",
        "the rule's P50", "by the best", "prefill's times known", "P99 by the best",
    )  # fmt: skip
    for row in result("rule")["rows"]:
        best = min(row["fixed"], key=lambda most: row["fixed"][most]["ttft_s_p50"])
        rule, known = row["rule"], row["rule, all known"]
        held_out = ", held out" if row["held_out"] else ""
        lines.append(
            line(
                f"{row['trace']}, {row['capacity']:,}{held_out}",
                f"{row['prefill']}, {fixed(row['tokens_per_s'])}", f"{row['link_gbit']} Gbit/s",
                f"{row['host_times']}x" if row["host_times"] else "none",
                f"{int(best):,}: {fixed(row['fixed'][best]['ttft_s_p50'], 3)} s",
                f"{fixed(rule['ttft_s_p50'], 3)} s", share(rule["ttft_s_p50_by_best_fixed"], 2),
                share(known["ttft_s_p50_by_best_fixed"], 2),
                share(rule["ttft_s_p99_by_best_fixed"], 2),
            )
        )  # fmt: skip
    return lines


def rule_figures() -> dict[str, str]:
    """Of decode's rule beside fixed numbers of tokens."""
    ratios, rows = result("rule")["ratios"], result("rule")["rows"]
    p50 = "ttft_s_p50_by_best_fixed"

    def told(kind: str, name: str = "rule", of: str = "p50") -> str:
        one = ratios[kind][name][f"ttft_s_{of}_by_best_fixed"]
        return f"{share(one['median'], 2)} at the median and {share(one['most'], 2)} at most"

    def alone(most: str) -> str:
        of = [
            row["fixed"][most]["ttft_s_p50"]
            / min(one["ttft_s_p50"] for one in row["fixed"].values())
            for row in rows
            if not row["held_out"]
        ]
        return f"{share(statistics.median(of), 2)} and {share(max(of), 2)}"

    return {
        "the rule, agents": f"rule's P50 is {told('agents')} of that of each row's best number",
        "the rule, agents with a host": f"({told('agents, host')} with a host tier)",
        "the rule, all known": f"it would be {told('agents', 'rule, all known')}",
        "the rule, held out": f"On the rows held out it is {told('held out')}",
        "the rule, held out, all known": f"({told('held out', 'rule, all known')} with",
        "the rule, its aim": f"| {share(ratios['agents']['rule'][p50]['median'], 2)} at the "
        f"median, not .9 | With prefill's times known in advance it would be "
        f"{share(ratios['agents']['rule, all known'][p50]['median'], 2)}. |",
        "the rule's P99": f"P99 is {told('agents', of='p99')}",
        "fixed numbers alone": f"2,048 for all rows is {alone('2048')} times the best, median and "
        f"most, 512 {alone('512')}, 8,192 {alone('8192')}",
    }


def sched_table() -> list[str]:
    """Files from before there were cold rows make a table without their column."""
    rows = result("sched")["rows"]
    with_cold = any(row.get("cold") for row in rows)

    def told(what: str, name: str, number: int = 0) -> str:
        warm, *cold = (
            [row for row in rows if row["name"] == name and row.get("cold", False) is is_cold][
                number
            ]
            for is_cold in ((False, True) if with_cold else (False,))
        )
        aim = warm.get("target_us_p50")
        return line(
            what, f"{fixed(warm['us_p50'])} us", f"{fixed(warm['us_p99'])} us",
            f"{aim:g} us" if aim else "", {True: "yes", False: "no"}.get(warm.get("met"), ""),
            *(f"{fixed(row['us_p50'])} us" for row in cold),
        )  # fmt: skip

    return [
        *head("call", "P50", "P99", "aim, P50", "met", *(["cold, P50"] if with_cold else [])),
        told("`add`", "add"),
        told("`pop_preallocated`, one request is admitted", "admit"),
        told("the same, pages are evicted for it", "admit", 2),
        told("the least that such an admission is made of", "admit_floor"),
        told("`pop_transferred`, one request is committed", "commit"),
        told("`finish`", "finish"),
        told("a pass in vain, 10,000 wait", "blocked_pass"),
        told("`append_many`, 256 requests", "append_many"),
    ]


# --- several workers ------------------------------------------------------------------------------


def router_table() -> list[str]:
    plain = {row["router"]: row for row in result("router")["results"] if not row["settings"]}
    names = {
        "bounded": "bounded affinity", "longest": "longest match", "round_robin": "round robin",
        "least_loaded": "least loaded",
    }  # fmt: skip
    return [
        *head(
            "", "block hit ratio", "blocks sent, max / mean",
            "blocks in progress over time, max / mean",
        ),
        *(
            line(
                name, share(plain[router]["block_hit_ratio"], 3),
                fixed(plain[router]['load_routed'], 2), fixed(plain[router]['load_in_progress'], 2),
            )
            for router, name in names.items()
        ),
    ]  # fmt: skip


def ranks_table() -> list[str]:
    def pair(values: list[float]) -> str:
        return f"{fixed(values[0])} / {fixed(values[1])} us"

    return [
        *head(
            "running", "a pass without the log, P50 / P99", "with it", "another rank applies it",
            "message",
        ),
        *(
            line(
                f"{case['running']}", pair(case["pass_without_log_us_p50_p99"]),
                pair(case["pass_with_log_us_p50_p99"]),
                pair(case["another_rank_applies_us_p50_p99"]),
                f"{fixed(case['message_bytes_p50_max'][0] / 1024)} KiB",
            )
            for case in result("ranks")["cases"]
        ),
    ]  # fmt: skip


# --- the transport --------------------------------------------------------------------------------


def claims(group: str, *cases: str) -> list[dict[str, Any]]:
    """What was claimed of these cases, measured."""
    told = {one["case"]: one for one in result("claims")["measured"][group]["claims"]}
    return [told[case] for case in cases]


def met(rows: list[dict[str, Any]]) -> str:
    """Of those that have an aim."""
    said = [row["met"] for row in rows if row["met"] is not None]
    if not said:
        return ""
    if all(said) or not any(said):
        return "yes" if all(said) else "no"
    return f"{sum(said)} of {len(said)}"


def measured(rows: list[dict[str, Any]], digits: int = 2) -> str:
    return " / ".join(share(row["measured"], digits) for row in rows)


def aims(rows: list[dict[str, Any]]) -> str:
    told = [row["target"] for row in rows]
    if told == [None] * len(told):
        return ""
    texts = ["none" if one is None else f"{one:g}".removeprefix("0") for one in told]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def told(what: str, rows: list[dict[str, Any]], figures: str) -> str:
    unit = {"us": " us", "ms": " ms"}.get(rows[0]["unit"], "")
    aim = aims(rows)
    return line(what, figures + unit, aim and aim + unit, met(rows))


def goodput(layout: str, of: str) -> list[dict[str, Any]]:
    rows = {one["case"]: one for one in result("transfer")["claims"]}
    return [rows[f"{layout}, {pages} pages, of {of}"] for pages in ("fresh", "aged", "random")]


def creation(pages: str) -> list[dict[str, Any]]:
    counts = ("1,024", "16,384", "131,072")
    named = "creation, {} descriptors, {} pages: initialize_xfer / prepared"
    return claims("prepare", *(named.format(count, pages) for count in counts))


def staging(pages: str, what: str) -> list[dict[str, Any]]:
    ways = ("TP4 to TP1", "TP1 to TP4")
    return claims("staging", *(f"{way}, {pages} pages: {what}" for way in ways))


def transport_table() -> list[str]:
    same = goodput("layer_major", "raw posts of the same descriptors")
    lower = "TTFT of 128 requests of 2,048 descriptors, {} pages: mean lower by"
    lowered = claims("prepare", *(lower.format(pages) for pages in ("contiguous", "random")))
    tcp, default = "tcp, compute in sleep: {}", "default, compute in sleep: {}"
    seen = claims(
        "async",
        *(tcp.format(f"ready to seen, {what}, inline / thread") for what in ("mean", "P99")),
    )
    kept = claims("async", tcp.format("scheduler kept a chunk, mean, inline / thread"))
    chunk = claims("async", *(wire.format("send_chunk P99") for wire in (default, tcp)))
    step = "{}, compute in {}: a step with all that it costs, inline / thread"
    steps = {
        where: claims("async", *(step.format(wire, compute) for compute in ("sleep", "torch")))
        for where, wire in (("shared memory", "default"), ("TCP", "tcp"))
    }
    hit = claims("full-hit", "P50, scheduler threads waiting at their nodes")
    busy = "P50, scheduler threads busy in Python, switch interval {} ms"
    busy_hits = claims("full-hit", *(busy.format(every) for every in ("5", "0.5", "0.1")))
    idle = claims("idle", "an idle decode node, of a core", "an idle prefill node, of a core")
    near, far = creation("contiguous"), creation("random")
    ways = "TP4 to TP1 / TP1 to TP4"
    return [
        *head("", "measured", "aim", "met"),
        *(
            told(what, rows, measured(rows))
            for what, rows in {
                "goodput by one raw NIXL write, `page_major`: fresh / aged / random pages":
                    goodput("page_major", "one raw write"),
                "the same, `layer_major`": goodput("layer_major", "one raw write"),
                "by raw posts of the very same descriptors, `layer_major`": same,
            }.items()
        ),
        told("creating 1k / 16k / 131k descriptors, neighbouring pages: `initialize_xfer` by "
             "prepared", near, f"{fixed(near[0]['measured'], 1)} / {measured(near[1:], 0)}"),
        told("the same, random pages", far, measured(far, 1)),
        told("TTFT of 128 requests of 2,048 descriptors, neighbouring pages: mean lower than with "
             "`initialize_xfer` by", lowered[:1], measured(lowered[:1])),
        told("the same, random pages", lowered[1:], measured(lowered[1:])),
        told(f"staged by sliced speed, fresh pages: {ways}",
             rows := staging("fresh", "sliced / staged"), measured(rows, 1)),
        told("the same, random pages",
             rows := staging("random", "sliced / staged"), measured(rows, 1)),
        told(f"staged by equal TP's speed, fresh pages: {ways}",
             rows := staging("fresh", "of equal TP's speed"), measured(rows)),
        told("the same, random pages",
             rows := staging("random", "of equal TP's speed"), measured(rows)),
        told("time that a chunk keeps the scheduler, TCP, mean: inline by transport thread", kept,
             measured(kept, 0)),
        told("time from KV ready to KV seen, TCP, mean / P99: inline by transport thread", seen,
             measured(seen, 1)),
        *(
            told(f"time of a step in all, {where}, compute sleeps / computes: inline by "
                 "transport thread", rows, measured(rows, 1))
            for where, rows in steps.items()
        ),
        told("`send_chunk` P99, shared memory / TCP", chunk, measured(chunk, 0)),
        told("full hit, P50, idle", hit, measured(hit, 1)),
        told("full hit, P50, scheduler threads busy in Python, switch interval 5 / .5 / .1 ms",
             busy_hits, measured(busy_hits, 1)),
        told("a node without work, decode / prefill, share of a core", idle, measured(idle, 4)),
    ]  # fmt: skip


def full_hit_table() -> list[str]:
    """Of the first run of each kind."""
    paused, none = result("full_hit")["measured"]["full-hit-parts"]["details"]["hits"][:2]
    assert (paused["pause_ms"], none["pause_ms"]) == (10, 0)
    rows = [
        line(a["what"], fixed(a["us"]), fixed(b["us"]))
        for a, b in zip(paused["parts_us"], none["parts_us"], strict=True)
    ]
    return [
        *head("P50, us", "pauses of 10 ms", "no pause"),
        *rows,
        line("all of it", fixed(paused["p50_us"]), fixed(none["p50_us"])),
        line(
            "1,000 additions in Python, before it",
            *(fixed(one["loop_us"]) for one in (paused, none)),
        ),
    ]


def small_pages_table() -> list[str]:
    huge, small = (
        {(row["layout"], row["pages"]): row["gib_per_s"] for row in result(name)["rows"]}
        for name in ("transfer", "transfer_small_pages")
    )
    return [
        *head(
            "layout, pages", "stack, GiB/s, huge / small pages", "ratio",
            "raw posts of its descriptors, GiB/s, huge / small", "ratio",
        ),
        *(
            line(
                f"`{case[0]}`, {case[1]}",
                *(
                    cell
                    for what in ("stack", "same")
                    for cell in (
                        f"{fixed(huge[case][what], 2)} / {fixed(small[case][what], 2)}",
                        fixed(huge[case][what] / small[case][what], 1),
                    )
                ),
            )
            for case in huge
        ),
    ]  # fmt: skip


def meshes_table() -> list[str]:
    rows = result("demo_meshes")["rows"]
    sizes = list(dict.fromkeys((row["prefill_tp"], row["decode_tp"]) for row in rows))
    told = []
    for size in sizes:
        of = [row for row in rows if (row["prefill_tp"], row["decode_tp"]) == size]
        modes = ", ".join(dict.fromkeys(row["mode"].replace(", ", " in ") for row in of))
        pages = f"{sum(row['pages_verified'] for row in of):,}"
        wrong = sum(row["pages_mismatched"] + row["failed"] for row in of)
        told.append(line(f"{size[0]} / {size[1]}", f"{len(of)}", modes, f"{pages} / {wrong}"))
    return [
        *head("ranks, prefill / decode", "runs", "what is sent", "pages verified / wrong"),
        *told,
    ]


def chats_table() -> list[str]:
    def waits(row: dict[str, Any], side: str) -> str:
        one = row[side]
        found = f"{fixed(one['ttft_p50_s'], 3)} / {fixed(one['ttft_p99_s'], 3)}"
        if one["answered"] == row["chats"]:
            return found
        assert side == "theirs"
        return f"{found}, of the {one['answered']} that were answered"

    return [
        *head("chats", "burst", "TTFT P50 / P99, s", "A against A", "the commit before"),
        *(
            line(
                str(row["chats"]),
                row["burst"],
                waits(row, "ours"),
                waits(row, "again"),
                waits(row, "theirs"),
            )
            for row in result("chats_at_once")["rows"]
        ),
    ]


def burst_table() -> list[str]:
    of = result("burst")
    rows = [
        line(
            f"{burst['ran'] + burst['failed']}{how}",
            burst["the_first"].replace("nothing", "left alone"), fixed(burst['computed_ratio'], 2),
            fixed(burst['ratio'], 2), fixed(burst['ratio_if_each_were_sent_whole']),
            f"{burst['ran']} / {burst['failed']}",
        )
        for name, how in (
            ("bursts", ""), ("each_alone", ", `follow_s=0`"),
            ("small_bursts", ""), ("small_each_alone", ", `follow_s=0`"),
        )
        for burst in of[name]
    ]  # fmt: skip
    return [
        *head(
            "requests", "the first is", "tokens computed, of one prompt and the suffixes",
            "KV sent, of that", "if each were sent whole", "ran / failed",
        ),
        *rows,
    ]  # fmt: skip


def storms_table() -> list[str]:
    chaos, soak = result("chaos")["summary"], result("soak")
    verdict, rss = soak["verdict"], soak["verdict"]["rss_mib"]
    many = result("rooms_memory")
    samples, mib = many["samples"], 1 << 20
    return [
        *head("", ""),
        line("chaos: requests / processes", f"{chaos['requests']:,} / {chaos['lives']}"),
        line("chaos: pages verified / wrong",
             f"{chaos['pages_verified']:,} / {chaos['mismatches']}"),
        line("chaos: free pages checked / written late",
             f"{chaos['free_pages_checked']:,} / {chaos['late_writes']}"),
        line("chaos: left over at the end", f"{chaos['left']}"),
        line("soak: rooms", f"{sum(soak['plans'].values()):,}"),
        line("soak: memory, three times in the run, MiB", " / ".join(fixed(one) for one in rss)),
        line("soak: growth, bytes a room / most allowed",
             " / ".join(fixed(verdict[name]) for name in ("bytes_a_room", "most_bytes_a_room"))),
        line("rooms_memory: rooms", f"{many['verdict']['rooms']:,}"),
        line("rooms_memory: in use by malloc after the first 20,000, a half, all, MiB",
             " / ".join(fixed(samples[at]["malloc_bytes"] / mib)
                        for at in (0, len(samples) // 2, -1))),
        line("rooms_memory: growth in the last half, bytes a room by malloc / blocks by Python",
             " / ".join(f"{many['verdict'][name]:.1f}"
                        for name in ("malloc_bytes_a_room", "python_blocks_a_room"))),
    ]  # fmt: skip


def waiting_cpu_table() -> list[str]:
    found = result("waiting_cpu")

    def core(engine: str, server: str, state: str) -> str:
        rows = [row["share"] for row in found["rows"] if state == row["state"]
                and (engine, server) == (row["engine"], row["server"])]  # fmt: skip
        return f"{rows[0]:.1%}" if rows else ""

    servers = dict.fromkeys((row["engine"], row["server"]) for row in found["rows"])
    return [
        *head("share of a core", "idle", "waits", "decode stopped", f"below {found['bound']:.0%}"),
        *(
            line(
                f"{engine}, {server}",
                *(core(engine, server, state) for state in ("idle", "waits", "decode stopped")),
                "yes" if all(row["share"] < found["bound"] for row in found["rows"] if
                             (engine, server) == (row["engine"], row["server"])) else "no",
            )
            for engine, server in servers
        ),
    ]  # fmt: skip


# --- on a GPU -------------------------------------------------------------------------------------


def gpu_transfer_table() -> list[str]:
    rows = [row for row in result("gpu")["measured"]["transfer"] if "page_size" in row]
    return [
        *head("layout, tokens a page, pages", "UCX", "node to node, GiB/s",
              "raw NIXL, its descriptors", "raw NIXL, one write"),
        *(
            line(
                f"`{row['layout']}`, {row['page_size']}, {row['pages']}",
                f"`UCX_TLS={row['ucx_tls']}`" if row["ucx_tls"] else "CUDA IPC",
                *(fixed(row["gib_per_s"][side], 1) for side in ("stack", "same", "one")),
            )
            for row in rows
        ),
    ]  # fmt: skip


def gpu_table() -> list[str]:
    measured = result("gpu")["measured"]
    (copies,) = measured["copies"]

    def of(what: str) -> str:
        found = [row[name] for row in copies["staging"] for name in row if what in name]
        return f"{fixed(min(found))} to {fixed(max(found))} GB/s"

    plain = " / ".join(fixed(speed) for speed in copies["plain_copy"].values())
    unequal = [
        line(f"{row['meshes']}, 64 MiB, pages of 16 random: staged / sliced / equal ranks",
             " / ".join(fixed(row["ms"][name]) for name in ("staged", "sliced", "equal")) + " ms")
        for row in measured["transfer"] if "meshes" in row
    ]  # fmt: skip
    steps = [
        line(f"a step, batch of {row['batch']:,}, P50: alone / while {fixed(row['came_in_gb_s'])} "
             "GB/s come in",
             " / ".join(fixed(row["step_ms"][how]["p50"], 1) for how in ("alone", "beside"))
             + f" ms ({fixed(row['beside_over_alone'], 2)} times)")
        for row in measured["step"] if row["layout"] == "page_major"
    ]  # fmt: skip
    on, off = measured["turns"]
    last = " / ".join(f"{fixed(run['turns'][-1]['ms'], 1)} ms" for run in (on, off))
    sent = " / ".join(f"{fixed(run['mib_in_all'])} MiB" for run in (on, off))
    verified = on["pages_verified"] + off["pages_verified"]
    return [
        *head("what", "measured"),
        line("plain copy on the card, 8 MiB / 128 MiB / 1 GiB", f"{plain} GB/s"),
        line("Triton's gather and scatter, all shapes, the kernel alone", of("kernel")),
        line("the same, leases of 64 MiB, launch and wait counted", of("64_mib")),
        line("the same, leases of 8 MiB", of("8_mib")),
        *unequal,
        *steps,
        line("turn 5 of a conversation, 2,112 tokens: transfer with the cache on / off", last),
        line("20 turns of 4 conversations: KV sent with the cache on / off", sent),
        line("pages verified / wrong in these turns",
             f"{fixed(verified)} / {on['pages_wrong'] + off['pages_wrong']}"),
    ]  # fmt: skip


def gpu_host_table() -> list[str]:
    """Of each layout and direction: GB/s by threads and size of pieces, and of a plain copy."""
    measured = result("gpu_h200")["measured"]["host"]
    names = [name.removeprefix("write, ") for name in measured[0]["ways"] if "write" in name]
    ways = sorted(names, key=lambda name: (name == "plain", len(name), name))
    lines = [
        line(
            f"`{row['layout']}`", what,
            *(fixed(row["ways"][f"{what}, {name}"]["gb_s"], 1) for name in ways),
        )
        for row in measured for what in ("load", "write")
    ]  # fmt: skip
    return [*head("pool", "copy", *ways), *lines]


def gpu_agents_table() -> list[str]:
    """Of each workload and case: the medians of the pairs' ratios, A against A beside."""
    rows = []
    for row in result("gpu_h200")["measured"]["agents"]:
        names = {"own_compute": ("on_by_off", "off_by_off")}
        of, again = names.get(row["workload"], ("both_by_today", "today_by_today"))
        medians = [
            [fixed(row[f"{key}_{which}"]["median"], 2) for which in (of, again)]
            for key in ("later_ttft_p50_ms", "itl_p99_ms")
        ]
        cells = [f"{found} ({apart})" for found, apart in medians]
        sent = f"sent_mib_{of}"
        cells.append(fixed(row[sent]["median"], 2) if sent in row else "")
        rows.append(line(f"`{row['workload']}`", row["prefill"], *cells))
    return [*head("workload", "prefill", "TTFT P50", "ITL P99", "bytes"), *rows]


TABLES: dict[str, Callable[[], list[str]]] = {
    "radix-table": radix_table,
    "reserve-table": reserve_table, "waiting-table": waiting_table,
    "waiting-seeds-table": waiting_seeds_table, "host-tier-table": host_tier_table,
    "host-copies-table": host_copies_table, "host-hits-table": host_hits_table,
    "host-identity-table": host_identity_table, "splits-table": splits_table,
    "gpu-host-table": gpu_host_table, "gpu-agents-table": gpu_agents_table,
    "checkpoints-table": checkpoints_table, "host-turns-table": host_turns_table,
    "rule-table": rule_table,
    "sched-table": sched_table, "router-table": router_table,
    "ranks-table": ranks_table, "transport-table": transport_table,
    "full-hit-table": full_hit_table,
    "small-pages-table": small_pages_table, "meshes-table": meshes_table,
    "chats-table": chats_table,
    "burst-table": burst_table, "storms-table": storms_table,
    "waiting-cpu-table": waiting_cpu_table,
    "gpu-transfer-table": gpu_transfer_table, "gpu-table": gpu_table,
}  # fmt: skip


@pytest.mark.parametrize("mark", TABLES)
def test_a_table_is_its_result_files(mark: str) -> None:
    table = "\n".join(TABLES[mark]())
    assert f"<!-- {mark} -->\n{table}\n\n" in DOCUMENT


# --- sentences ------------------------------------------------------------------------------------


def figures() -> dict[str, str]:
    """Pieces of sentences, by what they say."""
    decision = result("router")["decision"]
    meshes = result("demo_meshes")["rows"]
    trace = result("replay")["recipe"]["traces"]["mooncake_conversation"]
    random = result("transfer")["rows"][2]
    assert (random["layout"], random["pages"]) == ("layer_major", "random")
    cases = (
        f"layer_major, {pages} pages, of one raw write" for pages in ("fresh", "aged", "random")
    )
    same = "the_same_descriptors_of_one_raw_write"
    call = result("claims")["measured"]["prepare"]["details"]["creation"][0]
    quarters = ("nothing", "a quarter", "half", "three quarters", "all")
    around = 1 - call["prepared_call_ms"] / call["prepared_ms"]
    missed = [row for row in result("sched")["rows"] if row.get("met") is False]
    assert {row["name"] for row in missed} == {"admit", "admit_publishing_ratio"}
    admissions = [row for row in missed if row["name"] == "admit"]
    over = fixed(max(row["us_p50"] / row["target_us_p50"] for row in admissions), 1)
    (requests,) = re.findall(r"(\d+) requests", trace)
    waiting = {
        key: [after / before - 1 for before, after in waiting_pairs(key)]
        for key in ("block_hit_ratio", "ttft_s_p50", "ttft_s_mean")
    }
    # Of the case that is compared most: by hits, 32 waiting, nothing protected.
    plain = [
        row for row in result("waiting_seeds")["rows"]
        if (row["admission"], row["protect"], row["pause_more_s"], row["waiting"])
        == ("hit_aware", False, 0, 32)
    ]  # fmt: skip

    def seed_values(what: str) -> list[float]:
        return [row[what] for row in plain]

    def seed_mean(what: str) -> float:
        return statistics.mean(seed_values(what))

    trace_of_seeds = plain[0]["trace"]
    chance = [
        one
        for waiting_for in (8, 32, 128)
        for one in seed_differences(trace_of_seeds, waiting_for, [*SWITCHED][-1], "ttft_s_p50")
    ]
    gains = [
        statistics.mean(seed_differences(trace_of_seeds, waiting_for, switched, "ttft_s_mean"))
        for waiting_for in (8, 32, 128)
        for switched in [*SWITCHED][:2]
    ]
    all_shm = result("transfer_shm")["claims"]
    shm = [one["measured"] for one in all_shm if one["case"].endswith("of one raw write")]
    aimed = [one["met"] for one in all_shm if one["met"] is not None]
    counted = ("no", "one", "two", "three", "four", "five", "six")
    worse = [one for one in waiting["ttft_s_p50"][-6:] if one > 0]
    gpu = result("gpu")["measured"]
    by_gpu = {
        layout: [
            row["gib_per_s"]["stack"]
            for row in gpu["transfer"]
            if row.get("layout") == layout and not row.get("ucx_tls") and "page_size" in row
        ]
        for layout in ("layer_major", "page_major")
    }
    helping = result("full_hit_helping")
    paused, none = (
        {
            way: share(statistics.median(b / a for a, b in zip(ways["as_it_is"], us, strict=True)))
            for way, us in ways.items()
        }
        for ways in (helping["pauses_of_10_ms"], helping["no_pause"])
    )
    return {
        "an engine's thread that helps": f"a hit took {paused['helps']} times as long, with both "
        f"{paused['both']}; with no pause {none['helps']} and {none['both']} ",
        "hits of what waits": f"by {min(waiting['block_hit_ratio']):.0%} to "
        f"{max(waiting['block_hit_ratio']):+.0%}",
        "TTFT of what waits": f"mean TTFT by {min(waiting['ttft_s_mean']):.0%} to "
        f"{max(waiting['ttft_s_mean']):+.0%}",
        "a median in a gap": f"{seed_mean('soon'):.0%} of the requests get their first token "
        f"within a second; the first 40% within {fixed(seed_mean('ttft_s_p40'), 1)} s, half of "
        f"them within {fixed(seed_mean('ttft_s_p50'))}, and 60% within "
        f"{fixed(seed_mean('ttft_s_p60'))}",
        "P50 by seed": f"from {fixed(min(seed_values('ttft_s_p50')), 1)} to "
        f"{fixed(max(seed_values('ttft_s_p50')), 1)} s",
        "chance of P50": f"{fixed(min(chance), 1)} to +{fixed(max(chance), 1)} s",
        "protection's mean TTFT": f"by {fixed(-max(gains), 1)} to {fixed(-min(gains), 1)} s",
        "shm": f"is {share(min(shm), 2)} to {share(max(shm), 2)} times as fast as one raw NIXL",
        "shm's aims": {(10, 1): "One of its ten aims is missed"}[len(aimed), aimed.count(False)],
        "TTFT that gets worse": f"worse in {counted[len(worse)]} cases of six",
        "on a GPU, page_major": f"{fixed(min(by_gpu['page_major']))} to "
        f"{fixed(max(by_gpu['page_major']))} GiB/s with `page_major`",
        "on a GPU, layer_major": f"**{fixed(min(by_gpu['layer_major']), 1)} GiB/s with "
        "`layer_major`",
        "a decision": f"P50 {fixed(decision['route_us']['p50'])} us",
        "a slow decision": f"P99 {fixed(decision['route_us']['p99'] / 1e3, 1)} ms",
        "runs of the demo": f"{len(meshes)} runs",
        "their pages": f"{fixed(sum(row['pages_verified'] for row in meshes))} pages",
        "the trace": f"{fixed(int(requests))} requests",
        "small descriptors": f"{share(random[same])} of one write",
        "goodput, again": measured(claims("goodput", *cases)),
        "prepared lists": f"{fixed(call['built_over_prepared'], 1)} times as fast, not 10",
        "NIXL's call": f"{fixed(call['built_over_prepared_call_alone'], 1)} times as fast;",
        "around NIXL's call": f"{quarters[round(4 * around)]} of the prepared way's "
        f"{fixed(call['prepared_ms'] * 1e3)} us",
        "the scheduler's aims": f"{over} times the aim at most",
        "an admission with others waiting": " to ".join(
            fixed(pick(cost["ratio"] for cost in result("waiting")["costs"]), 2)
            for pick in (min, max)
        )
        + " times as long",
        "a busy machine": f"load {fixed(result('eviction_reserve')['recipe']['load'], 1)}",
        "a busier one": f"load {fixed(result('router')['recipe']['load_average'], 1)}",
        "the busiest": f"load {fixed(result('ranks')['recipe']['load'])}",
        **own_compute_figures(),
        **own_chats_figures(),
        **admission_call_figures(),
        **demo_speed_figures(),
        **digest_figures(),
        **vllm_turns_figures(),
        **host_copies_figures(),
        **host_admission_figures(),
        **checkpoint_figures(),
        **rule_figures(),
    }


def admission_call_figures() -> dict[str, str]:
    """Of calls per admission, with free pages and with none."""
    free, full = result("admission_calls")["rows"]
    return {
        "admission calls": f"the admission at P99 makes {free['calls_p99']} calls of functions, "
        f"that at P50 {free['calls_p50']}; in a full pool {full['calls_p99']} and "
        f"{full['calls_p50']},",
    }


def digest_figures() -> dict[str, str]:
    """Of what is new behind a prompt's cached tokens, in two runs, and of all of it."""
    runs = [
        {row["new_tokens"]: row["us_p50"] for row in rows if not row["cold"]}
        for rows in result("sched_quiet")["digest"]["runs"]
    ]
    short, whole = (0, 100, 512, 2048), (6144, 6244, 6656, 8192)
    assert len({tuple(run[tokens] for tokens in short) for run in runs}) == 1
    *few, most = (fixed(runs[0][tokens], 1) for tokens in short)
    both = [run[tokens] for run in runs for tokens in whole]
    return {
        "digest": f"twice alike, {', '.join(few)} and {most} in place of {fixed(min(both))} to "
        f"{fixed(max(both))}, `sched_quiet.json`",
    }


def demo_speed_figures() -> dict[str, str]:
    """Of the demo against the one of commit 3f9474e."""
    found = result("demo_speed")
    old, new, again = (found["ttft_p50_ms"][side] for side in ("old", "new", "new2"))
    ratios = [
        ours / theirs for side in (new, again) for ours, theirs in zip(side, old, strict=True)
    ]
    same = [second / first for first, second in zip(new, again, strict=True)]
    return {
        "demo against a commit": f"{share(statistics.median(ratios))} times, {share(min(ratios))} "
        f"to {fixed(max(ratios), 2)} in six pairs (the same against itself: {share(min(same))} to "
        f"{fixed(max(same), 2)})",
    }


def vllm_turns_figures() -> dict[str, str]:
    """From prefill's answer to the first token, and what of it is not decode's step."""
    push, ours = (result("vllm_turns")["summary"]["turns"][name] for name in ("push", "ours"))
    names = ("after_prefill_s", "less_a_step_s")
    (of_push, push_rest), (of_ours, rest) = (
        [side[name] for name in names] for side in (push, ours)
    )
    return {
        "vllm, first token": f"ours has {fixed(of_ours * 1e3, 1)} ms, of which "
        f"{fixed(rest * 1e3, 1)} are left without a step, `push` {fixed(of_push * 1e3, 1)} and "
        f"{fixed(push_rest * 1e3, 1)}: {share(of_ours / of_push, 3)}, and without the steps "
        f"{share(rest / push_rest, 3)}.",
        "vllm, cut off": f"after {push['requests']} of {ours['requests']} turns",
    }


def own_chats_figures() -> dict[str, str]:
    """Of such chats in simulated time."""
    busy, idle = (row for row in result("own_chats")["rows"] if row["itl_share"] == 0.5)
    assert (busy["prefill"], idle["prefill"]) == ("as pool", "keeps all")
    ttft = "later_ttft_p50_s"
    known, unknown = (share(idle[name][ttft], 2) for name in ("rule", "not told"))
    rule = busy["rule"]
    return {
        "own chats, idle prefill": f"With prefill idle TTFT P50 is {known} of that without own "
        f"compute, {unknown} where the rule is not told",
        "own chats, busy prefill": f"it is {share(rule[ttft], 2)}, P99 between tokens "
        f"{share(rule['itl_p99_s'], 2)}.",
    }


def own_compute_figures() -> dict[str, str]:
    """Of agents' chats with decode's own compute and without."""
    busy, idle = result("own_compute")["rows"]
    assert (busy["prefill"], idle["prefill"]) == ("as pool", "keeps all")
    loads = [load for row in (busy, idle) for load in row["load_average"]]
    steps = result("own_compute")["steps"]["ms_by_chunk"]

    def spread(row: Any, key: str) -> str:
        one = row[key]
        least, most = min(one["ratios"]), max(one["ratios"])
        return f"{share(one['median'], 2)} ({share(least, 2)} to {share(most, 2)})"

    def told(row: Any, key: str) -> str:
        return f"{spread(row, f'{key}_on_by_off')}, A against A {spread(row, f'{key}_off_by_off')}"

    ends = sorted({fixed(min(loads)), fixed(max(loads))}, key=float)
    ttft, itl = "later_ttft_p50_ms", "itl_p99_ms"
    return {
        "own compute, load": f"load {' to '.join(ends)})",
        "own compute, busy prefill": f"P50 {told(busy, ttft)}; the goal was .5",
        "own compute, busy prefill, P99": f"P99 {told(busy, 'later_ttft_p99_ms')}",
        "own compute, busy prefill, ITL": f"P99 between tokens {told(busy, itl)}; the "
        "goal was 1.25",
        "own compute, idle prefill": f"and is idle it is P50 {told(idle, ttft)}",
        "own compute, idle prefill, ITL": f"P99 between tokens {told(idle, itl)}.",
        "own compute, steps": f"takes {fixed(steps['0'], 1)} ms of processor time, with 4 tokens "
        f"of a prompt beside it {fixed(steps['4'], 1)} and with 8 {fixed(steps['8'], 1)}",
    }


def test_the_figures_of_the_text_are_their_result_files() -> None:
    text = re.sub(r"\s+", " ", DOCUMENT)
    assert [what for what, piece in figures().items() if piece not in text] == []


def test_every_table_stands_on_one_page() -> None:
    for mark in re.findall(r"^(<!-- [\w-]+ -->)$", DOCUMENT, re.MULTILINE):
        assert page_with(mark), mark


# --- the list -------------------------------------------------------------------------------------


def test_every_benchmark_and_every_result_file_is_named() -> None:
    for name in BENCHMARKS:
        assert f"`{name}`" in FIRST_PAGE or f"python -m benchmarks {name}" in FIRST_PAGE, name
    for path in RESULTS.iterdir():
        assert path.name in FIRST_PAGE, path.name


def test_a_result_file_that_is_named_is_there() -> None:
    for name in re.findall(r"\b[a-z0-9_]+\.(?:json|png)\b", DOCUMENT + README):
        assert (RESULTS / name).exists(), name
