"""The table on the engine of Hugging Face's models is that of
benchmarks/results/engine.json, rounded. After a run this writes it anew:

    python -m benchmarks engine > benchmarks/results/engine.json
    python -m tests.benchmarks.test_engine_figures
"""

from __future__ import annotations

import re
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
)

MARK = "<!-- engine-table -->"
ON, OFF = "decode-on", "decode-off"
NOT_RUN = "| `engine` | none is kept yet: it wants a machine to itself |"


def times(value: float, most: float | None = None) -> list[str]:
    told = "" if most is None else "yes" if value <= most else "no"
    return [f"{fixed(value, 2)} times", "" if most is None else f"at most {most:g}", told]


def turns_of(found: dict[str, Any]) -> str:
    """TTFT P50 of all rounds, on and off, and their ratio."""
    sides = (
        " / ".join(fixed(one[name]["ttft_ms"]["p50"]) for one in found["rounds"])
        for name in (ON, OFF)
    )
    return "; ".join(f"{side} ms" for side in sides)


def engine_table(found: dict[str, Any]) -> list[str]:
    decode, prefill, own = found["decode"], found["prefill"], found["own"]
    turns, slow, small = found["turns"], found["slow"], found["small"]
    worst = max(one["times"] for one in turns["burst"])
    return [
        *head("what", "measured", "goal", "met"),
        *(
            line(
                f"a decode step, batch of {found['recipe']['batch']}, contexts of "
                f"{row['context']:,}, pages {row['pages']}, against `generate` with a static "
                f"cache ({fixed(row['engine_ms'])} / {fixed(row['generate_ms'])} ms)",
                *times(row["times"], 1.1),
            )
            for row in decode
        ),
        line(f"prefill of {prefill['tokens']:,} tokens in chunks of {prefill['chunk']} against one "
             "`forward`", *times(prefill["times"], 1.15)),
        line("prefixkv's own processor time a request, of the model's",
             f"{fixed(100 * own['own_of_the_models'], 1)}%", "under 5%",
             "yes" if own["own_of_the_models"] < 0.05 else "no"),
        line(f"turns, {turns['kv_bytes_per_token'] // 1024} KiB of KV a token: TTFT P50, cache on; "
             "off", turns_of(turns), "stated", ""),
        line(f"the same over {slow['gbit_per_s']:g} Gbit/s", turns_of(slow),
             "3 times lower", "yes" if slow["ttft_p50_off_by_on"] >= 3 else "no"),
        line(f"turns, {small['kv_bytes_per_token'] // 1024} KiB of KV a token, "
             f"{len(small['rounds'])} times alternately: on by off {share(1 / small_by(small))}",
             turns_of(small), "at most 1", small_told(small)),
        line(f"a burst of {turns['burst'][0]['requests']} with one new system prompt: tokens "
             "computed, of the prompt and the suffixes", *times(worst, 1.1)),
    ]  # fmt: skip


def small_by(small: dict[str, Any]) -> float:
    ratio: float = small["ttft_p50_off_by_on"]
    return ratio


def small_told(small: dict[str, Any]) -> str:
    """A bound is broken only beyond what passes of one kind differ by."""
    if small_by(small) >= 1:
        return "yes"
    off = [one[OFF]["ttft_ms"]["p50"] for one in small["rounds"]]
    return "within the spread of `off`" if 1 / small_by(small) <= max(off) / min(off) else "no"


MADE_UP: dict[str, Any] = {
    "recipe": {"batch": 8},
    "decode": [
        {"context": 2048, "pages": "mixed", "engine_ms": 121.0, "generate_ms": 108.0, "times": 1.12}
    ],
    "prefill": {"tokens": 2048, "chunk": 512, "times": 1.1},
    "own": {"own_of_the_models": 0.061},
    **{
        kind: {
            "kv_bytes_per_token": 6144, "gbit_per_s": 1.0, "ttft_p50_off_by_on": 3.2,
            "rounds": [{ON: {"ttft_ms": {"p50": 100.4}}, OFF: {"ttft_ms": {"p50": 321.2}}}],
            "burst": [{"requests": 8, "times": 1.0}],
        }
        for kind in ("turns", "slow", "small")
    },
}  # fmt: skip


def test_what_misses_its_goal_says_so() -> None:
    table = "\n".join(engine_table(MADE_UP))
    assert "(121 / 108 ms) | 1.12 times | at most 1.1 | no |" in table
    assert "one `forward` | 1.10 times | at most 1.15 | yes |" in table
    assert "| 6.1% | under 5% | no |" in table
    assert "over 1 Gbit/s | 100 ms; 321 ms | 3 times lower | yes |" in table
    assert "| 1.00 times | at most 1.1 | yes |" in table


def test_a_miss_within_what_passes_differ_by_is_told_as_that() -> None:
    rounds = [{OFF: {"ttft_ms": {"p50": p50}}} for p50 in (100.0, 110.0)]
    told = [small_told({"ttft_p50_off_by_on": 1 / by, "rounds": rounds}) for by in (1, 1.09, 1.11)]
    assert told == ["yes", "within the spread of `off`", "no"]


@pytest.mark.skipif(not (RESULTS / "engine.json").exists(), reason="no quiet machine has run it")
def test_the_table_is_its_result_file() -> None:
    table = "\n".join(engine_table(result("engine")))
    assert f"{MARK}\n{table}\n\n" in DOCUMENT
    assert NOT_RUN not in DOCUMENT


def test_what_prefixkv_takes_for_itself_is_its_result_file() -> None:
    own = result("engine_own")["own"]
    threads_ms = sum(own["of_it_in_threads_ms_a_request"].values())
    threads = 100 * threads_ms / own["model_ms_a_request"]
    text = DOCUMENT.replace("\n", " ")
    assert (
        f"of {own['requests']} requests of {own['prompt']} tokens and answers of {own['answer']}, "
        f"prefixkv and both engines took {fixed(100 * own['own_of_the_models'], 1)}% of the "
        f"model's time, prefixkv's threads {fixed(threads, 1)}%"
    ) in text


def write() -> None:
    """The table anew, and that the file is there."""
    page = page_with(MARK)
    text = page.read_text(encoding="utf-8").replace(NOT_RUN, "| `engine` | `engine.json` |")
    table = "\n".join(engine_table(result("engine"))) + "\n"
    text, num = re.subn(rf"({MARK}\n)(?:\|.*\n)*", lambda found: found[1] + table, text)
    assert num == 1, f"{page} has no table {MARK}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
