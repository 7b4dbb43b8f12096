"""The tables and sentences on `prefixkv demo` and the stand-in engine are those of
benchmarks/results/demo*.json, rounded. After another run this writes them anew:

    python -m tests.benchmarks.test_demo_figures
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.demo_parts import PARTS, _requests
from prefixkv.cli.figures import compared, times
from tests.benchmarks.test_figures import (
    DOCUMENT,
    MIB,
    README,
    ROOT,
    fixed,
    head,
    line,
    ms,
    page_with,
    result,
    write_table,
)


def demo_table() -> list[str]:
    """Of the README: the chats of the demo, on one machine and over links."""
    chats = result("demo")
    on, off = chats["runs"]["cache_on"], chats["runs"]["cache_off"]
    fewer = chats["ratios"]["bytes_sent"]

    def right(run: dict[str, Any]) -> str:
        return f"{run['requests'] - run['answers_wrong']} of {run['requests']}"

    def ttft(name: str, runs: dict[str, Any]) -> str:
        passes = [runs[run]["ttft_p50_of_passes_s"] for run in ("cache_on", "cache_off")]
        shown, other = (ms(statistics.median(p50s)) for p50s in passes)
        words = compared(*passes, "lower")
        return line(name, shown if words == "alike" else f"**{shown}**", other, words)

    return [
        line("`prefixkv demo`, defaults, seed 1", "cache on", "off", ""),
        "| --- | --- | --- | --- |",
        line("answers that are what `generate()` says", f"**{right(on)}**", right(off),
             "token for token"),
        line("hit rate on decode, tokens", f"{on['token_hit_rate']:.1%}",
             fixed(off["token_hit_rate"]), ""),
        line("KV sent", f"**{fixed(on['bytes_sent'] / MIB)} MiB**",
             f"{fixed(off['bytes_sent'] / MIB)} MiB", times(fewer, "less", 1)),
        ttft("TTFT P50 inside this machine", chats["runs"]),
        *(ttft(f"TTFT P50 over {name}", link["runs"]) for name, link in chats["links"].items()),
    ]  # fmt: skip


def stand_in_table() -> list[str]:
    """The stand-in engine."""
    demo = result("stand_in")
    runs, saturated, ratios = demo["runs"], demo["saturated"], demo["ratios"]
    on, off = runs["cache_on"], runs["cache_off"]
    full, none = saturated["cache_on"], saturated["cache_off"]

    def ttft(run: dict[str, Any]) -> str:
        return f"{ms(run['ttft_s']['p50'])} / {ms(run['ttft_s']['p99'])}"

    return [
        line("a stand-in engine, defaults, seed 1", "cache on", "cache off", ""),
        "| --- | --- | --- | --- |",
        line("TTFT P50 / P99 at 0.7 of what cache-off sustains", ttft(on), ttft(off),
             times(ratios["ttft_p50"], "lower P50", 1)),
        line("TTFT P50 / P99, saturated", ttft(full), ttft(none),
             "differs from run to run"),
        line("requests a second, saturated", fixed(full["requests_per_s"]),
             fixed(none["requests_per_s"]), f"{fixed(ratios['requests_per_s'], 1)} times higher"),
        line("KV sent", f"{fixed(on['bytes_sent'] / MIB)} MiB",
             f"{fixed(off['bytes_sent'] / MIB)} MiB", f"{fixed(ratios['bytes_sent'])} times less"),
        line("hit rate on decode, tokens", f"{on['token_hit_rate']:.1%}",
             fixed(off["token_hit_rate"]), ""),
        line("pages verified / wrong", f"{on['pages_verified']:,} / {on['pages_mismatched']}",
             f"{off['pages_verified']:,} / {off['pages_mismatched']}",
             "every byte of every page a request holds"),
    ]  # fmt: skip


def demos_table() -> list[str]:
    rows = []
    for name, what in {
        "stand_in": "16 layers, 64 KiB a token",
        "stand_in_layers32": "32 layers, 128 KiB a token",
        "stand_in_trace": "500 requests of a trace that hardly repeats, 64 KiB a token",
    }.items():
        demo = result(name)
        on, off = demo["runs"]["cache_on"], demo["runs"]["cache_off"]
        rows.append(line(
            what, f"`{name}.json`", f"{on['token_hit_rate']:.1%}",
            f"{ms(on['ttft_s']['p50'])} / {ms(off['ttft_s']['p50'])}",
            fixed(demo['ratios']['ttft_p50'], 1), fixed(demo['ratios']['requests_per_s'], 1),
            fixed(demo['ratios']['bytes_sent'], 1),
        ))  # fmt: skip
    return [
        *head(
            "stand-in engine",
            "file",
            "hit rate",
            "TTFT P50, cache on / off",
            "off by on",
            "saturated rate, on by off",
            "KV sent, off by on",
        ),
        *rows,
    ]


def parts_table() -> list[str]:
    found = result("demo_parts")
    rows = [
        line(part["what"], fixed(part["ms_p50"], 2), fixed(part["ms_p90"], 2), WHOSE[part["whose"]])
        for part in found["parts"].values()
    ]
    return [*head("part", "P50, ms", "P90, ms", "whose"), *rows]


WHOSE = {
    "demo": "the stand-in's own",
    "copy": "NIXL's",
    "calls": "a call of the engine's",
    "hands": "handing on",
}


def chats_sentence() -> str:
    """Of the README, below its table."""
    chats = result("demo")["recipe"]
    sizes = chats["workload"]
    return (
        f"{sizes['requests']} turns of {sizes['conversations']} conversations with a Llama of "
        f"{fixed(chats['model']['parameters'] / 1e6, 1)} million random parameters, "
        f"{chats['kv_bytes_per_token'] // 1024} KiB of KV a token"
    )


def stand_in_sentence() -> str:
    """Of the page that has the stand-in's table."""
    recipe = result("stand_in")["recipe"]
    options = recipe["options"]
    return (
        f"{recipe['workload']['requests']} requests of {options['conversations']} conversations of "
        f"{options['turns']} turns, {recipe['kv_bytes_per_token'] // 1024} KiB of KV a token"
    )


