"""What an import costs and brings in, in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import prefixkv
from tests.models.patience import PATIENCE_S

HEAVY = ("torch", "nixl", "zmq")


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True,
        timeout=PATIENCE_S
    ).stdout.strip()  # fmt: skip


def test_the_package_is_imported_with_next_to_nothing() -> None:
    """So it costs next to no time: not even numpy comes before it is needed."""
    program = (
        "import sys; before = set(sys.modules); import prefixkv; "
        "print(*sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = run(program).split()
    assert not {*HEAVY, "numpy", "msgspec"} & set(loaded)
    assert len(loaded) < 20, loaded


def test_the_pure_part_runs_without_transport_sockets_and_tensors() -> None:
    """All its modules load where torch, nixl and zmq are not installed."""
    pure = (
        "cache",
        "decode",
        "prefill",
        "protocol",
        "request",
        "pages",
        "control",
        "staging",
        "ranks",
        "config",
        "errors",
        "paging",
    )
    names = [module.name for module in pkgutil.walk_packages(prefixkv.__path__, "prefixkv.")]
    names = [name for name in names if name.split(".")[1] in pure]
    assert len(names) > 25
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import importlib; "
        f"[importlib.import_module(name) for name in {names}]; print('fine')"
    )
    assert run(program) == "fine"
