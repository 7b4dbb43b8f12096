"""Where the time of a transfer goes that raw posts of the same descriptors do not take.

The cases of `benchmarks/transfer.py`, two processes over NIXL, with a clock before and after each
post. Over shared memory the call that posts makes the copy, so what lies between two posts is the
transport's own work, during which nothing is copied.

    python -m benchmarks transfer_parts > benchmarks/results/transfer_parts.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final

import typer

from benchmarks import transfer
from benchmarks.pair import Row, Watch, run_pair, turn_about
from benchmarks.transfer import LAYOUTS, PAGES, Transfer, small
from prefixkv.cli.figures import machine

PARTS: Final = {
    "before": "from `send_chunk` to the first post",
    "posts": "in posts",
    "between": "between posts",
    "after": "from the last post to `pop_transferred`",
}

Marks = list[tuple[str, float]]


class _Timed:
    """NIXL's agent, with the time of each post noted."""

    def __init__(self, api: Any, marks: Marks) -> None:
        self._api, self._marks = api, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def transfer(self, *args: Any) -> Any:
        self._marks.append(("post", time.monotonic()))
        try:
            return self._api.transfer(*args)
        finally:
            self._marks.append(("posted", time.monotonic()))


def prefill_side(pipe: Connection, watch: Watch, case: Transfer) -> None:
    """That of `transfer`, which says its marks at the end."""
    from prefixkv.runtime.prefill_node import PrefillNode
    from prefixkv.transport.nixl.loop import NixlLoop

    marks: Marks = []
    new_agent, send_chunk = NixlLoop._new_agent, PrefillNode.send_chunk

    def timed_agent(self: NixlLoop, name: str) -> Any:
        agent = new_agent(self, name)
        agent.api = _Timed(agent.api, marks)
        return agent

    def timed_chunk(self: PrefillNode, *args: Any, **more: Any) -> int:
        marks.append(("sent", time.monotonic()))
        return send_chunk(self, *args, **more)

    NixlLoop._new_agent = timed_agent  # type: ignore[method-assign]
    PrefillNode.send_chunk = timed_chunk  # type: ignore[method-assign]
    transfer.prefill_side(pipe, watch, case)
    pipe.send(marks)


def decode_side(pipe: Connection, _watch: Watch, case: Transfer) -> Row:
    sides = ("stack", "same")
    with transfer.decode_of(pipe, case) as (decode, _):
        for room in range(case.warm_up):
            for side in sides:
                decode.take(side, room)
        rows = []
        for number in range(case.repeats):
            row: dict[str, float] = {}
            for side in turn_about(sides, number):
                row[side] = decode.take(side, case.warm_up + number)
            rows.append(row)
        pipe.send(None)
    spans = parts_of(pipe.recv(), [row["stack"] for row in rows], case.warm_up)
    return {
        "layout": case.layout,
        "pages": case.pages,
        "post_mib": case.post_bytes / 2**20,
        "posts": round(statistics.median(span["num_posts"] for span in spans)),
        "of_raw_posts_of_the_same_descriptors": round(
            statistics.median(row["same"] / row["stack"] for row in rows), 3
        ),
        "same_ms": round(1e3 * statistics.median(row["same"] for row in rows), 2),
        "stack_ms": round(1e3 * statistics.median(row["stack"] for row in rows), 2),
        "parts_ms": {
            part: round(1e3 * statistics.median(span[part] for span in spans), 2) for part in PARTS
        },
    }


def parts_of(marks: Marks, took_s: list[float], left_out: int) -> list[dict[str, float]]:
    """Of each transfer, in order: seconds of each part, and how many posts it had.

    Args:
        marks: of all transfers: "sent", then "post" and "posted" of each post. Parts of one that
            has more than one chunk would be wrong.
        took_s: of the transfers that count, from "sent" on.
        left_out: so many that came before them.

    >>> marks = [("sent", 0.0), ("post", 1.0), ("posted", 3.0), ("post", 3.5), ("posted", 5.0)]
    >>> parts_of(marks, [7.0], 0)
    [{'before': 1.0, 'posts': 3.5, 'between': 0.5, 'after': 2.0, 'num_posts': 2}]
    """
    transfers: list[Marks] = []
    for mark in marks:
        if mark[0] == "sent":
            transfers.append([])
        transfers[-1].append(mark)
    found = []
    for of_one, whole_s in zip(transfers[left_out:], took_s, strict=True):
        began_s = of_one[0][1]
        begins = [at_s for what, at_s in of_one if what == "post"]
        ends = [at_s for what, at_s in of_one if what == "posted"]
        in_posts_s = sum(ends) - sum(begins)
        found.append(
            {
                "before": begins[0] - began_s,
                "posts": in_posts_s,
                "between": ends[-1] - begins[0] - in_posts_s,
                "after": began_s + whole_s - ends[-1],
                "num_posts": len(begins),
            }
        )
    return found


def transfer_parts(
    repeats: Annotated[int, typer.Option(help="Of each case.")] = 9,
    quick: Annotated[
        bool, typer.Option(help="Tiny sizes: whether it works, not how fast it is.")
    ] = False,
) -> None:
    """Parts of a transfer's time, beside raw posts of the same descriptors; JSON on stdout. In the
    last row, the first of its layout again, posts are twice as large."""
    load_before = os.getloadavg()
    cases = [(layout, pages, 1) for layout in LAYOUTS for pages in PAGES]
    cases.append((LAYOUTS[-1], PAGES[0], 2))
    rows = []
    for layout, pages, larger in cases:
        case = small(layout, pages) if quick else Transfer(layout, pages, repeats=repeats)
        case = replace(case, post_bytes=larger * case.post_bytes)
        rows.append(run_pair(decode_side, prefill_side, case))
    recipe = {
        "command": "python -m benchmarks transfer_parts",
        "what": "medians of the transfers of a case; parts are medians each, so they add up to "
        "about the whole",
        "case": asdict(small("", "") if quick else Transfer("", "", repeats=repeats)),
        "load_average": [load_before[0], os.getloadavg()[0]],
        **machine(),
    }
    print(json.dumps({"recipe": recipe, "rows": rows}, indent=1))
