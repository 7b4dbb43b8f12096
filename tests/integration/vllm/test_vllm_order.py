"""The order law between two real vLLM servers with small caches: whoever waits for the other side
holds nothing that the other side's progress may need. Each has 24 blocks, so that one prompt of 14
fits and two do not.
The servers are asked in both orders: with a room that a router has drawn, and as the routers of
NixlConnector do it, which know nothing of rooms.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import free_port
from benchmarks.serve import cpu_share
from benchmarks.vllm_servers import (
    MODEL,
    TINY,
    Server,
    make_model,
    token_ids,
    transfer_config,
)
from tests.integration.vllm.test_vllm import PYTHON, prompt_of, started, until

BLOCKS, LONG, OUT = 25, 440, 8  # one is vLLM's null block; tokens
SOON_S = 60.0  # far below every time-out of the product


class Small:
    """Two servers, and whoever places requests on them."""

    def __init__(self, folder: Path) -> None:
        model = make_model(PYTHON, folder / "model", TINY)
        self.kv_port = free_port()
        self.threads = ThreadPoolExecutor(32)
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        for side, role in roles.items():
            port = self.kv_port if side == "prefill" else free_port()
            config = transfer_config(role, f"{side}-0", port)
            log = folder / f"{side}.log"
            server = Server(
                PYTHON, model, log, config, blocks=BLOCKS, chunk=128, max_len=736,
                more=["--enable-prompt-tokens-details"],
            )  # fmt: skip
            setattr(self, side, server)

    prefill: Server
    decode: Server

    @property
    def where(self) -> str:
        return f"tcp://127.0.0.1:{self.kv_port}"

    def send(self, prompt: list[int], room: int) -> Future[Any]:
        params = {"do_remote_decode": True, "room": room, "decode": "decode-0"}
        return self.threads.submit(self.prefill.complete, prompt, 1, params)

    def load(self, prompt: list[int], room: int) -> Future[Any]:
        params = {"do_remote_prefill": True, "room": room, "prefill": self.where}
        return self.threads.submit(self.decode.complete, prompt, OUT, params)

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

    def alone(self, prompt: list[int]) -> list[int]:
        """What one engine says, from nothing."""
        return token_ids(self.prefill.complete(prompt, OUT, cache_salt=f"alone {time.monotonic()}"))

    def check(self, asked: list[tuple[list[int], Future[Any]]]) -> None:
        """Every answer comes, by no timer, and is right; nothing is held afterwards."""
        for prompt, answer in asked:
            said = answer.result(SOON_S)
            assert "error" not in ((said.get("kv_transfer_params") or {}).get("prefixkv") or {})
            assert token_ids(said) == self.alone(prompt)
        self.settled()

    def settled(self) -> None:
        until(lambda: all(s.metrics()["vllm:kv_cache_usage_perc"] == 0 for s in self.servers))

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def gauge(self, server: Server, name: str) -> float:
        return server.metrics()[f"vllm:prefixkv_{name}"]

    def close(self) -> None:
        self.decode.kill()
        self.prefill.kill()
        self.threads.shutdown()


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


def test_a_request_that_waits_for_anothers_load(small: Small) -> None:
    """B brings A's first blocks, so decode lets A wait for it; prefill has room for one."""
    first = prompt_of(3, LONG)
    second = first[:64] + prompt_of(4, LONG - 64)
    small.send(first, 201)
    loads = [small.load(second, 202)]
    until(lambda: small.gauge(small.decode, "loads_waiting") == 1)
    small.send(second, 202)
    loads.append(small.load(first, 201))
    small.check([(second, loads[0]), (first, loads[1])])


def test_many_at_once_in_any_order(small: Small) -> None:
    for turn in range(3):
        prompts = [prompt_of(1000 * turn + i, 380 + 17 * i) for i in range(6)]
        asked = []
        for i, prompt in enumerate(prompts):
            room = 300 + 10 * turn + i
            if i % 2:
                small.send(prompt, room)
            asked.append((prompt, small.load(prompt, room)))
            if not i % 2:
                small.send(prompt, room)
        small.check(asked)


def test_a_send_that_decode_does_not_want_is_not_computed(small: Small) -> None:
    """Decode has the whole prompt already and refuses the room: prefill's answer says so."""
    prompt = prompt_of(20, 40)
    computed = small.prefill.metrics()["vllm:prompt_tokens_total"]
    send = small.send(prompt, 401)
    until(lambda: small.gauge(small.prefill, "sends_unpromised") == 1)
    client = http.client.HTTPConnection("127.0.0.1", small.decode.port)
    load = {"do_remote_prefill": True, "room": 401, "prefill": small.where}
    # Another model: vLLM refuses it before its engine sees it, and tells connectors.
    body = {"model": "unknown", "prompt": prompt, "kv_transfer_params": load}
    head = {"content-type": "application/json"}
    client.request("POST", "/v1/completions", json.dumps(body), head)
    assert client.getresponse().status == 404
    client.close()
    said = send.result(SOON_S)
    (choice,) = said["choices"]
    assert choice["finish_reason"] == "abort"
    assert not choice["text"]
    assert "decode" in said["kv_transfer_params"]["prefixkv"]["error"]
    assert small.prefill.metrics()["vllm:prompt_tokens_total"] == computed
    small.settled()


