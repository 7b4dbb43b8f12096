"""Chaos over two real vLLM servers and `prefixkv proxy`, for the benchmark `vllm`.

Clients hold conversations through the proxy while something is done to a server: it is killed and
started again, stopped and continued, or forgets its cache. Decode's pool holds less than the
conversations need, and a policy names what goes. Some clients leave in the middle of an answer.

After each round every answer is compared, token for token in float32, with what one engine computes
from nothing; what a client had when it left, or when its stream broke, with the beginning of that.
Then no block may be in use on either side, and one more request has to be answered. An error is
excused only where decode died: nobody else has the request.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final

from benchmarks.ports import free_port
from benchmarks.vllm_pair import BLOCK, Pair, stream
from benchmarks.vllm_servers import REPOSITORY
from benchmarks.vllm_sets import drawn

BOUND_S: Final = 60.0
"""Without a token for so long, a request hangs."""
SETTLE_S: Final = 60.0
CLIENTS: Final = 6
AT_ONCE: Final = 12  # answers that are computed again
CALM_S: Final = 5.0  # before and after what is done
LONGEST: Final = 2400  # tokens of a conversation
MOST: Final = 200
"""Requests of a round, from which on a client sends one in MOST_S: to start a server takes long."""
MOST_S: Final = 4.0
STOPS_S: Final = (2.0, 9.0)  # shorter and longer than a peer may be silent


@dataclass
class Said:
    """A request, and what became of it."""

    prompt: list[int]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    end: str = "answered"  # or `left`, `error: ...`, `hang`
    took_s: float = 0.0


class Clients:
    """`with` starts them; they end with the request that they are in."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._seed = port, seed
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(i,)) for i in range(CLIENTS)]
        self.said: list[Said] = []
        self.all_leave = False

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _live(self, i: int) -> None:
        chance = random.Random(self._seed * 100 + i)
        shared = drawn(self._seed, 6 * BLOCK)  # all conversations of a round begin alike
        numbers = itertools.count(self._seed * 100_000 + i * 1000)
        history: list[int] = []
        while not self._ended.is_set():
            if not history or len(history) > LONGEST:
                history = shared + drawn(next(numbers), chance.randint(20, 900))
            said = Said(history, chance.choice((4, 8, 8, 16, 40)))
            self._ask(said, leave_at=chance.randint(1, 4) if chance.random() < 0.15 else 99)
            self.said.append(said)
            pause_s = MOST_S if len(self.said) > MOST else chance.uniform(0.1, 1.0)
            self._ended.wait(pause_s)
            history = [*history, *said.tokens, *drawn(next(numbers), chance.randint(5, 120))]

    def _ask(self, said: Said, leave_at: int) -> None:
        begun_s = time.monotonic()
        try:
            for new in stream(self._port, said.prompt, said.num_tokens, BOUND_S):
                said.tokens += new
                if len(said.tokens) >= leave_at or self.all_leave:
                    said.end = "left" if len(said.tokens) < said.num_tokens else "answered"
                    break
        except TimeoutError:
            said.end = "hang"
        except (RuntimeError, OSError, HTTPException) as error:
            said.end = f"error: {type(error).__name__} {error}"[:200]
        said.took_s = time.monotonic() - begun_s


# --- what is done ---------------------------------------------------------------------------------


def _stop(pair: Pair, name: str, stop_s: float) -> None:
    server = getattr(pair, name)
    server.signal(signal.SIGSTOP)
    time.sleep(stop_s)
    server.signal(signal.SIGCONT)


def _stopped_then_killed(pair: Pair, clients: Clients) -> None:
    pair.prefill.signal(signal.SIGSTOP)
    time.sleep(STOPS_S[1])
    pair.restart_prefill()


def _both_killed(pair: Pair, clients: Clients) -> None:
    pair.decode.kill()
    pair.restart_prefill()
    pair.restart_decode()


def _killed_twice(pair: Pair, clients: Clients) -> None:
    pair.restart_prefill()
    time.sleep(0.5)
    pair.restart_prefill()


def _reset(pair: Pair, clients: Clients) -> None:
    """As before a change of weights, again until it is done: a block in use refuses it."""
    for _ in range(20):
        pair.decode.post("/reset_prefix_cache?reset_external=true", {})
        time.sleep(0.25)


def _all_leave(pair: Pair, clients: Clients) -> None:
    clients.all_leave = True
    time.sleep(3.0)
    clients.all_leave = False


