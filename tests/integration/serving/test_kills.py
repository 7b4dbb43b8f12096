"""Workers killed in the middle, one after the other, under load. `PREFIXKV_KILLS` sets how many;
without it four, so that each role is killed in its first life and in a later one. With `--carry-
on` prefill is killed whenever it comes back, and every request is answered, and right."""

import contextlib
import itertools
import os
import random
import signal
import threading
from collections import Counter

import openai
import pytest

from tests.integration.serving.conftest import KEY
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, at_rest, client_of, get, greedy, said_by

KILLS = int(os.environ.get("PREFIXKV_KILLS", "4"))
CLIENTS = 4
NUM_TOKENS = 96
TOPICS = ("cats", "boats", "salt", "rain", "bread", "stones")

Chat = list[dict[str, str]]


def chats() -> list[Chat]:
    """Those that are asked: long, with one beginning in common, and of one turn."""
    system = {"role": "system", "content": "You answer in words of two syllables. " * 4}
    made: list[Chat] = []
    for topic in TOPICS:
        made.append([system, {"role": "user", "content": f"Tell me of {topic}, at length."}])
        made.append([{"role": "user", "content": topic}])
    return made


class Load:
    """Clients that ask without a pause until `end`, and compare what comes."""

    def __init__(self, serve: Serve, expected: dict[int, str]) -> None:
        self._client, self._expected, self._chats = client_of(serve), expected, chats()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client still waits"
        self._client.close()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ending.is_set():
            number = draw.randrange(len(self._chats))
            said, end = self._stream(number) if draw.random() < 0.8 else self._whole(number)
            wanted = self._expected[number]
            right = said == wanted if end == "finished" else wanted.startswith(said)
            with self._lock:
                self.ends[end] += 1
                if not right:
                    self.wrong.append(f"{end}: {said!r} for {wanted!r}")
            if end == "refused":
                self._ending.wait(0.5)

    def _stream(self, number: int) -> tuple[str, str]:
        said, finish = "", None
        try:
            for chunk in self._begin(number, stream=True):
                for choice in chunk.choices:
                    said += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        except openai.APIStatusError as error:
            return said, self._of(error)
        except openai.APIError as error:  # an event of the stream, in OpenAI's form
            return said, "error event" if "lost" in str(error) else f"an odd event: {error}"
        return said, "finished" if finish in ("stop", "length") else f"it ended with {finish}"

    def _whole(self, number: int) -> tuple[str, str]:
        try:
            return self._begin(number).choices[0].message.content, "finished"
        except openai.APIStatusError as error:
            return "", self._of(error)

    @staticmethod
    def _of(error: openai.APIStatusError) -> str:
        return "refused" if error.status_code == 503 else f"an odd status: {error}"

    def _begin(self, number: int, **more: bool):
        return greedy(self._client, self._chats[number], NUM_TOKENS, **more)


def answering(serve: Serve) -> str | None:
    """A decode worker that is in the middle of an answer: which of them are used is the router's
    choice."""
    for name in serve.workers():
        queue = f'prefixkv_queue_requests{{node="{name}",queue="running"}}'
        if name.startswith("decode") and serve.figures(name)[queue]:
            return name
    return None


def test_no_kill_of_a_worker_makes_an_answer_wrong_or_keeps_a_page(expected: Expected) -> None:
    wanted = {i: expected.chat(chat, NUM_TOKENS) for i, chat in enumerate(chats())}
    pages = ("--decode-pages", "160", "--prefill-pages", "160")
    with Serve("--decode", "2", "--chunk-tokens", "32", *pages) as serve:
        load = Load(serve, wanted)
        try:
            for role in itertools.islice(itertools.cycle(("decode", "prefill")), KILLS):
                kill_one(serve, load, role, wanted)
            # A killed worker may have had no stream that had begun: the others were asked.
            for _ in range(KILLS):
                if load.ends["error event"]:
                    break
                kill_one(serve, load, "decode", wanted)
        finally:
            load.end()
        assert load.wrong == []
        assert set(load.ends) <= {"finished", "error event", "refused"}
        assert load.ends["error event"] > 0
        at_rest(serve)


def kill_one(serve: Serve, load: Load, role: str, wanted: dict[int, str]) -> None:
    before = load.ends["finished"]
    until(lambda: load.ends["finished"] > before + CLIENTS)
    if role == "decode":
        chosen: list[str] = []
        until(lambda: chosen.extend(filter(None, [answering(serve)])) or chosen)
        worker = chosen[0]
    else:
        worker = "prefill-0"
    pid = serve.workers()[worker]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: serve.workers().get(worker, {"pid": pid})["pid"] != pid)
    until(lambda: get(f"{serve.status}/health")[0] == 200)
    # The next request is served, whatever the others still wait for.
    with client_of(serve) as client:
        assert wanted[0].startswith(said_by(client, chats()[0], 8))


@pytest.mark.parametrize("killed", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")])
def test_a_request_waits_until_the_only_worker_of_a_role_is_back(
    guarded: Serve, expected: Expected, killed: tuple[str, ...]
) -> None:
    chat: Chat = [{"role": "user", "content": "What is it that you wait for?"}]
    pids = {name: worker["pid"] for name, worker in guarded.workers().items()}
    guarded.err.clear()
    for name in killed:
        os.kill(pids[name], signal.SIGKILL)
    until(lambda: get(f"{guarded.status}/health")[0] == 503)
    # `max_retries` of this client is 0.
    with client_of(guarded, KEY) as client:
        assert said_by(client, chat, 8) == expected.chat(chat, 8)
    for name in killed:
        assert guarded.workers()[name]["pid"] != pids[name]
        until(lambda name=name: any(f"{name} is back" in line for line in guarded.err))


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