def test_the_client_of_a_send_leaves(small: Small) -> None:
    client = http.client.HTTPConnection("127.0.0.1", small.prefill.port)
    params = {"do_remote_decode": True, "room": 501, "decode": "decode-0"}
    body = {"model": MODEL, "prompt": prompt_of(21, LONG), "kv_transfer_params": params}
    head = {"content-type": "application/json"}
    client.request("POST", "/v1/completions", json.dumps(body), head)
    until(lambda: small.gauge(small.prefill, "sends_unpromised") == 1)
    client.close()
    until(lambda: small.gauge(small.prefill, "sends_unpromised") == 0)


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
        assert token_ids(said) == small.alone(prompt)
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
            asked.append((prompt, small.threads.submit(small.routed, prompt)))
        else:
            small.send(prompt, 700 + i)
            asked.append((prompt, small.load(prompt, 700 + i)))
    for prompt, answer in asked:  # an offer may have been withdrawn for a promised one
        assert token_ids(answer.result(SOON_S)) == small.alone(prompt)
    until(lambda: small.gauge(small.prefill, "offers_open") == 0)
    small.settled()


def test_an_offer_is_let_go_of_for_a_promised_request(small: Small) -> None:
    """Its decode server never comes, and 24 blocks do not hold both prompts."""
    offered = small.prefill.complete(prompt_of(60, LONG), 1, {"do_remote_decode": True})
    assert offered["kv_transfer_params"]["do_remote_prefill"] is True
    assert small.gauge(small.prefill, "offers_open") == 1
    before = small.prefill.counter("offers_withdrawn")
    prompt = prompt_of(61, LONG)
    small.send(prompt, 801)
    small.check([(prompt, small.load(prompt, 801))])
    assert small.prefill.counter("offers_withdrawn") == before + 1
    late = small.decode.complete(prompt_of(60, LONG), OUT, offered["kv_transfer_params"])
    assert "needs the blocks" in late["kv_transfer_params"]["prefixkv"]["error"]
    assert token_ids(late) == small.alone(prompt_of(60, LONG))
    small.settled()


def test_a_stranger_without_the_nonce_does_not_open_the_room(small: Small) -> None:
    prompt = prompt_of(62, 100)
    offered = small.prefill.complete(prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
    guessed = small.decode.complete(prompt, OUT, offered | {"nonce": "0" * 32})
    assert "prove" in guessed["kv_transfer_params"]["prefixkv"]["error"]
    known = small.decode.complete(prompt, OUT, offered | {"cache_salt": None})
    assert token_ids(known) == token_ids(guessed) == small.alone(prompt)
    with suppress(KeyError):
        assert not known["kv_transfer_params"]["prefixkv"]["error"]
    small.settled()


def test_choices_of_one_prompt_share_a_room(small: Small) -> None:
    """Of two choices on prefill one is offered; vLLM answers with either."""
    prompt = prompt_of(63, 100)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "n": 2, "temperature": 1.0}
    said = small.prefill.post(
        "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}}
    )
    assert small.gauge(small.prefill, "offers_open") == 1
    answer = small.decode.complete(prompt, OUT, said["kv_transfer_params"])
    assert token_ids(answer) == small.alone(prompt)
    assert answer["kv_transfer_params"]["prefixkv"]["loaded_tokens"] == 100
    small.settled()


def test_a_prompt_that_decode_refuses_ends_its_offer(small: Small) -> None:
    offered = small.prefill.complete(prompt_of(64, 100), 1, {"do_remote_decode": True})
    body = {
        "model": "unknown", "prompt": prompt_of(64, 100),
        "kv_transfer_params": offered["kv_transfer_params"],
    }  # fmt: skip
    with pytest.raises(OSError, match="404"):
        small.decode.post("/v1/completions", body)
    small.settled()


def test_usage_counts_what_was_cached_on_decode(small: Small) -> None:
    """vLLM itself would say of a cold prompt that all but one token were cached."""
    prompt = prompt_of(65, 100)
    for room, cached in ((901, 0), (902, 96)):
        load = small.load(prompt, room)
        small.send(prompt, room)
        usage = load.result(SOON_S)["usage"]
        assert usage["prompt_tokens"] == 100
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    small.settled()
