"""The order law between two real vLLM servers with small caches: whoever waits for the other side
holds nothing that the other side's progress may need. Each has 24 blocks, so that one prompt of 14
fits and two do not.
The servers are asked in both orders: with a room that a router has drawn, and as the routers of
NixlConnector do it, which know nothing of rooms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.ports import free_port
from benchmarks.serve import cpu_share
from benchmarks.vllm_servers import (
    Server,
    token_ids,
    transfer_config,
)
from tests.integration.vllm.test_vllm import OUT, PYTHON, Pair, prompt_of, started, until

BLOCKS, LONG = 25, 440  # one is vLLM's null block; tokens
SOON_S = 60.0  # far below every time-out of the product


class Small(Pair):
    """Two servers with few blocks, and whoever places requests on them."""

    def start_decode(self) -> Server:
        return self._start("decode.log", transfer_config("kv_consumer", "decode-0", free_port()))

    def start_prefill(self, log: str) -> Server:
        return self._start(log, transfer_config("kv_producer", "prefill-0", self.kv_port))

    def _start(self, log: str, config: dict[str, Any]) -> Server:
        return Server(
            PYTHON, self.model, self.folder / log, config, blocks=BLOCKS, chunk=128, max_len=736
        )

    def send(self, prompt: list[int], room: int) -> Future[Any]:
        params = {"do_remote_decode": True, "room": room, "decode": "decode-0"}
        return self.start(self.prefill, prompt, 1, params)

    def load(self, prompt: list[int], room: int) -> Future[Any]:
        where = f"tcp://127.0.0.1:{self.kv_port}"
        params = {"do_remote_prefill": True, "room": room, "prefill": where}
        return self.start(self.decode, prompt, OUT, params)

    def routed(self, prompt: list[int]) -> Any:
        """What llm-d's sidecar does in its `nixlv2` form, and vLLM's toy proxy: prefill is asked
        with fields that are null, and decode with what prefill's answer says."""
        nulls = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        asked = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nulls)}
        answer = self.prefill.complete(prompt, 1, asked)
        params = {  # a router may read whole numbers as doubles, and write these
            key: int(float(value)) if isinstance(value, int) and key == "room" else value
            for key, value in answer["kv_transfer_params"].items()
        }
        return self.decode.complete(prompt, OUT, params)

    def check(self, asked: list[tuple[list[int], Future[Any]]]) -> None:
        """Every answer comes, by no timer, and is right; nothing is held afterwards."""
        for prompt, answer in asked:
            said = answer.result(SOON_S)
            assert "error" not in ((said.get("kv_transfer_params") or {}).get("prefixkv") or {})
            assert token_ids(said) == token_ids(self.alone(prompt).result())
        self.settled()

    def gauge(self, server: Server, name: str) -> float:
        return server.metrics()[f"vllm:prefixkv_{name}"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    with started(lambda: Small(tmp_path_factory.mktemp("order"))) as made:
        yield made


def test_two_requests_that_come_in_other_orders(small: Small) -> None:
    """A is first at prefill and B at decode, and each side has room for one of them."""
    first, second = prompt_of(1, LONG), prompt_of(2, LONG)
    sends = [small.send(first, 101)]
    loads = [small.load(second, 102)]
    until(lambda: small.gauge(small.prefill, "sends_unpromised") == 1)
    until(lambda: small.gauge(small.decode, "loads_waiting") == 1)
    assert small.prefill.metrics()["vllm:kv_cache_usage_perc"] == 0, "it has computed nothing"
    sends.append(small.send(second, 102))
    loads.append(small.load(first, 101))
    small.check([(second, loads[0]), (first, loads[1])])
    for send in sends:
        assert len(token_ids(send.result(SOON_S))) == 1


def test_a_server_that_only_waits_rests(small: Small) -> None:
    """While rooms and sends are pending. `python -m benchmarks serve` has the same of serve."""
    send, load = small.send(prompt_of(22, LONG), 601), small.load(prompt_of(23, LONG), 602)
    until(lambda: small.gauge(small.prefill, "sends_unpromised") == 1)
    until(lambda: small.gauge(small.decode, "loads_waiting") == 1)
    time.sleep(3.0)  # workers of vLLM go on turning for a second after a step
    shares = [cpu_share(server.processes(), 10.0) for server in small.servers]
    print("processor time of prefill and decode while both wait:", shares)
    assert max(shares) < 0.25  # of a server that polls it is more than all of one
    small.send(prompt_of(23, LONG), 602)
    small.load(prompt_of(22, LONG), 601)
    assert len(token_ids(load.result(SOON_S))) == OUT
    assert len(token_ids(send.result(SOON_S))) == 1
    small.settled()


# --- rooms that prefill draws itself --------------------------------------------------------------


def test_a_router_that_knows_nothing_of_rooms(small: Small) -> None:
    """Three turns: right tokens, hits on decode, and nothing is held at the end."""
    prompt = prompt_of(30, 100)
    loaded = []
    for turn in range(3):
        said = small.routed(prompt)
        assert token_ids(said) == token_ids(small.alone(prompt).result())
        loaded.append(said["kv_transfer_params"]["prefixkv"]["cached_tokens"])
        prompt = prompt + token_ids(said) + prompt_of(31 + turn, 30)
    assert loaded[0] == 0
    assert loaded[1] >= 96
    assert loaded[2] > loaded[1]
    small.settled()


def test_both_orders_at_once(small: Small) -> None:
    asked = []
    for i in range(8):
        prompt = prompt_of(40 + i, 380 + 17 * i)
        if i % 2:
            asked.append((prompt, small._threads.submit(small.routed, prompt)))
        else:
            small.send(prompt, 700 + i)
            asked.append((prompt, small.load(prompt, 700 + i)))
    for prompt, answer in asked:  # an offer may have been withdrawn for a promised one
        assert token_ids(answer.result(SOON_S)) == token_ids(small.alone(prompt).result())
    until(lambda: small.gauge(small.prefill, "offers_open") == 0)
    small.settled()
