"""Conversations that come back to vLLM: with host memory and own compute on decode, and without.

One prefill server, whose connector sends at most `LINK_BYTES_PER_S`, and two decode servers, each
with blocks for a part of the conversations: as today, and with host memory and `compute_below`. One
is asked at a time; the others rest. Each pass has a cache salt of its own, so
prefill has nothing of the others'. A round is a pass with each, and one more as today (A against
A); the order changes from round to round. Two conversations are active at a time, and their turns
come in an order that is drawn. All tokens of a round have to be equal.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.own_compute import ratios
from benchmarks.report import Row
from benchmarks.vllm_pair import stream
from benchmarks.vllm_servers import Server, Sizes, make_model, transfer_config
from tests.support.ports import free_port

SIZES: Final = Sizes(512, 8, 8, 4, 64, "float32")
FIRST, MORE, OUT, TURNS = 1200, 150, 16, 4
"""Tokens of a conversation's first turn, what each later one adds, and an answer; turns."""
ACTIVE: Final = 2
BLOCK: Final = 32
SHARE: Final = 0.25
"""Of all conversations' blocks, those that a decode server has."""
HOST: Final = "8x"
BELOW: Final = 2048
LINK_BYTES_PER_S: Final = 125_000_000
TODAY, AGAIN, BOTH = "today", "today again", "host memory and own compute"
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    TODAY: {},
    BOTH: {"host_memory": HOST, "compute_below": BELOW},
}


@dataclass(frozen=True)
class _Turn:
    session: int
    number: int
    tokens: list[int]  # of the answer
    ttft_s: float


