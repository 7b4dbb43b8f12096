"""The stand-in's clients, its passes, and its worker processes, which leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.pair import WorkerError
from benchmarks.turns import passes
from benchmarks.turns.options import StandInOptions
from benchmarks.turns.report import Measured
from benchmarks.turns.workload import Clients, arrival_times
from prefixkv.cli.chats.workload import Workload, chat
from prefixkv.errors import ConfigError
from tests.support.patience import PATIENCE_S

CHAT = {"system_tokens": 40, "user_tokens": 10, "output_tokens": 6}


def play(workload: Workload, concurrency: int = 100) -> tuple[Clients, list[Any]]:
    """Every call of a workload with its answer, each taking a second: (time sent, call)."""
    clients = Clients(workload, arrival_times(workload, 1, None), concurrency)
    now_s, sent, running = 0.0, [], []  # type: float, list[Any], list[Any]
    while not clients.done:
        calls = clients.take(now_s)
        sent += [(now_s, call) for call in calls]
        running += [(now_s + 1.0, call) for call in calls]
        assert clients.open == len(running) <= concurrency
        now_s = min(end_s for end_s, _ in running)
        for one in [one for one in running if one[0] <= now_s]:
            running.remove(one)
            clients.answer(one[1], [len(one[1].tokens) % 1000] * one[1].output_len, now_s)
    return clients, sent


def test_a_prompt_is_all_that_was_said_before_and_the_new_text() -> None:
    workload = chat(1, 3, 4, **CHAT)
    clients, sent = play(workload, concurrency=2)
    assert clients.finished == 12
    for session, turns in enumerate(workload.sessions):
        said = np.empty(0, dtype=np.int32)
        for number, turn in enumerate(turns):
            call = next(c for _, c in sent if (c.session, c.turn) == (session, number))
            said = np.concatenate([said, *(run.tokens() for run in turn.text)])
            assert np.array_equal(call.tokens, said)
            said = np.append(said, [len(said) % 1000] * turn.output_len)


def test_arrivals_keep_to_the_offered_rate() -> None:
    due = arrival_times(chat(1, 40, 25, **CHAT), 9, rate=20.0)
    assert all(np.all(np.diff(times) > 0) for times in due)
    every = np.sort(np.concatenate(due))
    assert 1000 / every[-1] == pytest.approx(20, rel=0.1)
    gaps = np.diff(every)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # as Poisson arrivals have it


def test_a_failed_call_ends_its_session() -> None:
    workload = chat(1, 2, 3, **CHAT)
    clients = Clients(workload, arrival_times(workload, 1, None), 8)
    first, second = clients.take(0.0)
    clients.fail(first)
    assert clients.failed == 3
    assert clients.answer(second, [1], 1.0)
    (again,) = clients.take(1.0)
    clients.fail(again)
    assert (clients.failed, clients.finished, clients.done) == (5, 1, True)


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


def test_what_must_not_be_is_said() -> None:
    wrong = Measured(pages_mismatched=3, prefill_pages_at_end={"held": 1, "cached": 5})
    assert wrong.complaints() == ["3 pages mismatched", "1 prefill pages left held"]


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
