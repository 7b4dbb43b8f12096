"""What an import costs and brings in, in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import prefixkv

HEAVY = ("torch", "nixl", "zmq")


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()  # fmt: skip


def test_the_package_is_imported_fast_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); import prefixkv; took = time.perf_counter() - start; "
        f"print(took, [name for name in {HEAVY} if name in sys.modules])"
    )
    seconds, heavy = run(program).split(" ", 1)
    assert heavy == "[]"
    if float(seconds) >= 0.2:  # this machine may have been busy: once more
        seconds = run(program).split(" ", 1)[0]
    assert float(seconds) < 0.2


def test_the_pure_part_runs_without_transport_sockets_and_tensors() -> None:
    """All its modules load where torch, nixl and zmq are not installed."""
    pure = ("cache", "decode", "prefill", "protocol", "request", "request_pages", "config", "errors", "paging")
    names = [module.name for module in pkgutil.walk_packages(prefixkv.__path__, "prefixkv.")]
    names = [name for name in names if name.split(".")[1] in pure]
    assert len(names) > 25
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import importlib; "
        f"[importlib.import_module(name) for name in {names}]; print('fine')"
    )
    assert run(program) == "fine"
