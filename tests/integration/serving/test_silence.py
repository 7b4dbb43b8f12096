"""Workers that stand still, as SIGSTOP makes them: they are there, and do not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, client_of, get, said_by

NUM = 12
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_front_says_that_a_worker_is_silent_and_has_requests_wait_for_the_only_one(
    serve: Serve, expected: Expected
) -> None:
    with client_of(serve) as client, ThreadPoolExecutor(2) as pool:
        hello = partial(said_by, client, HELLO, NUM)
        assert hello() == expected.chat(HELLO, NUM)
        with stopped(serve.workers()["decode-0"]["pid"]):
            until(lambda: get(f"{serve.status}/health")[0] == 503)
            _, told = get(f"{serve.status}/health")
            assert told["status"] == "silent"
            silent = {name: worker["silent"] for name, worker in told["workers"].items()}
            assert silent == {"decode-0": True, "prefill-0": False}
            assert serve.figures()['prefixkv_front_routing{what="silent"}'] == 1
            waiting = [pool.submit(hello) for _ in range(2)]
            assert not wait(waiting, 1.0, FIRST_COMPLETED).done
        until(lambda: get(f"{serve.status}/health")[0] == 200)
        for said in (*waiting, pool.submit(hello)):
            assert said.result(PATIENCE_S) == expected.chat(HELLO, NUM)
