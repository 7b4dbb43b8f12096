"""Host memory behind vLLM's blocks: two real servers, decode with so few blocks that the turns of a
conversation evict each other. Every token is compared with that of the prefill server alone, which
computes the prompt under a cache salt of its own.

The tests run in the order in which they stand: the last one kills prefill.
"""

from __future__ import annotations

import http.client
import json
import random
import select
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from benchmarks.ports import free_port
from benchmarks.vllm_servers import (
    MODEL,
    TINY,
    Server,
    make_model,
    token_ids,
    transfer_config,
)
from tests.integration.vllm.test_vllm import (
    BLOCK,
    BLOCK_BYTES,
    OUT,
    PYTHON,
    prompt_of,
    started,
    until,
)

DECODE_BLOCKS = 41  # one is vLLM's null block
FIRST, MORE = 300, 60  # tokens of a conversation's first turn, and what each later one adds


class HostPair:
    """The two servers, and a proxy's part."""

    def __init__(self, folder: Path) -> None:
        model = make_model(PYTHON, folder / "model", TINY)
        self.kv_port = free_port()
        self._room = 0
        self._threads = ThreadPoolExecutor(32)
        self.events_port = free_port()
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
            "endpoint": f"tcp://*:{self.events_port}",
        }  # fmt: skip
        producer = transfer_config("kv_producer", "prefill-0", self.kv_port)
        consumer = transfer_config("kv_consumer", "decode-0", free_port(), host_memory="16x")
        self.prefill = Server(PYTHON, model, folder / "prefill.log", producer, chunk=64)
        self.decode = Server(
            PYTHON, model, folder / "decode.log", consumer, blocks=DECODE_BLOCKS, max_len=1024,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
            more=["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)],
        )  # fmt: skip

    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """For decode and for prefill, of a new room."""
        self._room += 1
        where = f"tcp://127.0.0.1:{self.kv_port}"
        return (
            {"do_remote_prefill": True, "room": self._room, "prefill": where},
            {"do_remote_decode": True, "room": self._room, "decode": "decode-0"},
        )

    def ask(self, prompt: list[int]) -> Future[Any]:
        """Both at once; decode's answer."""
        load, send = self.params()
        self._threads.submit(self.prefill.complete, prompt, 1, send)
        return self._threads.submit(self.decode.complete, prompt, OUT, load)

    def alone(self, prompt: list[int]) -> list[int]:
        """What one engine says, from nothing."""
        self._room += 1
        return token_ids(self.prefill.complete(prompt, OUT, cache_salt=f"alone {self._room}"))

    def settled(self) -> None:
        """Nothing is held on decode, and no copy is under way."""

        def unused() -> bool:
            found = self.decode.metrics()
            names = "kv_cache_usage_perc", "prefixkv_host_copies", "prefixkv_held_blocks"
            return not any(found[f"vllm:{name}"] for name in names)

        until(unused)

    def evict(self, seed: int) -> None:
        """Fill decode's cache with others' blocks, under a salt of their own."""
        for i in range(4):
            self.decode.complete(prompt_of(seed + i, 11 * BLOCK), 1, cache_salt=f"others {seed}")
        self.settled()

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode

    def close(self) -> None:
        self.decode.kill()
        self.prefill.kill()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPair]:
    with started(lambda: HostPair(tmp_path_factory.mktemp("host"))) as made:
        yield made


