"""A signal to a child that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from prefixkv.serving.launch import _signal


def test_a_signal_to_a_child_that_has_ended_leaves_its_status_to_who_waits() -> None:
    """asyncio waits for it in a thread, and logs a child that another call has taken."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type]
        assert child.returncode is None
        assert os.waitpid(child.pid, 0) == (child.pid, 7 << 8)
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type] # nothing has its number any more
        child.returncode = 7
