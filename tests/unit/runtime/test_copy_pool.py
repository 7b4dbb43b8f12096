"""The copy pool: jobs in order, each reported once, whatever they raise and whenever the pool
closes."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch

from prefixkv.control.effects import CopyDone
from prefixkv.errors import ClosedError, ConfigError
from prefixkv.runtime.copies import run_settled
from prefixkv.runtime.staging import CopyPool
from tests.support.gpu import GPU
from tests.support.patience import until

WAIT_S = 60.0

Results = SimpleQueue[CopyDone]


def take(results: Results, count: int) -> list[CopyDone]:
    return [results.get(timeout=WAIT_S) for _ in range(count)]


def test_one_worker_runs_jobs_in_order_and_reports_each() -> None:
    results: Results = SimpleQueue()
    ran: list[int] = []
    pool = CopyPool(1, results.put)
    for i in range(50):
        pool.submit(i, lambda i=i: ran.append(i))  # type: ignore[misc]
    assert take(results, 50) == [CopyDone(i) for i in range(50)]
    assert ran == list(range(50))
    pool.close()
    assert results.empty()


def test_jobs_run_on_several_workers_at_once_and_start_in_order() -> None:
    results: Results = SimpleQueue()
    together = threading.Barrier(3)
    pool = CopyPool(3, results.put)
    for i in range(3):
        pool.submit(i, lambda: together.wait(WAIT_S) and None)
    assert {done.copy_id for done in take(results, 3)} == {0, 1, 2}
    pool.close()


def test_a_worker_survives_a_job_that_raises() -> None:
    results: Results = SimpleQueue()
    error = OSError("no")

    def fail() -> None:
        raise error

    pool = CopyPool(1, results.put)
    pool.submit("bad", fail)
    pool.submit("good", lambda: None)
    assert take(results, 2) == [CopyDone("bad", error), CopyDone("good")]
    pool.close()


def test_close_waits_for_what_runs_and_reports_what_never_ran() -> None:
    results: Results = SimpleQueue()
    started, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow() -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        ran.append("slow")

    pool = CopyPool(1, results.put)
    pool.submit("slow", slow)
    for token in ("b", "c"):
        pool.submit(token, lambda: ran.append("never"))
    assert started.wait(WAIT_S)
    closer = threading.Thread(target=pool.close)
    closer.start()
    until(lambda: pool._closed)  # no later state can be waited for: `close` waits for us
    go_on.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    first, *others = take(results, 3)
    assert first == CopyDone("slow")
    assert [done.copy_id for done in others] == ["b", "c"]
    assert all(isinstance(done.error, ClosedError) for done in others)
    assert ran == ["slow"]
    assert results.empty()
    pool.close()
    with pytest.raises(ClosedError):
        pool.submit("late", lambda: None)


def test_threads_are_gone_after_close_and_named_before() -> None:
    before = set(threading.enumerate())
    pool = CopyPool(2, lambda done: None, name="here")
    new = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in new) == ["prefixkv-copy-here-0", "prefixkv-copy-here-1"]
    pool.close()
    assert not any(thread.is_alive() for thread in new)


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is 0"):
        CopyPool(0, lambda done: None)


@pytest.mark.parametrize(("failing", "first"), [(0, -1), (1, 0), (2, 1), (3, 0)])
def test_the_device_is_waited_for_whatever_became_of_the_copy(failing: int, first: int) -> None:
    errors = [OSError("copy"), OSError("device")]
    ran: list[int] = []

    def step(number: int) -> None:
        ran.append(number)
        if failing & (1 << number):
            raise errors[number]

    error = run_settled(lambda: step(0), lambda: step(1))
    assert error is (errors[first] if failing else None)
    assert ran == [0, 1]


@GPU
def test_on_cuda_a_copy_is_over_when_it_is_reported() -> None:
    results: Results = SimpleQueue()
    source = torch.arange(1 << 24, device="cuda")
    target = torch.zeros_like(source)
    host = torch.zeros(1 << 24, dtype=torch.int64).pin_memory()  # else the copy itself waits
    torch.cuda.synchronize()
    streams: set[int] = set()

    def copy() -> None:
        streams.add(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(200_000_000)  # cycles: without the wait the report would be early
        target.copy_(source)
        host.copy_(target, non_blocking=True)

    pool = CopyPool(1, results.put, device="cuda")
    pool.submit("copy", copy)
    assert take(results, 1) == [CopyDone("copy")]
    assert torch.equal(host, torch.arange(1 << 24))
    assert streams.isdisjoint({torch.cuda.default_stream().cuda_stream})
    pool.close()
