"""Host memory behind vLLM's blocks: two real servers, decode with so few blocks that the turns of a
conversation evict each other. Every token is compared with that of the prefill server alone, which
computes the prompt under a cache salt of its own.

The tests run in the order in which they stand: the last one kills prefill.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from benchmarks.vllm_servers import token_ids
from tests.integration.vllm.test_vllm import BLOCK, OUT, Pair, prompt_of, started, until
from tests.support.ports import free_port

DECODE_BLOCKS = 41  # one is vLLM's null block
FIRST, MORE = 300, 60  # tokens of a conversation's first turn, and what each later one adds


class HostPair(Pair):
    """Decode has host memory and few blocks."""

    connectors = {"host_memory": "16x"}, {}

    def __init__(self, folder: Path) -> None:
        self.events_port = free_port()
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
            "endpoint": f"tcp://*:{self.events_port}",
        }  # fmt: skip
        said = ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
        self.of_decode = {"blocks": DECODE_BLOCKS, "chunk": 256, "max_len": 1024, "more": said}
        super().__init__(folder)


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
            sent, loaded = pair.bytes_sent(), pair.decode.counter("host_loads")
            expected = token_ids(pair.alone(prompt).result())
            answer = pair.ask(prompt).result()
            assert token_ids(answer) == expected
            told = answer["kv_transfer_params"]["prefixkv"]
            # Decode has, or had, whole blocks of the turn before and of its own output.
            had = (len(prompt) - MORE - 1) // BLOCK if turn else 0
            assert told["cached_tokens"] == had * BLOCK
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == had * BLOCK
            blocks = -(-len(prompt) // BLOCK) - had
            pair.settled()
            pair.has_sent(blocks, sent)
            if turn:
                assert told["host_tokens"] > 0
                assert pair.decode.counter("host_loads") == loaded + 1
            prompts[i] = prompt + token_ids(answer) + prompt_of(100 * turn + i, MORE)
    assert pair.decode.counter("host_missed_blocks") == 0
    assert pair.decode.metrics()["vllm:prefixkv_host_blocks"] > DECODE_BLOCKS


def test_cache_events_say_what_is_in_host_memory(pair: HostPair) -> None:
    """By vLLM's own publisher: the blocks of a prompt in its pool, and then in host memory too."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        socket.connect(f"tcp://127.0.0.1:{pair.events_port}")
        stored: dict[str, list[Any]] = {"GPU": [], "CPU": []}
        keys: dict[str, list[Any]] = {"GPU": [], "CPU": []}
        prompt = prompt_of(26, 5 * BLOCK)
        its_own = [prompt[at : at + BLOCK] for at in range(0, len(prompt), BLOCK)]

        def hear() -> bool:
            while socket.poll(50):
                _, _, payload = socket.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    # Others may be of what was asked for before, and come late.
                    if event["type"] == "BlockStored" and event["token_ids"][:BLOCK] in its_own:
                        stored[event["medium"]] += event["token_ids"]
                        keys[event["medium"]] += event["extra_keys"]
            return stored["CPU"] == stored["GPU"] == prompt

        def is_connected() -> bool:
            """A subscriber hears nothing of before it is connected."""
            pair.decode.complete(prompt_of(27, BLOCK), 1, cache_salt=f"{time.monotonic()}")
            return bool(socket.poll(100))

        until(is_connected)
        pair.decode.complete(prompt, 1, cache_salt="a tenant")
        until(hear)
        assert keys["CPU"] == keys["GPU"] == [["a tenant"], *[None] * 4]


def test_prefill_is_killed(pair: HostPair) -> None:
    """What host memory has of a prompt need not be computed again, whatever became of prefill."""
    prompts = [prompt_of(800 + i, 9 * BLOCK + 3) for i in range(6)]
    alone = [pair.alone(prompt + prompt_of(23, 40)) for prompt in prompts]
    expected = [token_ids(one.result()) for one in alone]
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
