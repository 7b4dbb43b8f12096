"""Claim: looking a prompt up costs half of what SGLang's compiled tree needs, and no call is linear
in the tree.

    python benchmarks/radix.py [--peer UNPACKED_WHEEL --peer-stubs STUBS]

writes benchmarks/results/radix.json; the same as `prefixkv bench radix --json ...`. See
prefixkv/cli/bench_radix.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from prefixkv.cli.bench_radix import radix

if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(radix)
    app([*sys.argv[1:], "--json", str(Path(__file__).parent / "results" / "radix.json")])
