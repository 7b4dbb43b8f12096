"""SGLang's servers on a CPU with its own transfers over NIXL and with prefixkv's: a burst of one
new prompt, requests that are aborted, prefill killed while it sends.

Run by the interpreter of `python -m benchmarks env sglang`.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_serve import OUTPUT, SIDES, VOCABULARY, Pair, make_model, post

BURSTS, REQUESTS, PROMPT = 3, 16, 1024
LONG: Final = 4096
"""Tokens of a prompt that is sent in chunks of 256 as they are computed."""
TOLD_S: Final = 30
"""How long decode is given to end a request that was aborted on prefill."""
HELD: Final = "sglang:decode_deferred_kv_release_total"


def measure(folder: Path, kills: int, peer_kills: int, aborts: int) -> dict[str, Any]:
    """Both sides, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").is_file():
        make_model(model)
    found = {}
    for name, side, count in (("prefixkv", "transfers", kills), ("sglang", "prefixkv", peer_kills)):
        logs = folder / f"transfers-{name}"
        logs.mkdir(exist_ok=True)
        on_prefill = ["--chunked-prefill-size", "256"]
        options = [*SIDES[side], "--enable-metrics"]
        with Pair(model, options, logs, decode_tokens=32768, on_prefill=on_prefill) as pair:
            run = Run(pair)
            found[name] = {
                "burst": run.bursts(), "aborts": run.aborts(aborts), "kills": run.kills(count),
                "leaks": run.leaks(),
            }  # fmt: skip
            (folder / f"{name}.json").write_text(json.dumps(found[name]))
    return {
        "peer": "SGLang's NIXL backend; prefixkv's tree on both sides",
        "burst_of": f"{REQUESTS} requests with one new prompt of {PROMPT} tokens, {BURSTS} times",
        **found,
    }


