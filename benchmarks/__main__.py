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
    "transfer": "goodput from node to node, beside raw NIXL; a full hit",
    "turns": "conversations: hit rate by turn, bytes, first tokens, every byte verified",
    "burst": "bytes sent for many requests with one new system prompt",
    "host": "agents that come back, with host memory; its copies beside a memcpy",
    "own_compute": "decode's own compute on and off; its rule on traces",
    "replay": "hits of each eviction policy on a trace, with hints and host tiers",
    "serve": "prefixkv serve: chats at once, agents with hints, and what waiting costs",
    "vllm": "our connector beside vLLM's own, in real vLLM servers; host memory there",
    "sglang": "the tree under SGLang's scheduler, beside SGLang's own",
    "gpu": "host copies on one GPU, and writes behind its stream",
    "chaos": "wrong bytes, hangs and leaks while workers die, stop and are cut off",
    "soak": "memory, descriptors, threads and tables through 100,000 failing rooms",
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