def turns_sentence() -> str:
    """On the trace that hardly repeats."""
    found = result("demo_trace_turns")
    passes, median_ms, per_s = found["ttft_p50_ms"], found["median_ms"], found["sustained_per_s"]
    ms_of_all = [ms for each in passes.values() for ms in each]
    on, off = (fixed(statistics.median(per_s[name])) for name in ("on", "off"))
    return (
        f"run alternately {len(passes['on'])} times (`demo_trace`), TTFT P50 is "
        f"{fixed(found['on_of_off'], 2)} times as long with it on (medians {median_ms['on']} and "
        f"{median_ms['off']} ms; passes of one kind reach from {fixed(min(ms_of_all))} to "
        f"{fixed(max(ms_of_all))} ms), and {on} requests/s are sustained, {off} with it off."
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    "stand-in-table": stand_in_table,
    "demos-table": demos_table,
    "demo-parts-table": parts_table,
}
README_TABLE = "<!-- demo-table -->"


@pytest.mark.parametrize("mark", TABLES)
def test_a_table_is_its_result_files(mark: str) -> None:
    table = "\n".join(TABLES[mark]())
    assert f"<!-- {mark} -->\n{table}\n\n" in DOCUMENT


def test_the_table_of_the_readme_is_its_result_files() -> None:
    table = "\n".join(demo_table())
    assert f"{README_TABLE}\n{table}\n\n" in README


def test_the_sentences_are_their_result_files() -> None:
    assert chats_sentence() in README.replace("\n", " ")
    text = DOCUMENT.replace("\n", " ")
    assert stand_in_sentence() in text
    assert turns_sentence() in text


def test_of_a_request_s_marks_the_last_chunk_s_count_and_else_the_first() -> None:
    """A promise that is said again is no later promise; a request that lacks a mark is left out."""
    order = ["arrived", *PARTS]
    marks = [(name, 7, 1.0 + at) for at, name in enumerate(order)]
    marks += [("heard", 7, 12.5), ("computed", 7, 9.5), ("taken", 8, 2.0), ("arrived", 7, 100.0)]
    (found,) = _requests(marks, (0.5, 50.0))
    assert found["heard"] == 1.0 + order.index("heard")
    assert found["computed"] == 9.5
    assert found["arrived"] == 1.0


def write() -> None:
    """The tables anew; the sentences are written by hand."""
    write_table(ROOT / "README.md", README_TABLE, demo_table())
    for name, make in TABLES.items():
        mark = f"<!-- {name} -->"
        write_table(page_with(mark), mark, make())


if __name__ == "__main__":
    write()
