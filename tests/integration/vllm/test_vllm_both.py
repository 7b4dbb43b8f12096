"""Two real vLLM servers that are each producer and consumer, where a load that fails is an error:
`kv_both` and `kv_load_failure_policy: fail`. And clients that leave at any moment.

As in `test_vllm`, tokens are compared with those that a server computes from nothing, in float32.
"""

from __future__ import annotations

import itertools
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import free_port
from benchmarks.vllm_servers import (
    MODEL,
    TINY,
    Server,
    make_model,
    token_ids,
    transfer_config,
)
from tests.integration.vllm.test_vllm import PYTHON, prompt_of, started, until

OUT = 8
BLOCK = 32  # tokens
ADAPTERS = ("adapter-1", "adapter-2")
SECONDS = {"control": {"connect_timeout_s": 2.0}}


class Both:
    """Servers 0 and 1."""

    def __init__(self, folder: Path) -> None:
        model = make_model(PYTHON, folder / "model", TINY)
        self.ports = [free_port(), free_port()]
        self.servers = [
            Server(
                PYTHON, model, folder / f"{i}.log",
                transfer_config("kv_both", f"node-{i}", self.ports[i], "fail", **SECONDS), chunk=64,
                more=[
                    "--enable-lora", "--max-lora-rank", "8", "--lora-modules",
                    *(f"{name}={model / name}" for name in ADAPTERS),
                ],
            )
            for i in range(2)
        ]  # fmt: skip
        self.threads = ThreadPoolExecutor(32)
        self.rooms = itertools.count(1)

    def params(self, source: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """For decode and for prefill, which is server `source`."""
        room, where = next(self.rooms), f"tcp://127.0.0.1:{self.ports[source]}"
        return (
            {"do_remote_prefill": True, "room": room, "prefill": where},
            {"do_remote_decode": True, "room": room, "decode": f"node-{1 - source}"},
        )

    def ask(self, source: int, prompt: list[int], **more: Any) -> list[int]:
        load, send = self.params(source)
        self.threads.submit(self.servers[source].complete, prompt, 1, send, **more)
        return token_ids(self.servers[1 - source].complete(prompt, OUT, load, **more))

    def alone(self, source: int, prompt: list[int], **more: Any) -> list[int]:
        salt = f"alone {next(self.rooms)}"
        return token_ids(self.servers[source].complete(prompt, OUT, cache_salt=salt, **more))

    def has_sent(self, num_bytes: int) -> None:
        """The first has sent this much in all; it says so with a step, which may be a later one."""
        until(lambda: self.servers[0].counter("bytes_sent") >= num_bytes)
        assert self.servers[0].counter("bytes_sent") == num_bytes

    def settled(self) -> None:
        until(lambda: [one.metrics()["vllm:kv_cache_usage_perc"] for one in self.servers] == [0, 0])

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        self.threads.shutdown()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with started(lambda: Both(tmp_path_factory.mktemp("vllm"))) as made:
        yield made


def test_each_sends_to_the_other(both: Both) -> None:
    for source in (0, 1, 0):
        before = [one.counter("bytes_sent") for one in both.servers]
        prompt = prompt_of(300 + source, 500)
        prompt[0] += source
        assert both.ask(source, prompt) == both.alone(source, prompt)
        both.settled()
        after = [one.counter("bytes_sent") for one in both.servers]
        assert after[1 - source] == before[1 - source]
    assert all(after), "each has sent"


def test_an_adapter_has_blocks_of_its_own(both: Both) -> None:
    """One prompt under the model and two LoRA adapters: nobody hits another's KV, on either side,
    and each finds its own again."""
    prompt = prompt_of(305, 10 * BLOCK + 3)
    said = []
    for name in (MODEL, *ADAPTERS):
        expected = both.alone(0, prompt, model=name)
        for blocks in (11, 1):  # the second time decode lacks the last, partial one
            before = both.servers[0].counter("bytes_sent")
            assert both.ask(0, prompt, model=name) == expected
            both.settled()
            both.has_sent(before + blocks * TINY.kv_bytes(BLOCK))
        said.append(expected)
    assert said[0] != said[1] != said[2] != said[0]


def test_a_load_that_fails_is_an_error(both: Both) -> None:
    """Nobody listens there. vLLM ends the request, the server goes on."""
    load, _ = both.params(0)
    load["prefill"] = f"tcp://127.0.0.1:{free_port()}"
    prompt = prompt_of(310, 300)
    with pytest.raises(urllib.error.HTTPError) as caught:
        both.servers[1].complete(prompt, OUT, load)
    with caught.value as answer:
        assert answer.code == 500
    both.settled()
    assert both.ask(0, prompt) == both.alone(0, prompt)