ROUNDS: Final[dict[str, tuple[Callable[[Pair, Clients], None], bool]]] = {
    "prefill killed": (lambda pair, _: pair.restart_prefill(), False),
    "prefill stopped for 2 s": (lambda pair, _: _stop(pair, "prefill", STOPS_S[0]), False),
    "prefill stopped for 9 s": (lambda pair, _: _stop(pair, "prefill", STOPS_S[1]), False),
    "prefill stopped, then killed": (_stopped_then_killed, False),
    "prefill killed twice": (_killed_twice, False),
    "decode killed": (lambda pair, _: pair.restart_decode(), True),
    "decode stopped for 9 s": (lambda pair, _: _stop(pair, "decode", STOPS_S[1]), False),
    "both killed": (_both_killed, True),
    "decode's cache reset": (_reset, False),
    "all clients leave": (_all_leave, False),
}
"""And whether decode dies."""


# --- rounds ---------------------------------------------------------------------------------------


def chaos(pair: Pair, rounds: int, seed: int) -> dict[str, Any]:
    """A row a round: counts of requests, and what was wrong, if anything."""
    names = [*ROUNDS] * -(-rounds // len(ROUNDS))
    rows = []
    with _proxy(pair) as port:
        for i, name in enumerate(names[:rounds]):
            act, decode_dies = ROUNDS[name]
            with Clients(port, seed + i) as clients:
                chance = random.Random(seed + i)
                time.sleep(CALM_S + chance.random())
                act(pair, clients)
                time.sleep(CALM_S)
            row = {"done": name, **_held(pair, clients.said, decode_dies)}
            row["goes_on"] = _answered(pair, port, seed + i)
            print(pair.system, row, flush=True)
            rows.append(row)
    return {"seed": seed, "rounds": rows}


@contextmanager
def _proxy(pair: Pair) -> Iterator[int]:
    port = free_port()
    command = [
        sys.executable, "-m", "prefixkv.cli.main", "proxy",
        "--prefill", f"{pair.prefill.url}={pair.kv_address}",
        "--decode", f"{pair.decode.url}=decode-0",
        "--port", str(port), "--status-port", str(free_port()),
    ]  # fmt: skip
    proxy = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert proxy.stdout is not None
        assert proxy.stdout.readline()
        yield port
    finally:
        proxy.terminate()
        proxy.wait()


def _held(pair: Pair, said: list[Said], decode_dies: bool) -> dict[str, Any]:
    """The counts of a round, when all clients have left."""
    blocks_lost = _settled(pair)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        rights = [*threads.map(lambda one: _right(pair, one), said)]
    wrong = [one for one, right in zip(said, rights, strict=True) if not right]
    broken = [one.end for one in said if one.end.startswith("error")]
    return {
        "requests": len(said),
        "answered": sum(one.end == "answered" for one in said),
        "left": sum(one.end == "left" for one in said),
        "errors": 0 if decode_dies else len(broken),
        "errors_excused": len(broken) if decode_dies else 0,
        "hangs": sum(one.end == "hang" for one in said),
        "wrong": len(wrong),
        "blocks_lost": blocks_lost,
        "longest_s": round(max(one.took_s for one in said), 2),
        "what": sorted({*broken})[:5] + [f"{one.end} {len(one.prompt)}" for one in wrong[:5]],
    }


def _right(pair: Pair, said: Said) -> bool:
    if not said.tokens:
        return True
    alone = pair.alone(said.prompt, said.num_tokens, salt=f"{id(said)} {time.time_ns()}").tokens
    return said.tokens == alone[: len(said.tokens)]


def _settled(pair: Pair) -> list[int]:
    """Blocks in use on prefill and decode when nobody asks, at the latest after SETTLE_S."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        usage = [pair.usage(pair.prefill), pair.usage(pair.decode)]
        if not any(usage) or time.monotonic() > end_s:
            sizes = (pair.shape.blocks, pair.shape.decode_blocks)
            return [round(a * (b - 1)) for a, b in zip(usage, sizes, strict=True)]
        time.sleep(0.5)


def _answered(pair: Pair, port: int, seed: int) -> bool:
    """A request with a new prompt, over the transfer path: blocks are sent."""
    prompt = drawn(seed + 7_000_000, 10 * BLOCK)
    before = pair.bytes_moved()
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        with suppress(RuntimeError, OSError, HTTPException):
            tokens = [one for new in stream(port, prompt, 8, BOUND_S) for one in new]
            right = tokens == pair.alone(prompt, 8, salt=f"{seed} {time.time_ns()}").tokens
            if not right:
                return False
            time.sleep(2.0)  # counters
            if pair.bytes_moved() > before:
                return True
            prompt = drawn(seed + 7_000_000 + time.time_ns() % 1000, 10 * BLOCK)
        time.sleep(1.0)
    return False