def test_conversations_that_come_back_are_not_sent_again(pair: HostPair) -> None:
    """5 conversations of 10 to 14 blocks, and 40 blocks: each turn has evicted the others', and
    prefill still sends only what is new."""
    prompts = [prompt_of(seed, FIRST) for seed in range(5)]
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            sent, loaded = pair.prefill.counter("bytes_sent"), pair.decode.counter("host_loads")
            expected = pair.alone(prompt)
            answer = pair.ask(prompt).result()
            assert token_ids(answer) == expected
            told = answer["kv_transfer_params"]["prefixkv"]
            # Decode has, or had, whole blocks of the turn before and of its own output.
            had = (len(prompt) - MORE - 1) // BLOCK if turn else 0
            assert told["cached_tokens"] == had * BLOCK
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == had * BLOCK
            blocks = -(-len(prompt) // BLOCK) - had
            pair.settled()
            until(lambda: pair.prefill.counter("bytes_sent") - sent >= blocks * BLOCK_BYTES)  # noqa: B023
            assert pair.prefill.counter("bytes_sent") - sent == blocks * BLOCK_BYTES
            if turn:
                assert told["host_tokens"] > 0
                assert pair.decode.counter("host_loads") == loaded + 1
            prompts[i] = prompt + token_ids(answer) + prompt_of(100 * turn + i, MORE)
    assert pair.decode.counter("host_missed_blocks") == 0
    assert pair.decode.metrics()["vllm:prefixkv_host_blocks"] > DECODE_BLOCKS


def test_a_request_that_names_no_prefill_server_has_host_memory_too(pair: HostPair) -> None:
    prompt = prompt_of(20, 10 * BLOCK + 5)
    expected = token_ids(pair.decode.complete(prompt, OUT))
    pair.settled()
    pair.evict(500)
    loaded = pair.decode.counter("host_loaded_blocks")
    answer = pair.decode.complete(prompt, OUT)
    assert token_ids(answer) == expected == pair.alone(prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 10 * BLOCK
    pair.settled()
    assert pair.decode.counter("host_loaded_blocks") == loaded + 10
    salted = pair.decode.complete(prompt, OUT, cache_salt="another")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    pair.settled()


def test_cache_events_say_what_is_in_host_memory(pair: HostPair) -> None:
    """By vLLM's own publisher: the blocks of a prompt in its pool, and then in host memory too."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        socket.connect(f"tcp://127.0.0.1:{pair.events_port}")
        stored: dict[str, list[int]] = {"GPU": [], "CPU": []}
        prompt = prompt_of(26, 5 * BLOCK)
        its_own = [prompt[at : at + BLOCK] for at in range(0, len(prompt), BLOCK)]

        def hear() -> bool:
            while socket.poll(50):
                _, _, payload = socket.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    # Others may be of what was asked for before, and come late.
                    if event["type"] == "BlockStored" and event["token_ids"][:BLOCK] in its_own:
                        stored[event["medium"]] += event["token_ids"]
            return stored["CPU"] == stored["GPU"] == prompt

        def is_connected() -> bool:
            """A subscriber hears nothing of before it is connected."""
            pair.decode.complete(prompt_of(27, BLOCK), 1, cache_salt=f"{time.monotonic()}")
            return bool(socket.poll(100))

        until(is_connected)
        pair.decode.complete(prompt, 1)
        until(hear)


def test_requests_with_one_prompt_load_it_once(pair: HostPair) -> None:
    head = prompt_of(21, 8 * BLOCK)
    pair.decode.complete([*head, 7], 1)
    pair.settled()
    pair.evict(510)
    loaded = pair.decode.counter("host_loaded_blocks")
    prompts = [head + prompt_of(600 + i, 20) for i in range(4)]
    expected = [pair.alone(prompt) for prompt in prompts]
    asked = [pair.ask(prompt) for prompt in prompts]
    assert [token_ids(one.result()) for one in asked] == expected
    pair.settled()
    assert pair.decode.counter("host_loaded_blocks") == loaded + 8


def test_clients_that_leave_while_blocks_are_copied(pair: HostPair) -> None:
    """At any time: while the load or the room is under way, while it runs, behind its end."""
    chance = random.Random(3)
    prompts = [prompt_of(700 + i, 9 * BLOCK + 3) for i in range(8)]
    expected = [pair.alone(prompt) for prompt in prompts]
    for prompt in prompts:
        pair.decode.complete(prompt, 1)
    for round_ in range(10):
        clients, asked = [], []
        for i in chance.sample(range(8), 5):
            if chance.random() < 0.5:
                asked.append((i, pair.ask(prompts[i])))
                continue
            load, send = pair.params()
            client = http.client.HTTPConnection("127.0.0.1", pair.decode.port)
            body = {"model": MODEL, "prompt": prompts[i], "max_tokens": 40, "ignore_eos": True}
            if chance.random() < 0.5:
                body["kv_transfer_params"] = load
                pair._threads.submit(pair.prefill.complete, prompts[i], 1, send)
            head = {"content-type": "application/json"}
            client.request("POST", "/v1/completions", json.dumps(body), head)
            clients.append(client)
        if round_ % 2:
            until(partial(_has_begun, pair, clients, asked), pause_s=0.0)
        for client in clients:
            client.close()
        for i, answer in asked:
            assert token_ids(answer.result()) == expected[i]
    pair.settled()
    assert pair.decode.counter("host_copies_failed") == 0


def _has_begun(
    pair: HostPair,
    clients: list[http.client.HTTPConnection],
    asked: list[tuple[int, Future[Any]]],
) -> bool:
    """Requests run on decode, or all are over before a look at its metrics could show that."""
    sockets = [client.sock for client in clients]
    ended = len(select.select(sockets, [], [], 0)[0]) == len(sockets)
    if ended and all(answer.done() for _, answer in asked):
        return True
    return pair.decode.metrics()["vllm:kv_cache_usage_perc"] > 0


def test_weights_that_change_empty_host_memory(pair: HostPair) -> None:
    prompt = prompt_of(22, 6 * BLOCK + 1)
    pair.decode.complete(prompt, 1)
    pair.settled()
    assert pair.decode.metrics()["vllm:prefixkv_host_blocks"] > 0
    pair.decode.post("/reset_prefix_cache?reset_external=true", {})
    answer = pair.decode.complete(prompt, OUT)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    pair.settled()
    assert pair.decode.metrics()["vllm:prefixkv_host_blocks"] == 6


def test_prefill_is_killed(pair: HostPair) -> None:
    """What host memory has of a prompt need not be computed again, whatever became of prefill."""
    prompts = [prompt_of(800 + i, 9 * BLOCK + 3) for i in range(6)]
    expected = [pair.alone(prompt + prompt_of(23, 40)) for prompt in prompts]
    for prompt in prompts:
        assert token_ids(pair.ask(prompt).result())
    pair.settled()
    loaded = pair.decode.counter("host_loaded_blocks")
    asked = [pair.ask(prompt + prompt_of(23, 40)) for prompt in prompts]
    pair.prefill.kill()
    assert [token_ids(one.result()) for one in asked] == expected
    pair.settled()
    assert pair.decode.counter("host_loaded_blocks") > loaded
    after = prompts[0] + prompt_of(24, 50)
    first = pair.decode.complete(after, OUT)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] >= 9 * BLOCK
    pair.settled()