class _Servers:
    """A prefill server, and the decode servers by their options."""

    def __init__(
        self, python: str, folder: Path, sessions: int, names: list[str], stack: ExitStack
    ) -> None:
        model = make_model(python, folder / "model", SIZES)
        self._kv_port, self._rooms = free_port(), itertools.count(1)
        self.threads = stack.enter_context(ThreadPoolExecutor(8))
        each = -(-(FIRST + TURNS * (MORE + OUT)) // BLOCK)
        self.blocks = max(3 * each, int(SHARE * sessions * each))

        def start(name: str, transfer: dict[str, Any], blocks: int) -> Server:
            log = folder / f"{name}.log"
            return stack.enter_context(
                Server(
                    python, model, log, transfer, blocks=blocks, block_size=BLOCK, chunk=512,
                    dtype=SIZES.dtype
                )
            )  # fmt: skip

        link = {"max_bytes_per_s": LINK_BYTES_PER_S}
        producer = transfer_config("kv_producer", "prefill", self._kv_port, transport=link)
        # Blocks for all that one pass has.
        self.prefill = start("prefill", producer, 2 * sessions * each)
        self.decode = {
            name: start(
                f"decode-{i}",
                transfer_config("kv_consumer", f"decode-{i}", free_port(), **OPTIONS[name]),
                self.blocks + 1,
            )
            for i, name in enumerate(names)
        }
        self._names = {name: f"decode-{i}" for i, name in enumerate(names)}
        for server in (self.prefill, *self.decode.values()):
            server.wait()

    def ask(self, name: str, prompt: list[int], salt: str) -> tuple[list[int], float]:
        """Both sides at once; the answer's tokens, and when the first was there."""
        room, begun_s = next(self._rooms), time.perf_counter()
        send = {"do_remote_decode": True, "room": room, "decode": self._names[name]}
        where = f"tcp://127.0.0.1:{self._kv_port}"
        load = {"do_remote_prefill": True, "room": room, "prefill": where}
        sent: Future[Any] = self.threads.submit(
            self.prefill.complete, prompt, 1, send, cache_salt=salt
        )
        tokens: list[int] = []
        first_s = 0.0
        port = self.decode[name].port
        for some in stream(port, prompt, OUT, 600.0, kv_transfer_params=load, cache_salt=salt):
            first_s = first_s or time.perf_counter() - begun_s
            tokens += some
        with suppress(OSError):  # prefill's answer to a room that decode has refused
            sent.result()
        return tokens, first_s

    def settle(self, name: str) -> None:
        """Until nothing is copied, sent or held."""
        keys = "prefixkv_host_copies", "prefixkv_held_blocks", "kv_cache_usage_perc"
        for server in (self.decode[name], self.prefill):
            end_s = time.monotonic() + 60.0
            while any(server.metrics()[f"vllm:{key}"] for key in keys):
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{name} holds blocks for a minute")
                time.sleep(0.05)


def order(seed: int, sessions: list[int]) -> Iterator[int]:
    """Yield each of the sessions as often as it has turns: their first turns one after the other,
    and then in an order that is drawn."""
    later = sessions * (TURNS - 1)
    random.Random(seed).shuffle(later)
    yield from (*sessions, *later)


def _play(servers: _Servers, name: str, sessions: int, seed: int, salt: str) -> list[_Turn]:
    """Play all conversations, `ACTIVE` at a time."""

    def lane(number: int) -> list[_Turn]:
        mine = list(range(number, sessions, ACTIVE))
        said: dict[int, list[int]] = {session: [] for session in mine}
        turns = dict.fromkeys(mine, 0)
        found = []
        for session in order(seed + number, mine):
            draw = random.Random(1000 * (1000 * seed + session) + turns[session])
            count = MORE if turns[session] else FIRST
            said[session] += [draw.randrange(10, 2000) for _ in range(count)]
            tokens, ttft_s = servers.ask(name, said[session], salt)
            said[session] += tokens
            found.append(_Turn(session, turns[session], tokens, ttft_s))
            turns[session] += 1
        return found

    lanes = [servers.threads.submit(lane, number) for number in range(ACTIVE)]
    return sorted(
        (turn for each in lanes for turn in each.result()),
        key=lambda turn: (turn.session, turn.number),
    )


def _pass(servers: _Servers, kind: str, sessions: int, number: int) -> dict[str, Any]:
    name = TODAY if kind == AGAIN else kind
    decode, prefill = servers.decode[name], servers.prefill
    before = decode.metrics(), prefill.metrics()
    turns = _play(servers, name, sessions, number, f"{kind} {number}")
    servers.settle(name)
    after = decode.metrics(), prefill.metrics()

    def grown(side: int, key: str) -> float:
        return after[side].get(f"vllm:{key}", 0.0) - before[side].get(f"vllm:{key}", 0.0)

    later = sorted(1e3 * turn.ttft_s for turn in turns if turn.number)
    return {
        "later_ttft_p50_ms": round(statistics.median(later), 2),
        "later_ttft_p90_ms": round(later[int(0.9 * len(later))], 2),
        "sent_mib": round(grown(1, "prefixkv_bytes_sent_total") / (1 << 20), 1),
        "prefill_tokens": int(grown(1, "prompt_tokens_total")),
        "host_loaded_blocks": int(grown(0, "prefixkv_host_loaded_blocks_total")),
        "host_missed_blocks": int(grown(0, "prefixkv_host_missed_blocks_total")),
        "computed_requests": int(grown(0, "prefixkv_computed_requests_total")),
        "tokens": [turn.tokens for turn in turns],
    }


def measure(python: str, pairs: int, sessions: int) -> tuple[Row, Row]:
    """Rounds of passes; the ratios of each, and the recipe."""
    kinds = [*OPTIONS, AGAIN]
    passes: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    equal = True
    with tempfile.TemporaryDirectory(prefix="prefixkv-vllm-host-") as folder, ExitStack() as stack:
        servers = _Servers(python, Path(folder), sessions, [*OPTIONS], stack)
        for name in OPTIONS:  # so that no pass has the servers' first steps in it
            servers.ask(name, list(range(10, 200)), "first")
        for number in range(pairs):
            said = {}
            for kind in kinds if number % 2 == 0 else kinds[::-1]:
                row = _pass(servers, kind, sessions, number)
                said[kind] = row.pop("tokens")
                passes[kind].append(row)
                print(kind, row, flush=True)
            equal &= all(tokens == said[TODAY] for tokens in said.values())
    found: Row = {"tokens_equal": equal, "decode_blocks": servers.blocks}
    keys = ("later_ttft_p50_ms", "later_ttft_p90_ms", "sent_mib")
    found |= ratios(passes, BOTH, TODAY, AGAIN, keys)
    return {**found, "passes": passes}, {
        "sessions": sessions, "first": FIRST, "more": MORE, "out": OUT, "turns": TURNS,
        "active": ACTIVE, "host": HOST, "share": SHARE, "below": BELOW,
        "link_bytes_per_s": LINK_BYTES_PER_S,
    }  # fmt: skip
