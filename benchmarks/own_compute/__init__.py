"""Decode that computes what a turn adds, beside decode that asks prefill for all.

    python -m benchmarks own_compute --pairs 6 --json benchmarks/results/own_compute.json
    python -m benchmarks own_compute AGENTS CONVERSATION --json benchmarks/results/rule.json

`agents.py` has workers and rounds; one of the two decode workers has `compute_below`. Chats as
coding agents have them: a long first prompt, then turns of 64 to 512 tokens, each as soon as the
one before is answered.

"as pool": prefill's pool holds a third of the pages of all chats, as that of a worker does which
many decode workers share.
"keeps all": it holds them all three times.

With traces the rule alone is measured, in a model of queues (`rule.py`).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.agents import CHATS, Sides, agents, compared, pages_of_longest, served
from benchmarks.report import JsonFile, check_outputs, write

SIDES = Sides("decode-computes", "decode-asks", "decode-asks again")
CASES = {"as pool": 1 / 3, "keeps all": 3.0}


def own_compute(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENTS CONVERSATION", help="The rule, on traces."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds of three passes.")] = 4,
    below: Annotated[int, typer.Option(help="Most tokens that decode computes of one.")] = 2048,
    json_file: JsonFile = None,
) -> None:
    """First tokens of agents' later turns, and gaps between tokens, own compute on and off."""
    check_outputs(json_file)
    if traces:
        from benchmarks.own_compute.rule import play_traces

        play_traces(traces, json_file)
        return
    rows = []
    longest = pages_of_longest(agents(1))
    working_set = CHATS["conversations"] * longest
    decode: dict[str, Any] = {"num_pages": 3 * working_set}
    with served() as model:
        for case, share in CASES.items():
            settings = {
                "prefill": {"num_pages": max(int(share * working_set), longest + 8)},
                SIDES.on: {**decode, "compute_below": below}, SIDES.off: decode,
            }  # fmt: skip
            chats = CHATS["conversations"]
            found = asyncio.run(compared(model, SIDES, settings, pairs, agents, chats))
            rows.append({"prefill": case, "pairs": pairs, **found})
            print(json.dumps(rows[-1], indent=1), flush=True)
    write(json_file, f"own_compute --pairs {pairs} --below {below}", rows, workload=CHATS)
