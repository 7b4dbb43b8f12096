"""The table on the shm transport is that of
benchmarks/results/transfer_shm.json, rounded. After a run this writes it anew:

    python -m benchmarks transfer --backend shm --json benchmarks/results/transfer_shm.json
    python -m tests.benchmarks.test_shm_figures
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.test_figures import (
    DOCUMENT,
    head,
    measured,
    page_with,
    result,
    told,
    write_table,
)

MARK = "<!-- shm-table -->"
PAGES = ("fresh", "aged", "random")
WAYS = ("TP4 to TP1", "TP1 to TP4")


def shm_table() -> list[str]:
    rows = {one["case"]: one for one in result("transfer_shm")["claims"]}

    def goodput(layout: str) -> list[dict[str, Any]]:
        return [rows[f"{layout}, {pages} pages, of one raw write"] for pages in PAGES]

    def slices(pages: str) -> list[dict[str, Any]]:
        return [rows[f"{way}, {pages} pages, of equal TP's speed"] for way in WAYS]

    return [
        *head("shm", "measured", "aim", "met"),
        *(
            told(what, found, measured(found))
            for what, found in {
                "goodput by one raw NIXL write, `layer_major`: fresh / aged / random pages":
                    goodput("layer_major"),
                "the same, `page_major`": goodput("page_major"),
                "unequal by equal TP's speed, both over shm, fresh pages: TP4 to TP1 / TP1 to TP4":
                    slices("fresh"),
                "the same, random pages": slices("random"),
            }.items()
        ),
    ]  # fmt: skip


def test_the_table_is_its_result_file() -> None:
    lines = "\n".join([MARK, *shm_table()])
    assert f"{lines}\n\n" in DOCUMENT


if __name__ == "__main__":
    write_table(page_with(MARK), MARK, shm_table())
