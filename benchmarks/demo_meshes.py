"""Claim: whatever the ranks and layouts of the two sides, every byte of the stand-in arrives.

Runs `stand_in` small, once for each pair of meshes, attention, layouts and way to send slices,
and keeps what its verified passes say. Correctness only: ranks are threads of two processes here,
far more than there are cores.

    python -m benchmarks demo_meshes --json benchmarks/results/demo_meshes.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixkv.cli.figures import machine

ROOT = Path(__file__).resolve().parents[1]
SIZES = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4))
ORDERS = (("layer_major", "page_major"), ("page_major", "layer_major"))
SAME = (("layer_major", "layer_major"), ("page_major", "page_major"))
WORKLOAD = (
    "--conversations",
    "4",
    "--turns",
    "3",
    "--layers",
    "4",
    "--system-tokens",
    "512",
)


def cases() -> Iterator[dict[str, Any]]:
    for attention, (prefill, decode), number in product(("mha", "mla"), SIZES, range(2)):
        sliced = attention == "mha" and prefill != decode
        for mode in ("staged", "staged, 1.5 leases", "sliced") if sliced else ("direct",):
            # unequal layouts where number is 0; of the equal ones each in turn
            orders = (
                ORDERS[prefill > decode]
                if number == 0
                else SAME[mode == "sliced" or prefill < decode]
            )
            yield {
                "attention": attention,
                "prefill_tp": prefill,
                "decode_tp": decode,
                "layouts": orders,
                "mode": mode,
            }


def run(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "stand_in.json"
        command = [
            sys.executable, "-m", "benchmarks", "stand_in", *WORKLOAD, "--attention",
            case["attention"], "--prefill-tp", str(case["prefill_tp"]), "--decode-tp",
            str(case["decode_tp"]), "--prefill-layout", case["layouts"][0], "--decode-layout",
            case["layouts"][1], "--staging",
            "off" if case["mode"] in ("sliced", "direct") else "on", "--staging-leases",
            "1.5" if "1.5" in case["mode"] else "16", "--json", str(report),
        ]  # fmt: skip
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
        )
        if not report.exists():
            return {
                **case,
                "exit_status": ended.returncode,
                "output": ended.stdout[-2000:] + ended.stderr[-2000:],
            }
        runs = json.loads(report.read_text())["runs"]
    sides = runs.values()
    return {
        **case,
        "exit_status": ended.returncode,
        "requests": sum(side["requests"] for side in sides),
        "failed": sum(side["failed"] for side in sides),
        "pages_verified": sum(side["pages_verified"] for side in sides),
        "pages_mismatched": sum(side["pages_mismatched"] for side in sides),
    }


def demo_meshes(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> int:
    """The stand-in between unequal ranks and layouts, every byte verified."""
    rows = []
    for case in cases():
        rows.append(run(case))
        print(json.dumps(rows[-1]), flush=True)
    bad = [row for row in rows if row["exit_status"] or row["pages_mismatched"] or row["failed"]]
    pages = sum(row.get("pages_verified", 0) for row in rows)
    print(
        f"{len(rows)} pairs, {pages} pages verified on their ranks, {len(bad)} pairs with "
        "anything wrong"
    )
    if json_file is not None:
        recipe = {"command": "python -m benchmarks demo_meshes", "workload": WORKLOAD, **machine()}
        json_file.write_text(json.dumps({"recipe": recipe, "rows": rows}, indent=1) + "\n")
    return 1 if bad else 0
