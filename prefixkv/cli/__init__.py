"""The `prefixkv` command. It needs what the library does without: the extra `cli`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

EXTRA: Final = ("typer", "rich", "psutil")


def main() -> None:
    """Load none of the extra `cli` before all of it is known to be there."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        sys.exit(
            f"prefixkv: the command line needs {', '.join(missing)}: pip install 'prefixkv[cli]'"
        )
    from prefixkv.cli.main import main as run

    run()
