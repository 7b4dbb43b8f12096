"""The stand-in's clients, its passes, and its worker processes, which leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from benchmarks.pair import WorkerError
from benchmarks.turns import passes
from benchmarks.turns.options import StandInOptions
from benchmarks.turns.report import Measured
from prefixkv.errors import ConfigError
from tests.support.patience import PATIENCE_S


def test_both_sides_share_one_load_and_no_salt() -> None:
    plans = []

    def run_pass(plan: Any, _heard: Any) -> Measured:
        plans.append(plan)
        found = Measured(requests=40, duration_s=2.0 if plan.cache else 4.0)
        found.admitted(2, 100, 40)
        return found

    rows = list(passes(run_pass))
    assert [(p.cache, p.verify, p.rate) for p in plans] == [
        (True, True, None), (False, True, None), (False, False, None), (True, False, None),
        (True, False, 7.0), (False, False, 7.0),
    ]  # fmt: skip
    assert len({plan.salt for plan in plans}) == 6
    assert rows[0]["hit_rate_by_turn"] == {3: 0.4}
    with pytest.raises(WorkerError, match="no request was answered"):
        list(passes(lambda plan, heard: Measured(requests=40, failed=40, duration_s=1.0)))


def test_pools_too_small_and_too_large_are_refused() -> None:
    options = StandInOptions(decode_pages=3)
    with pytest.raises(ConfigError, match="a pool has 3 pages, at least"):
        options.check_pools(options.workload(), 1 << 50)
    with pytest.raises(ConfigError, match="are available"):
        StandInOptions().check_pools(options.workload(), 1 << 20)


# --- processes ------------------------------------------------------------------------------------


def started() -> subprocess.Popen[str]:
    """The stand-in in a process group of its own, whose workers run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "turns", "--layers", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline_s = time.monotonic() + 5 * PATIENCE_S
    while len(family(process)) < 3:  # two workers and multiprocessing's resource tracker
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return process


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "killed", "a worker is killed"])
def test_no_worker_outlives_its_parent(how: str) -> None:
    process = started()
    workers = family(process)
    try:
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        elif how == "killed":
            process.kill()
        else:
            next(one for one in workers if "spawn_main" in " ".join(one.cmdline())).kill()
        _, err = process.communicate(timeout=5 * PATIENCE_S)
        if how == "Ctrl-C":
            assert err == "python -m benchmarks turns: interrupted\n"
        elif how != "killed":
            assert "worker ended with exit code -9" in err
        assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
