"""The whole stand-in over real NIXL between two processes, small: it leaves nothing behind, however
it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.models.patience import PATIENCE_S

SMALL = (
    "--conversations 3 --turns 3 --layers 2 --kv-heads 2 --head-dim 16 "
    "--system-tokens 40 --user-tokens 20 "
    "--output-tokens 6 --step-ms 1 --prefill-pages 200 --decode-pages 200"
)
PROGRAM = "python -m benchmarks stand_in"
WHOLE_TIMEOUT_S = 5 * PATIENCE_S


@pytest.fixture
def start():
    """Starts demos; whatever of them still runs at the end is killed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments):
            before = signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # a test run in the background may ignore it
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks", "stand_in", *SMALL.split(), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a process group of its own, which Ctrl-C reaches whole
            )
            signal.signal(signal.SIGINT, before)
            stack.enter_context(process)
            stack.callback(kill_group, process)
            return process

        yield begin


def kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def finish(process):
    """(status, stdout, stderr)"""
    out, err = process.communicate(timeout=WHOLE_TIMEOUT_S)
    return process.returncode, out, err


def family(process):
    """The processes that a demo started, the workers among them."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(process, line):
    """Until the demo has said `line`; returns the processes it has started."""
    for said in process.stdout:
        if said.startswith(line):
            break
    else:
        pytest.fail(f"ended before it said {line!r}")
    deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
    while len(family(process)) < 3:  # two workers and multiprocessing's resource tracker
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return family(process)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert alive == []


def run_small(start, tmp_path, *arguments):
    path = tmp_path / "out.json"
    status, out, err = finish(start(*arguments, "--json", str(path)))
    assert status == 0, out + err
    assert err == ""
    return json.loads(path.read_text()), out


def assert_clean(run):
    assert (run["failed"], run["pages_mismatched"], run["locks_at_end"]) == (0, 0, 0)
    assert run["pages_verified"] > 0
    pages = run["pages_at_end"]
    assert (pages["owned"], pages["held"], pages["quarantined"]) == (0, 0, 0)


@pytest.mark.slow
def test_cache_on_and_off(start, tmp_path):
    content, out = run_small(start, tmp_path)
    for kind in ("runs", "saturated"):
        on, off = content[kind]["cache_on"], content[kind]["cache_off"]
        for run in (on, off):
            assert_clean(run)
            assert run["requests"] == 9
            assert run["pages_at_end"]["free"] + run["pages_at_end"]["cached"] == 200
            assert run["ttft_s"]["p50"] > 0
        assert on["prompt_tokens"] == off["prompt_tokens"]
        assert on["token_hit_rate"] > 0.2
        assert 0 < on["bytes_sent"] == off["bytes_sent"] - on["bytes_skipped"]
        assert on["bytes_skipped"] == on["hit_tokens"] * content["recipe"]["kv_bytes_per_token"]
        assert off["hit_tokens"] == off["pages_at_end"]["cached"] == 0
        assert off["prefill_hit_rate"] > 0.3
        page_bytes = content["recipe"]["kv_bytes_per_token"] * 16
        assert off["bytes_sent"] % page_bytes == 0
        assert off["bytes_sent"] >= off["prompt_tokens"] * content["recipe"]["kv_bytes_per_token"]
    assert content["ratios"]["bytes_sent"] > 1
    assert "pages mismatched" in out


@pytest.mark.slow
def test_a_trace_through_small_pools_with_mla(start, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": i * 100,
            "input_length": 512 * (1 + i % 4),
            "output_length": 200,
            "hash_ids": ids[: 1 + i % 4],
        }
        for i, ids in enumerate([[i % 2, 100 + i, 200 + i, 300 + i] for i in range(24)])
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    content, _ = run_small(
        start, tmp_path, "--trace", str(trace), "--requests", "20", "--cache", "on", "--attention",
        "mla", "--kv-heads", "1", "--dtype", "float8", "--layout", "page_major", "--decode-pages",
        "24",
    )  # fmt: skip
    run = content["runs"]["cache_on"]
    assert_clean(run)
    assert run["requests"] == 20
    assert run["evicted_pages"] > 0
    assert list(content["runs"]) == ["cache_on"]


LONG = ("--conversations", "5000")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting the workers", "verified, cache on"])
def test_ctrl_c_ends_all_with_one_line(start, moment):
    process = start(*LONG)
    workers = wait_for(process, moment)
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130
    assert err == f"{PROGRAM}: interrupted\n"
    assert_gone(workers)


INTERRUPTED_WHILE_A_WORKER_STARTS = """
import os, signal, sys, threading, time
from multiprocessing import util
from benchmarks.__main__ import run

def spawn(*args, real=util.spawnv_passfds):
    pid = real(*args)
    if "spawn_main" in str(args):  # a worker, not the tracker
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    return pid

util.spawnv_passfds = spawn
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in the background
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # masks no signal
sys.exit(run(["stand_in", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_ctrl_c_waits_until_a_worker_has_been_started():
    """Else the worker would find no parent and end with a traceback of its own."""
    command = [sys.executable, "-c", INTERRUPTED_WHILE_A_WORKER_STARTS, *SMALL.split()]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=WHOLE_TIMEOUT_S, check=False
    )
    assert (run.returncode, run.stderr) == (130, f"{PROGRAM}: interrupted\n")


@pytest.mark.slow
def test_a_killed_parent_takes_its_workers_along(start):
    process = start(*LONG)
    workers = wait_for(process, "verified, cache on")
    process.kill()
    finish(process)
    assert_gone(workers)


@pytest.mark.slow
def test_a_killed_worker_ends_the_demo(start):
    process = start(*LONG)
    workers = wait_for(process, "verified, cache on")
    victim = next(w for w in workers if "spawn_main" in " ".join(w.cmdline()))
    victim.kill()
    status, _, err = finish(process)
    assert status == 1
    assert "worker ended with exit code -9" in err
    assert_gone(workers)
