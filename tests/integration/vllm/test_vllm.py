"""Two real vLLM servers with our connector, driven as a proxy drives them: both are asked at once.

Every token is compared with that of the prefill server alone, which computes the prompt under a
cache salt of its own: so from nothing, in float32.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env vllm`. Servers that do not
start are skipped aloud. The tests run in the order in which they stand: the last one kills.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

from benchmarks.serve import cpu_share
from benchmarks.servers import NotStartedError
from benchmarks.vllm_servers import TINY, Server, make_model, token_ids, transfer_config
from tests.support import patience
from tests.support.ports import free_port

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
until = partial(patience.until, pause_s=0.1)  # a look reads a server's metrics
BLOCK = 32  # tokens
OUT = 8
BLOCK_BYTES = TINY.kv_bytes(BLOCK)


class Pair:
    """The two servers, and a proxy's part. `connectors` are decode's options and prefill's,
    `of_both` and `of_decode` those of `Server`."""

    role, failure = "", "recompute"
    connectors: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    of_both: ClassVar[dict[str, Any]] = {"chunk": 64}
    of_decode: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path) -> None:
        self.folder, self.kv_port = folder, free_port()
        self.model = self.make_model(folder / "model")
        self._rooms = itertools.count(1)
        self._threads = ThreadPoolExecutor(32)
        self.prefill = self.start_prefill("prefill.log")
        self.decode = self._start("decode", "consumer", free_port(), "decode.log", **self.of_decode)

    def make_model(self, folder: Path) -> Path:
        return make_model(PYTHON, folder, TINY)

    def start_prefill(self, log: str) -> Server:
        return self._start("prefill", "producer", self.kv_port, log)

    def _start(self, side: str, role: str, kv_port: int, log: str, **more: Any) -> Server:
        connector = self.connectors[side == "prefill"]
        config = transfer_config(
            f"kv_{self.role or role}", f"{side}-0", kv_port, self.failure, **connector
        )
        options = self.of_both | more
        return Server(PYTHON, self.model, self.folder / log, config, **options)

    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """For decode and for prefill, of a new room."""
        room, where = next(self._rooms), f"tcp://127.0.0.1:{self.kv_port}"
        return (
            {"do_remote_prefill": True, "room": room, "prefill": where},
            {"do_remote_decode": True, "room": room, "decode": "decode-0"},
        )

    def start(self, server: Server, *args: Any, **more: Any) -> Future[Any]:
        return self._threads.submit(server.complete, *args, **more)

    def ask(self, prompt: list[int], num_tokens: int = OUT, **more: Any) -> Future[Any]:
        """Both at once; decode's answer."""
        load, send = self.params()
        self.start(self.prefill, prompt, 1, send, **more)
        return self.start(self.decode, prompt, num_tokens, load, **more)

    def alone(self, prompt: list[int], num_tokens: int = OUT, **more: Any) -> Future[Any]:
        """What one engine says, from nothing."""
        salt = f"alone {next(self._rooms)}"
        return self.start(self.prefill, prompt, num_tokens, cache_salt=salt, **more)

    def bytes_sent(self) -> int:
        return self.prefill.counter("bytes_sent")

    def has_sent(self, blocks: int, since: int) -> None:
        """Prefill has sent so many blocks since it had sent so many bytes. Its blocks are free
        before its counter says so: that comes with a step, which may be a later one."""
        until(lambda: self.bytes_sent() - since >= blocks * BLOCK_BYTES)
        assert self.bytes_sent() - since == blocks * BLOCK_BYTES

    def settled(self) -> None:
        """No server that lives has a block in use, or copies one."""
        names = "kv_cache_usage_perc", "prefixkv_host_copies", "prefixkv_held_blocks"

        def unused() -> bool:
            found = [one.metrics() for one in self.servers if one.process.poll() is None]
            return not any(one.get(f"vllm:{name}") for one in found for name in names)

        until(unused)

    def until_waiting(self) -> None:
        """Each server has a request that waits for the other server."""
        names = "loads_waiting", "sends_unpromised"
        for server, name in zip((self.decode, self.prefill), names, strict=True):
            until(lambda: server.metrics()[f"vllm:prefixkv_{name}"] == 1)  # noqa: B023

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode

    def close(self) -> None:
        self.decode.kill()
        self.prefill.kill()
        self._threads.shutdown()


