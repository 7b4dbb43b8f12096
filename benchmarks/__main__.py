"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [options]` runs one.

The module `benchmarks.NAME` has a function NAME, whose parameters are the options. Only the module
that is run is loaded. The list and `env`, which makes an environment, run in a fresh clone with
nothing but Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

PROGRAM = "python -m benchmarks"
BENCHMARKS = {
    "radix": "the radix cache's calls and memory, beside SGLang's tree",
    "sched": "scheduler calls on the engine's thread; --against COMMIT compares two trees",
    "transfer": "goodput from node to node, beside raw NIXL",
    "chats_at_once": "chats that begin all at once under serve, beside another commit",
    "replay": "hits of each eviction policy on a trace, at many capacities",
    "host_tier": "hits and copies of host tiers behind a pool, on a trace",
    "staging_copy": "gathering into and scattering out of staging memory, on the CPU",
    "host_copies": "copies between a pool and host pages, beside a memcpy of the same rows",
    "sglang": "the tree under SGLang's scheduler, beside SGLang's own",
    "engine": "the engine of Hugging Face's models beside transformers by itself",
    "hybrid_models": "folders of tiny models with recurrent layers or windows, for prefixkv serve",
    "gpu": "KV in VRAM between two processes on one GPU, and a model's steps beside it",
    "burst": "bytes sent for many requests with one new system prompt",
    "stand_in": "a stand-in engine over two processes: every byte verified, rates, latencies",
    "demo_chats": "first tokens of the demo's chats, decode's cache on and off, turn about",
    "own_compute": "first tokens of agents' chats, with decode's own compute and without",
    "own_chats": "the rule of own compute on such chats, in simulated time",
    "host_turns": "first tokens and bytes of agents that come back, with host memory",
    "rule": "first tokens by the rule of own compute, beside fixed numbers, on a trace",
    "demo_trace": "the same of a trace that hardly repeats, with the stand-in engine",
    "demo_meshes": "the stand-in engine between unequal ranks and layouts, every byte verified",
    "chaos": "wrong bytes, hangs and leaks while workers die, stop and are cut off",
    "soak": "memory, descriptors, threads and tables through 100,000 failing rooms",
    "waiting_cpu": "processor time of servers that only wait for each other",
    "vllm": "our connector beside vLLM's own, in real vLLM servers",
    "vllm_host": "first tokens and bytes of chats that come back to vLLM, with host memory",
    "env": "a virtual environment with an engine and this checkout, or with Dynamo",
}


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark named first with the options that follow; returns the exit status."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(f"{PROGRAM} NAME [options]\n")
        for name, line in BENCHMARKS.items():
            print(f"  {name:<18}{line}")
        return 0
    name, *options = arguments
    if name not in BENCHMARKS:
        print(f"benchmarks: there is no {name!r}; {PROGRAM} lists them", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036  the interpreter of a fresh clone may be any
        print(
            f"benchmarks: Python 3.11 is needed, this is {sys.version.split()[0]}", file=sys.stderr
        )
        return 2
    if name == "env":
        from benchmarks.env import main

        return main(f"{PROGRAM} {name}", options)
    try:
        import typer

        from prefixkv.cli.main import run_app
    except ModuleNotFoundError as error:
        how = "use the interpreter of `pip install -e '.[dev]'`"
        print(f"{PROGRAM} {name} needs {error.name}: {how}", file=sys.stderr)
        return 2

    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"max_content_width": 100},
    )  # fmt: skip
    app.command()(getattr(import_module(f"benchmarks.{name}"), name))
    return run_app(app, f"{PROGRAM} {name}", options)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
