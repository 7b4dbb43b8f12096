"""The tables and sentences on `prefixkv demo` and the stand-in engine, in the README and
docs/benchmarks.md, are those of their files in benchmarks/results, rounded. After another run this
writes them anew:

    python -m tests.benchmarks.test_demo_figures
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo_parts import PARTS, _requests
from prefixkv.cli.figures import times
from tests.benchmarks.test_figures import MIB, fixed, head, line, ms, result, write_table

ROOT = Path(__file__).parents[2]


def demo_table() -> list[str]:
    found, chats = result("stand_in"), result("demo")
    runs, saturated, ratios = found["runs"], found["saturated"], found["ratios"]
    on, off = runs["cache_on"], runs["cache_off"]
    full, none = saturated["cache_on"], saturated["cache_off"]
    chat_on, chat_off = chats["runs"]["cache_on"], chats["runs"]["cache_off"]
    lower, fewer = chats["ratios"]["ttft_p50"], chats["ratios"]["bytes_sent"]

    def ttft(run: dict[str, Any], mark: str = "") -> str:
        p50, p99 = run["ttft_s"]["p50"], run["ttft_s"]["p99"]
        return f"{mark}{ms(p50)}{mark} / {ms(p99)}"

    def right(run: dict[str, Any]) -> str:
        return f"{run['requests'] - run['answers_wrong']} of {run['requests']}"

    return [
        line("defaults, seed 1", "cache on", "cache off", ""),
        "| --- | --- | --- | --- |",
        line("**`prefixkv demo`**: answers that are what `generate()` says",
             f"**{right(chat_on)}**", right(chat_off), "token for token"),
        line("hit rate on decode, tokens", f"{chat_on['token_hit_rate']:.1%}",
             fixed(chat_off["token_hit_rate"]), ""),
        line("KV sent", f"**{fixed(chat_on['bytes_sent'] / MIB)} MiB**",
             f"{fixed(chat_off['bytes_sent'] / MIB)} MiB", times(fewer, "less", 1)),
        line("TTFT P50", ms(chat_on["ttft_s"]["p50"]), ms(chat_off["ttft_s"]["p50"]),
             times(lower, "lower", 1)),
        line("**`python -m benchmarks stand_in`**: "
             "TTFT P50 / P99 at 0.7 of what cache-off sustains",
             ttft(on, "**"), ttft(off), times(ratios["ttft_p50"], "lower P50", 1)),
        line("TTFT P50 / P99, saturated", ttft(full, "**"), ttft(none),
             f"{fixed(ratios['ttft_p50_saturated'])} times lower P50"),
        line("requests a second, saturated", f"**{fixed(full['requests_per_s'])}**",
             fixed(none["requests_per_s"]), f"{fixed(ratios['requests_per_s'], 1)} times higher"),
        line("KV sent", f"**{fixed(on['bytes_sent'] / MIB)} MiB**",
             f"{fixed(off['bytes_sent'] / MIB)} MiB", f"{fixed(ratios['bytes_sent'])} times less"),
        line("hit rate on decode, tokens", f"{on['token_hit_rate']:.1%}",
             fixed(off["token_hit_rate"]), ""),
        line("pages verified / wrong", f"{on['pages_verified']:,} / **{on['pages_mismatched']}**",
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
            "times lower",
            "saturated rate, times higher",
            "KV sent, times less",
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


def sentences() -> list[str]:
    """Of the README, below its table."""
    recipe, chats = result("stand_in")["recipe"], result("demo")["recipe"]
    sizes, options = chats["workload"], recipe["options"]
    return [
        f"{sizes['requests']} turns of {sizes['conversations']} conversations with a Llama of "
        f"{fixed(chats['model']['parameters'] / 1e6, 1)} million random parameters, "
        f"{chats['kv_bytes_per_token'] // 1024} KiB of KV a token.",
        f"{recipe['workload']['requests']} requests of {options['conversations']} conversations of "
        f"{options['turns']} turns, {recipe['kv_bytes_per_token'] // 1024} KiB of KV a token",
    ]


def turns_sentence() -> str:
    """Of docs/benchmarks.md, on the trace that hardly repeats."""
    found = result("demo_trace_turns")
    passes, median_ms, per_s = found["ttft_p50_ms"], found["median_ms"], found["sustained_per_s"]
    ms_of_all = [ms for each in passes.values() for ms in each]
    on, off = (fixed(statistics.median(per_s[name])) for name in ("on", "off"))
    return (
        f"turn about {len(passes['on'])} times (`demo_trace`), TTFT P50 is "
        f"{fixed(found['on_of_off'], 2)} times as long with it on (medians {median_ms['on']} and "
        f"{median_ms['off']} ms; passes of one kind reach from {fixed(min(ms_of_all))} to "
        f"{fixed(max(ms_of_all))} ms), and {on} requests/s are sustained, {off} with it off."
    )


TABLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "demo-table": ("README.md", demo_table),
    "demos-table": ("docs/benchmarks.md", demos_table),
    "demo-parts-table": ("docs/benchmarks.md", parts_table),
}


@pytest.mark.parametrize("mark", TABLES)
def test_a_table_is_its_result_files(mark: str) -> None:
    name, table = TABLES[mark]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert f"<!-- {mark} -->\n{chr(10).join(table())}\n\n" in text


def test_the_sentences_are_their_result_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert [one for one in sentences() if one not in text] == []


def test_the_sentence_on_the_trace_is_its_result_file() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("\n", " ")
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
    for mark, (name, table) in TABLES.items():
        write_table(ROOT / name, f"<!-- {mark} -->", table())


if __name__ == "__main__":
    write()