class Started(Protocol):
    """Servers that have been started, and may not answer yet."""

    @property
    def servers(self) -> Sequence[Server]: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Started)


@contextmanager
def started(make: Callable[[], S]) -> Iterator[S]:
    """Servers that answer, until the block ends. Where vLLM does not start, the test is skipped."""
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is the interpreter of `benchmarks env vllm`"
    made = make()
    try:
        try:
            for server in made.servers:
                server.wait()
        except NotStartedError as error:
            pytest.skip(f"a vLLM server did not start: {error}")
        yield made
    finally:
        made.close()


class Operated(Pair):
    """Decode evicts by a policy, and has the methods for operators."""

    connectors = {"policy": "slru"}, {}
    of_decode: ClassVar[dict[str, Any]] = {
        "environment": {"VLLM_SERVER_DEV_MODE": "1"}, "chunk": 256,
        "more": ["--worker-extension-cls", "prefixkv.engines.vllm.extension.WorkerExtension"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with started(lambda: Operated(tmp_path_factory.mktemp("vllm"))) as made:
        yield made


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(10, 2000) for i in range(num_tokens)]


def test_three_conversations_of_three_turns(pair: Pair) -> None:
    """Each turn brings only what decode lacks, and the tokens are one engine's."""
    prompts = [prompt_of(seed, 300) for seed in range(3)]
    for turn in range(3):
        before = pair.bytes_sent()
        alone = [token_ids(one.result()) for one in [pair.alone(prompt) for prompt in prompts]]
        asked = [pair.ask(prompt) for prompt in prompts]
        answers = [token_ids(one.result()) for one in asked]
        assert answers == alone
        # Decode has whole blocks of the turn before and of its own output.
        num_tokens = len(prompts[0])
        cached = (num_tokens - 60 - 1) // BLOCK if turn else 0
        blocks = 3 * (-(-num_tokens // BLOCK) - cached)
        pair.has_sent(blocks, before)
        for i, prompt in enumerate(prompts):
            prompts[i] = prompt + answers[i] + prompt_of(100 * turn + i, 60)
    assert pair.decode.counter("requests_in_error") == 0
    pair.settled()


def test_a_working_set_that_is_too_large_for_decode(pair: Pair) -> None:
    """12 prompts of 30 blocks, 255 blocks: the policy names what goes, and no token is wrong."""
    prompts = [prompt_of(200 + i, 30 * BLOCK - 4) for i in range(12)]
    alone = [token_ids(pair.alone(prompt).result()) for prompt in prompts]
    for _ in range(2):
        for i in range(0, len(prompts), 2):
            asked = [pair.ask(prompt) for prompt in prompts[i : i + 2]]
            assert [token_ids(one.result()) for one in asked] == alone[i : i + 2]
    pair.settled()
    assert pair.decode.counter("evicted_by_policy") > 300
    assert pair.decode.counter("requests_in_error") == 0


def test_an_operator_can_ask_the_workers(pair: Pair) -> None:
    ask = {"method": "prefixkv_lost_peers"}
    assert pair.decode.post("/collective_rpc", ask) == {"results": [[]]}
    fence = {"method": "prefixkv_fence", "args": ["nobody", "1cfb77050b861fd8"]}
    assert pair.decode.post("/collective_rpc", fence) == {"results": [None]}
    prompt = prompt_of(85, 100)
    assert token_ids(pair.ask(prompt).result()) == token_ids(pair.alone(prompt).result())


def test_servers_that_only_wait_rest(pair: Pair) -> None:
    """While rooms and sends are pending; and prefill computes nothing of what waits. `python -m
    benchmarks serve` has the same of serve."""
    first, second = prompt_of(22, 440), prompt_of(23, 440)
    (load, send), (other_load, other_send) = pair.params(), pair.params()
    asked = [
        pair.start(pair.prefill, first, 1, send),
        pair.start(pair.decode, second, OUT, other_load),
    ]
    pair.until_waiting()
    assert pair.prefill.metrics()["vllm:kv_cache_usage_perc"] == 0
    time.sleep(3.0)  # workers of vLLM go on turning for a second after a step
    shares = [cpu_share(server.processes(), 10.0) for server in pair.servers]
    print("processor time of prefill and decode while both wait:", shares)
    assert max(shares) < 0.25  # of a server that polls it is more than all of one
    asked += [
        pair.start(pair.prefill, second, 1, other_send),
        pair.start(pair.decode, first, OUT, load),
    ]
    answers = [token_ids(one.result()) for one in asked]
    assert answers[1::2] == [token_ids(pair.alone(one).result()) for one in (second, first)]
    pair.settled()


def test_a_router_that_knows_nothing_of_rooms(pair: Pair) -> None:
    """What llm-d's sidecar does in its `nixlv2` form, and vLLM's toy proxy: prefill is asked with
    fields that are null, and decode with what prefill's answer says."""
    nulls = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    asks = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nulls)}
    prompt, cached = prompt_of(30, 100), []
    for turn in range(3):
        params = pair.prefill.complete(prompt, 1, asks)["kv_transfer_params"]
        params["room"] = int(float(params["room"]))  # as routers read numbers
        said = pair.decode.complete(prompt, OUT, params)
        assert token_ids(said) == token_ids(pair.alone(prompt).result())
        cached.append(said["kv_transfer_params"]["prefixkv"]["cached_tokens"])
        prompt = prompt + token_ids(said) + prompt_of(31 + turn, 30)
    assert cached == [0, 96, 128]
    pair.settled()


def test_prefill_is_killed_in_mid_transfer_and_comes_back(pair: Pair) -> None:
    """Decode computes the prompt itself and gets all its blocks back, on the kernel's word that the
    writer is dead; the restarted server is taken for a new one."""
    for seed in range(90, 190):
        prompt = prompt_of(seed, 3000)
        expected = token_ids(pair.alone(prompt).result())
        before = pair.bytes_sent()
        load, send = pair.params()
        pair.start(pair.prefill, prompt, 1, send)
        asked = pair.start(pair.decode, prompt, OUT, load)
        until(lambda: pair.bytes_sent() > before, pause_s=0.0)  # noqa: B023
        pair.prefill.signal(signal.SIGSTOP)
        # Had decode all of it, it would run or have answered by now: its engine has turned often,
        # in which it looks at what has come.
        time.sleep(1.0)
        for _ in range(2):
            pair.decode.complete(prompt_of(1000 + seed, 20), OUT)
        if pair.decode.metrics()["vllm:num_requests_running"] == 0 and not asked.done():
            break  # decode has a part of it, and waits for the rest
        pair.prefill.signal(signal.SIGCONT)
        assert token_ids(asked.result()) == expected
    pair.prefill.signal(signal.SIGKILL)
    answer = asked.result()
    assert token_ids(answer) == expected
    assert "error" in answer["kv_transfer_params"]["prefixkv"]
    until(lambda: pair.decode.metrics()["vllm:kv_cache_usage_perc"] == 0)
    assert pair.decode.counter("loads_failed") >= 1
    pair.prefill.kill()
    try:
        pair.prefill = pair.start_prefill("restarted.log")
        pair.prefill.wait()
    except NotStartedError:  # vLLM chooses ports long before it binds them
        pair.prefill.kill()
        pair.prefill = pair.start_prefill("restarted again.log")
        pair.prefill.wait()
    again = prompt + prompt_of(91, 100)
    assert token_ids(pair.ask(again).result()) == token_ids(pair.alone(again).result())
    assert pair.bytes_sent() > 0
    pair.settled()
