"""The table on SGLang's tree and ours is that of
benchmarks/results/sglang.json, rounded. After a run this writes it anew:

    python -m benchmarks sglang --out benchmarks/results/sglang.json
    python -m tests.benchmarks.test_sglang_figures
"""

from __future__ import annotations

from typing import Any

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

MARK = "<!-- sglang-trees-table -->"
SIZES = (8192, 32768)
CALLS = {
    "a waiting request": ("match", "match again", "indices", "match and indices", "lock", "unlock"),
    "a new prompt": ("checkpoint and release",),
    "the next turn": ("checkpoint and release",),
    "eviction": ("evict 256 tokens",),
}


def trees_table() -> list[str]:
    rows = {(row["what"], row["name"], row["tokens"]): row for row in result("sglang")["trees"]}

    def told(what: str, name: str) -> str:
        found = [rows[what, name, size] for size in SIZES]
        (goal,) = {row.get("goal") for row in found}
        aim = "" if goal is None else f"{goal:.1f}".removeprefix("0")
        return line(f"{what}: {name}", *(cell for row in found for cell in cells(row)), aim)

    return [
        *head("what", "8,192 tokens", "ratio", "32,768 tokens", "ratio", "aim"),
        *(told(what, name) for what, names in CALLS.items() for name in names),
    ]


def cells(row: dict[str, Any]) -> tuple[str, str]:
    return f"{fixed(row['us'])} / {fixed(row['peer_us'])}", share(row["ratio_to_peer"])


def test_the_table_is_its_result_file() -> None:
    lines = "\n".join([MARK, *trees_table()])
    assert f"{lines}\n\n" in DOCUMENT


if __name__ == "__main__":
    write_table(page_with(MARK), MARK, trees_table())
