"""Claim: admitting a request of 8k tokens, 6k cached, costs the scheduler thread under 60 us,
however many wait or run.

    python benchmarks/sched.py --json benchmarks/results/sched.json

The same as `prefixkv bench sched`: see `prefixkv/cli/bench_sched.py`, and there for the other
calls.
"""

import typer

from prefixkv.cli.bench_sched import sched

if __name__ == "__main__":
    typer.run(sched)