class Run:
    """What is asked of a pair of servers. Each request has a prompt of its own, from a seed."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rng = random.Random(11)
        self._room = 0
        self._pool = ThreadPoolExecutor(2 * REQUESTS)
        self._lock = threading.Lock()
        self.check()

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(3, VOCABULARY) for _ in range(length)]

    def check(self) -> None:
        """Both serve, and say the same of the same prompt, new and cached."""
        prompt = self.prompt(300)
        assert self.ask(prompt) == self.ask(prompt)

    def ask(self, prompt: list[int]) -> list[int]:
        """What decode answers."""
        self._room += 1
        return self._pair.generate(prompt, self._room)

    # --- a burst ----------------------------------------------------------------------------------

    def bursts(self) -> dict[str, Any]:
        before, waits = self.sent_mib(), []
        for _ in range(BURSTS):
            prompt = self.prompt(PROMPT)
            self._room += REQUESTS
            rooms = range(self._room - REQUESTS + 1, self._room + 1)
            waits += list(self._pool.map(lambda room, ids=prompt: self._ttft_s(ids, room), rooms))
        sent_mib = self.sent_mib() - before
        cuts = statistics.quantiles(waits, n=20)
        return {
            "ttft_p50_ms": round(1e3 * statistics.median(waits)),
            "ttft_p95_ms": round(1e3 * cuts[18]), "requests": len(waits),
            "sent_mib": round(sent_mib, 1),
        }  # fmt: skip

    def stream(self, ids: list[int], output: int, begun: threading.Event | None = None) -> float:
        """As `_ttft_s`, of a request of its own; it has `begun` when the first token is here."""
        with self._lock:
            self._room += 1
            room = self._room
        return self._ttft_s(ids, room, output, begun)

    def _ttft_s(
        self,
        ids: list[int],
        room: int,
        output: int = OUTPUT,
        begun: threading.Event | None = None,
    ) -> float:
        """Until decode has streamed the first token; both are asked at once."""
        body = self._pair.body(ids, room, output)
        prefill = ThreadPoolExecutor(1)
        asked = prefill.submit(post, f"{self._pair.url('prefill')}/generate", body)
        request = urllib.request.Request(
            f"{self._pair.url('decode')}/generate",
            json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"},
        )  # fmt: skip
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.readline()
            wait_s = time.perf_counter() - began
            if begun is not None:
                begun.set()
            answer.read()
        asked.result()
        prefill.shutdown()
        return wait_s

    # --- the ends of requests ---------------------------------------------------------------------

    def _start(self, length: int, chunks: int) -> tuple[int, list[Future[str]]]:
        """A long request of which prefill has begun that many chunks, and what becomes of it on
        prefill and decode."""
        self._room += 1
        body, before = self._pair.body(self.prompt(length), self._room), self._batches()
        ended = [self._pool.submit(self._ask, side, body) for side in self._pair.ports]
        while self._batches() < before + chunks:
            time.sleep(0.005)
        return self._room, ended

    def _batches(self) -> int:
        return self._pair.told("prefill").count("Prefill batch")

    def _ask(self, side: str, body: dict[str, Any]) -> str:
        try:
            answer = post(f"{self._pair.url(side)}/generate", body)
        except (urllib.error.HTTPError, OSError) as error:
            return f"failed ({error})"
        return str(answer["meta_info"]["finish_reason"]["type"])

    def aborts(self, count: int) -> dict[str, Any]:
        """Half are aborted on decode, half on prefill, after 2 to 6 of 16 chunks."""
        ends: Counter[str] = Counter()
        for number in range(count):
            room, ended = self._start(LONG, 2 + number % 5)
            side = "decode" if number % 2 else "prefill"
            self._abort(side, room)
            try:
                said = ended[1].result(timeout=TOLD_S)
            except TimeoutError:
                said = f"not told within {TOLD_S} s"
                self._abort("decode", room)
                ended[1].result()
            ends[f"on {side}: {said}"] += 1
            self.check()
        return {"decode_said": dict(ends), "held_then_freed": self._counts()}

    def _abort(self, side: str, room: int) -> None:
        request = urllib.request.Request(
            f"{self._pair.url(side)}/abort_request",
            json.dumps({"rid": f"request-{room}"}).encode(), {"Content-Type": "application/json"},
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=60).close()

    def kills(self, count: int) -> dict[str, Any]:
        """Prefill dies after 2 to 6 of 16 chunks; another takes its place."""
        if not count:
            return {}
        failed_s, freed_s = [], []
        held_before = sum(self._counts().values())
        for number in range(count):
            _, ended = self._start(LONG, 2 + number % 5)
            self._pair.kill("prefill")
            began = time.perf_counter()
            self._pair.start("prefill")
            assert ended[1].result() != "length", "it ended before prefill was killed"
            failed_s.append(time.perf_counter() - began)
            while sum(self._counts().values()) < held_before + number + 1:
                time.sleep(0.05)
            freed_s.append(time.perf_counter() - began)
            self._pair.until_up("prefill")
            self.check()
        return {
            "kills": count, "failed_after_s": _spread(failed_s), "freed_after_s": _spread(freed_s),
            "held_then_freed_in_all": self._counts(),
        }  # fmt: skip

    # --- what the servers say ---------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        """How decode came to free what it held of requests that failed, in all so far."""
        found = re.findall(rf'^{HELD}{{.*outcome="(\w+)".*}} (\S+)$', self._metrics("decode"), re.M)
        return {outcome: int(float(count)) for outcome, count in found}

    def sent_mib(self) -> float:
        said = re.findall(
            r"^sglang:kv_transfer_total_mb_sum{.*} (\S+)$", self._metrics("prefill"), re.M
        )
        return sum(map(float, said))

    def _metrics(self, side: str) -> str:
        with urllib.request.urlopen(f"{self._pair.url(side)}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def leaks(self) -> int:
        """Times that either server has found pages missing, idle at the end."""
        time.sleep(2)
        return sum(self._pair.told(side).count("leak detected") for side in self._pair.ports)


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "least": round(min(seconds), 2),
        "median": round(statistics.median(seconds), 2),
        "most": round(max(seconds), 2),
    }
