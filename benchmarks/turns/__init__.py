"""Turns of conversations: hit rate by turn, bytes sent and first tokens, with decode's cache on and
off.

    python -m benchmarks turns --json benchmarks/results/turns.json
    python -m benchmarks turns --unequal --json benchmarks/results/turns_unequal.json

A stand-in for an inference engine: real bytes and real scheduling in two processes, no model.
Every KV byte is verified in a first pass. Then the request rate that either side can sustain is
measured, and the latencies at .7 of what it is without decode's cache. TTFT is from a turn's
arrival to its KV committed on decode; prefill's own cache stays on.

`--unequal` runs the verified passes alone, once for each pair of ranks, attention, layouts and way
to send slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count, product
from typing import Annotated, Any, Final, TypeVar

import typer

from benchmarks.pair import WorkerError, run_pair
from benchmarks.report import JsonFile, Row, check_outputs, told, write
from benchmarks.turns.options import LOAD_FRACTION, PassPlan, StandInOptions
from benchmarks.turns.report import Measured
from benchmarks.turns.workers import SWITCH_INTERVAL_S, RunPass, decode_side, prefill_side
from prefixkv.spi import DEFAULT_POLICY

SMALL: dict[str, Any] = {
    "conversations": 3, "turns": 3, "layers": 2, "heads": 2, "dim": 16, "system_tokens": 40,
    "user_tokens": 20, "output_tokens": 6, "step_ms": 1.0, "prefill_pages": 200,
    "decode_pages": 200,
}  # fmt: skip
SIZES = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4))  # ranks of prefill, of decode
LAYOUTS = ("layer_major", "page_major")
MODES = {"staged": 16.0, "staged, 1.5 leases": 1.5, "sliced": 0.0}

T = TypeVar("T")

PATIENCE_S: Final = 7200.0
CACHES: Final = (True, False)


def passes(run_pass: RunPass) -> Iterator[Row]:
    """Verified, saturated, then timed passes, whose load comes from the saturated one with the
    cache off. Raises WorkerError if nothing was answered in that."""
    salts = count(1)

    def row(kind: str, cache: bool, rate: float | None = None) -> tuple[Row, Measured]:
        plan = PassPlan(cache, kind == "verified", rate, next(salts))
        measured = run_pass(plan)
        found = {"pass": kind, "cache": "cache_on" if cache else "cache_off", "offered_per_s": rate}
        return found | measured.figures() | {"wrong": measured.complaints()}, measured

    for cache in CACHES:
        yield row("verified", cache)[0]
    found, base = row("saturated", cache=False)
    yield found
    if base.requests == base.failed:
        raise WorkerError("no request was answered with the cache off: there is no rate to offer")
    rate = round(LOAD_FRACTION * (base.requests - base.failed) / base.duration_s, 2)
    for cache in CACHES:
        if cache:
            yield row("saturated", cache)[0]
    for cache in CACHES:
        yield row("moderate", cache, rate)[0]


def unequal(quick: bool) -> Iterator[tuple[Row, StandInOptions]]:
    """Pairs of ranks, attention, layouts and ways to send slices."""
    small = SMALL if quick else {"conversations": 4, "turns": 3, "layers": 4, "system_tokens": 512}
    for attention, (prefill, decode), differ in product(("mha", "mla"), SIZES, (True, False)):
        is_sliced = attention == "mha" and prefill != decode
        for number, mode in enumerate(MODES if is_sliced else ("direct",)):
            first = LAYOUTS[(prefill > decode) ^ (number == 2)]
            second = LAYOUTS[first == LAYOUTS[0]] if differ else first
            heads = 1 if attention == "mla" else 8
            options = StandInOptions(**{
                **small, "attention": attention, "prefill_tp": prefill, "decode_tp": decode,
                "prefill_layout": first, "decode_layout": second, "heads": heads,
                "dim": 16 if quick else 576 if attention == "mla" else 128,
                "staging_leases": MODES.get(mode, 0.0),
            })  # fmt: skip
            yield {
                "attention": attention, "prefill_tp": prefill, "decode_tp": decode,
                "layouts": [first, second], "mode": mode,
            }, options  # fmt: skip


def all_passes(run_pass: RunPass) -> list[Row]:
    return told(passes(run_pass))


def both(run_pass: RunPass) -> Row:
    """Both verified passes."""
    found = [run_pass(PassPlan(cache, True, None, salt)) for salt, cache in enumerate(CACHES)]
    return {
        "pages_verified": sum(one.pages_verified for one in found),
        "pages_mismatched": sum(one.pages_mismatched for one in found),
        "wrong": [complaint for one in found for complaint in one.complaints()],
    }


def played(options: StandInOptions, play: Callable[[RunPass], T]) -> T:
    """What `play` makes of passes with these options. Each worker may use every core."""
    found: T = run_pair(decode_side, prefill_side, options, play, cores=0, patience_s=PATIENCE_S)
    return found


def verified(options: StandInOptions) -> Row:
    return played(options, both)


def turns(
    json_file: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Of the workload and its arrivals.")] = 1,
    layers: Annotated[int, typer.Option(help="Of KV; a layer has 4 KiB a token.")] = 16,
    policy: Annotated[
        str, typer.Option(help="Of eviction, with settings if any.")
    ] = DEFAULT_POLICY,
    quick: Annotated[bool, typer.Option(help="Tiny sizes: whether it works.")] = False,
    unequal_ranks: Annotated[
        bool, typer.Option("--unequal", help="Only verified passes, between unequal ranks.")
    ] = False,
) -> int:
    """Hit rate by turn, bytes and first tokens of conversations, every byte verified."""
    check_outputs(json_file)
    if unequal_ranks:
        rows = told(case | verified(options) for case, options in unequal(quick))
    else:
        sizes: dict[str, Any] = {"seed": seed, "layers": layers, "policy": policy}
        options = StandInOptions(**sizes | (SMALL if quick else {}))
        rows = played(options, all_passes)
    wrong = [complaint for row in rows for complaint in row["wrong"]]
    pages = sum(row["pages_verified"] for row in rows)
    print(f"{len(rows)} rows, {pages} pages verified, {len(wrong)} things wrong")
    command = "turns" + " --unequal" * unequal_ranks + " --quick" * quick
    size = {} if unequal_ranks else {"options": asdict(options)}
    write(
        json_file, command, rows, seed=seed, switch_interval_s=SWITCH_INTERVAL_S, **size,
        ttft="from a turn's arrival to its KV committed on decode",
        saturated="every turn arrives as soon as the one before it is answered",
        moderate=f"Poisson arrivals at {LOAD_FRACTION:g} of cache_off, saturated",
    )  # fmt: skip
    return 1 if wrong else 0
