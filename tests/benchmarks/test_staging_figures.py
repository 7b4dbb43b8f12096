"""The table on staging beside its copies alone is that of
benchmarks/results/staging.json, rounded. After a run this writes it anew:

    python -m benchmarks claims --only staging --json benchmarks/results/staging.json
    python -m tests.benchmarks.test_staging_figures
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

MARK = "<!-- staging-table -->"


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result("staging")["measured"]["staging"]["details"]["rows"]
    return found


def with_spread(ratio: float, spread: list[float], digits: int) -> str:
    return f"{share(ratio, digits)} ({' to '.join(share(end, digits) for end in spread)})"


def staging_table() -> list[str]:
    def told(row: dict[str, Any]) -> str:
        took, each = row["ms"], row["each_copy_ms"]
        return line(
            f"{row['meshes']}, {row['pages']}",
            " / ".join(fixed(took[name]) for name in ("staged", "sliced", "equal")),
            with_spread(row["sliced_over_staged"], row["spread"], 1),
            fixed(took["bare"]),
            with_spread(row["of_copies_alone"], row["spread_of_copies_alone"], 2),
            " / ".join(fixed(each[name]) for name in ("gather", "wire", "scatter")),
        )

    return [
        *head(
            "ranks, pages", "staged / sliced / equal ranks, ms", "staged by sliced speed, aim 5",
            "its three copies alone, ms", "staged by their speed, aim .6", "each by itself, ms",
        ),
        *map(told, rows()),
    ]  # fmt: skip


def figures() -> dict[str, str]:
    """Pieces of sentences, by what they say."""
    gains = [row["sliced_over_staged"] for row in rows()]
    short = [gain for gain in gains if gain < 5]
    fresh = rows()[0]
    assert (fresh["meshes"], fresh["pages"]) == ("TP4 to TP1", "fresh")
    alone_ms, fifth_ms = fresh["ms"]["bare"], fresh["ms"]["sliced"] / 5
    foreign = [row["foreign_cores_median"] for row in rows()]
    return {
        "staged by sliced": f"{fixed(min(short), 1)} to {fixed(max(short), 1)} times, not 5, "
        f"in {len(short)} cases of {len(gains)}",
        "the copies": f"its three copies alone take {fixed(alone_ms)} ms",
        "a fifth": f"a fifth of sliced is {fixed(fifth_ms)}",
        "what 5 times would be": f"{share(alone_ms / fifth_ms)} of their speed",
        "foreign": f"at most {fixed(max(foreign), 1)} of its cores busy",
        **{
            f"alone, {way}": " and ".join(
                share(row["of_copies_alone"]) for row in rows() if row["meshes"] == way
            )
            + f" from {way}"
            for way in ("TP4 to TP1", "TP1 to TP4")
        },
    }


def test_the_table_is_its_result_file() -> None:
    lines = "\n".join([MARK, *staging_table()])
    assert f"{lines}\n\n" in DOCUMENT


def test_the_figures_of_the_text_are_those_of_the_file() -> None:
    text = DOCUMENT.replace("\n", " ")
    assert [what for what, piece in figures().items() if piece not in text] == []


if __name__ == "__main__":
    write_table(page_with(MARK), MARK, staging_table())
