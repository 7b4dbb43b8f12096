"""`prefixkv serve --carry-on`: its prefill worker is killed under load, and whenever it comes back,
and every request is answered, and right."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from tests.integration.serving.test_kills import CLIENTS, NUM_TOKENS, Load, chats
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, at_rest, client_of, said_by

PREFILL = "prefill-0"


class KeptDead:
    """Kills the prefill worker now, and each time that it is back, until `end`."""

    def __init__(self, serve: Serve) -> None:
        self._serve, self._ending = serve, threading.Event()
        self.pids: list[int] = []
        self._kill()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _kill(self) -> None:
        worker = self._serve.workers().get(PREFILL)
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGKILL)
                self.pids.append(worker["pid"])

    def _keep(self) -> None:
        while not self._ending.wait(0.05):
            self._kill()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)


def test_a_killed_prefill_worker_fails_no_request(expected: Expected) -> None:
    wanted = {i: expected.chat(chat, NUM_TOKENS) for i, chat in enumerate(chats())}
    pages = ("--decode-pages", "400", "--prefill-pages", "160")
    # Nothing is computed by decode while prefill is there.
    with Serve("--chunk-tokens", "32", "--carry-on", "--compute-below", "0", *pages) as serve:
        load = Load(serve, wanted)
        try:
            until(lambda: load.ends["finished"] > CLIENTS)
            computed = 'prefixkv_computed_requests_total{node="decode-0"}'
            assert serve.figures("decode-0")[computed] == 0
            dead = KeptDead(serve)
            try:
                before = load.ends["finished"]
                # The requests that were on their way to it are among these.
                until(lambda: load.ends["finished"] > before + 6 * CLIENTS)
                assert serve.figures("decode-0")[computed] > 0
            finally:
                dead.end()
            # It comes back, and computes again.
            until(lambda: serve.workers().get(PREFILL, {"pid": dead.pids[-1]})["pid"]
                  not in dead.pids)  # fmt: skip
        finally:
            load.end()
        assert load.wrong == []
        assert set(load.ends) == {"finished"}
        with client_of(serve) as client:
            said_by(client, [{"role": "user", "content": "And of snow?"}], 8)
        at_rest(serve)
