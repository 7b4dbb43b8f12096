"""Host memory behind vLLM's blocks: whole requests in the stand-ins, which look at the KV of each
token, and what each part of it decides by itself."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv import HostConfig, KVPool
from prefixkv.cache.radix_key import RadixKey
from prefixkv.engines.vllm.blocks import Holds
from prefixkv.engines.vllm.host import DeviceBlocks, HostBlocks, key_of
from prefixkv.engines.vllm.options import ServerSetup
from prefixkv.engines.vllm.orders import CopyOrder, WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.worker import WorkerHost
from prefixkv.memory.page_copy import CpuPageCopy
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.spi import HostMemory, Inbox
from tests.support.gates import Gate
from tests.support.patience import until
from tests.unit.engines.vllm.conftest import MakeServers, Servers
from tests.unit.engines.vllm.standin import BLOCK, BlockPool, Engine, Request, side_of, step_of
from tests.unit.engines.vllm.test_transfers import blocks_sent, error_of

PROMPT = list(range(100, 130))  # 7 blocks and a half
SMALL = {"num_blocks": 14, "host_memory": "8x"}
DEREF = SimpleNamespace(action_type="kv.deref", action_version="1.0", payload={})
OTHERS = [list(range(200 + 40 * i, 240 + 40 * i)) for i in range(2)]  # 10 blocks each


def run(engine: Engine, rid: str, tokens: Sequence[int], **more: Any) -> Request:
    """A request that is asked of decode alone, to its end."""
    request = Request(rid, tokens, **more)
    engine.add(request)
    until(lambda: rid in engine.outputs, step=engine.step)
    until(lambda: engine.idle, step=engine.step)
    assert engine.wrong_tokens(request, 0) == 0
    return request


def evict(engine: Engine) -> None:
    """Others' prompts take all blocks."""
    for i, tokens in enumerate(OTHERS):
        run(engine, f"other {i}", tokens, cache_salt=f"{len(engine.orders)}")
    engine.scheduler.take_counts()


def left(servers: Servers, tokens: Sequence[int]) -> Engine:
    """Decode's engine: a prompt is in its host memory, and not in its blocks."""
    run(servers.decode, "1", tokens)
    evict(servers.decode)
    return servers.decode


def host_of(engine: Engine) -> HostBlocks:
    return engine.scheduler.host


# --- whole requests -------------------------------------------------------------------------------


@pytest.fixture
def small(make_servers: MakeServers) -> Servers:
    """Decode has 14 blocks, and eight times as many in host memory."""
    return make_servers(decode=SMALL)


def test_prefill_sends_only_what_host_memory_has_not(small: Servers) -> None:
    """The prompt of the second turn is loaded and sent at once, by one load for vLLM."""
    small.ask("1", PROMPT)
    small.until_ended("1")
    small.settle()
    evict(small.decode)
    sent = blocks_sent(small)
    second = small.ask("2", PROMPT + list(range(10)))
    small.until_ended("2")
    assert second.loaded_from == 0
    assert second.answer == {
        "prefixkv": {"room": 2, "loaded_tokens": 12, "cached_tokens": 28, "host_tokens": 28}
    }
    assert small.decode.wrong_tokens(second, 40) == 0
    assert blocks_sent(small) == sent + 3
    small.settle()
    counts = small.decode.scheduler.take_counts()
    assert counts == {
        "host_loads": 1, "host_loaded_blocks": 7, "host_written_blocks": 3, "loads_done": 1,
    }  # fmt: skip


def test_a_request_without_prefill_loads_and_computes_the_rest(small: Servers) -> None:
    decode = left(small, PROMPT)
    again = run(decode, "2", PROMPT)
    assert (again.loaded_from, again.loaded_to) == (0, 28)
    assert decode.scheduler.take_counts()["host_loaded_blocks"] == 7
    # From vLLM's own cache, now; and another salt has nothing of it.
    assert run(decode, "3", PROMPT).loaded_from is None
    assert run(decode, "4", PROMPT, cache_salt="x").loaded_from is None
    small.settle()


@pytest.mark.parametrize(
    ("more", "written"),
    [
        ({"params": {"hints": {"ends": True}}}, 0),
        ({"kv_hints": SimpleNamespace(actions=[DEREF])}, 0),
        ({"params": {"hints": {"returns_after": 30}}, "session_id": "s"}, 7),
        ({"params": {"hints": {"ends": "yes"}}}, 7),
    ],
)  # fmt: skip
def test_of_a_session_that_has_ended_nothing_is_written(
    small: Servers, more: dict[str, Any], written: int
) -> None:
    request = run(small.decode, "1", PROMPT, **more)
    small.settle()
    counts = small.decode.scheduler.take_counts()
    assert counts.get("host_written_blocks", 0) == written
    if counts.get("requests_in_error"):
        assert "`ends`" in error_of(request)


def test_what_is_left_behind_host_memory_may_be_computed_here(make_servers: MakeServers) -> None:
    """12 tokens are missing behind 28 that are loaded: prefill's room is refused, uncomputed."""
    servers = make_servers(decode=SMALL | {"compute_below": 16})
    left(servers, PROMPT)
    load, send = servers.requests("2", PROMPT + list(range(10)))
    servers.decode.add(load)
    servers.prefill.add(send)
    servers.until_ended("2")
    assert load.answer == {
        "prefixkv": {"room": 1, "loaded_tokens": 0, "cached_tokens": 28, "host_tokens": 28}
    }
    servers.settle()
    assert send.computed == 0
    counts = servers.decode.scheduler.take_counts()
    assert (counts["computed_requests"], counts["computed_tokens"]) == (1, 12)


def test_what_prefill_sends_sooner_is_not_loaded(small: Servers) -> None:
    """By what the last loads and transfers took."""
    for i in range(4):
        small.ask(f"measured {i}", [7000 + 100 * i + j for j in range(12)])
        small.until_ended(f"measured {i}")
    small.settle()
    left(small, PROMPT)
    host_of(small.decode).load_s = lambda num_blocks: 1e6  # type: ignore[method-assign]
    slow = small.ask("2", [*PROMPT, 1])
    small.until_ended("2")
    assert slow.answer is not None
    assert slow.answer["prefixkv"]["host_tokens"] == 0
    assert slow.answer["prefixkv"]["loaded_tokens"] == 31
    small.settle()


def test_requests_that_lack_the_same_blocks_load_them_once(small: Servers) -> None:
    decode = left(small, PROMPT[:16])
    requests = [Request(f"{i}", [*PROMPT[:16], 900 + i]) for i in range(3)]
    for request in requests:
        decode.add(request)
    until(lambda: all(one.request_id in decode.outputs for one in requests), step=decode.step)
    assert [one.loaded_from for one in requests] == [0, None, None]
    assert [decode.wrong_tokens(one, 0) for one in requests] == [0, 0, 0]
    small.settle()
    counts = decode.scheduler.take_counts()
    assert (counts["host_loads"], counts["flights_joined"]) == (1, 2)


class HeldCopies:
    """The workers' copies wait until they are let go, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = True
        self.fails = False
        for name in ("load", "write"):
            monkeypatch.setattr(CpuPageCopy, name, self._held(getattr(CpuPageCopy, name)))

    def _held(self, original: Callable[..., None]) -> Callable[..., None]:
        def copy(*args: Any) -> None:
            until(lambda: self.is_open)
            if self.fails:
                raise OSError("broken off")
            original(*args)

        return copy


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    return HeldCopies(monkeypatch)


def test_a_block_is_not_free_before_it_is_written(small: Servers, copies: HeldCopies) -> None:
    decode = small.decode
    copies.is_open = False
    decode.add(Request("1", PROMPT))
    until(lambda: "1" in decode.outputs, step=decode.step)
    assert decode.num_used == decode.scheduler.holds.num_blocks == 7
    assert host_of(decode).is_writing
    assert decode.scheduler.busy
    # Another finds 7 free blocks, and waits for the others.
    decode.add(Request("2", OTHERS[0]))
    for _ in range(20):
        decode.step()
    assert "2" not in decode.outputs
    copies.is_open = True
    until(lambda: "2" in decode.outputs, step=decode.step)
    small.settle()
    assert not host_of(decode).is_writing


def test_a_client_leaves_while_its_blocks_are_loaded(small: Servers, copies: HeldCopies) -> None:
    """They stay its own until the copy has ended; another request may load the same meanwhile."""
    decode = left(small, PROMPT[:16])
    copies.is_open = False
    decode.add(Request("2", PROMPT[:17]))
    until(lambda: "2" in decode.loading, step=decode.step)
    decode.abort("2")
    for _ in range(10):
        decode.step()
    assert decode.num_used == 5
    decode.add(Request("3", PROMPT[:18]))
    until(lambda: "3" in decode.loading, step=decode.step)
    copies.is_open = True
    until(lambda: "3" in decode.outputs, step=decode.step)
    assert decode.outputs["3"].status == "done"
    small.settle()
    assert host_of(decode)._loads == {}


def test_an_id_that_comes_again_waits_for_no_copy_of_the_former(
    small: Servers, copies: HeldCopies
) -> None:
    """Its copy would end twice, and the request with the first of them."""
    decode = left(small, PROMPT[:16])
    copies.is_open = False
    decode.add(Request("2", PROMPT[:17]))
    until(lambda: "2" in decode.loading, step=decode.step)
    decode.abort("2")
    del decode.outputs["2"]
    decode.add(again := Request("2", PROMPT[:17]))
    until(lambda: "2" in decode.outputs, step=decode.step)
    assert (again.status, again.loaded_from) == ("done", None)
    copies.is_open = True
    until(lambda: not decode.left, step=decode.step)
    small.settle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails_is_not_tried_again(
    make_servers: MakeServers, copies: HeldCopies, policy: str
) -> None:
    """It is computed, or its request ends, as vLLM's `kv_load_failure_policy` says."""
    servers = make_servers(decode=SMALL | {"policy": policy})
    decode = left(servers, PROMPT)
    copies.fails = True
    decode.add(again := Request("2", PROMPT))
    until(lambda: "2" in decode.outputs, step=decode.step)
    assert again.recomputed is (policy == "recompute")
    assert again.status == ("done" if again.recomputed else "FINISHED_ERROR")
    copies.fails = False
    servers.settle()
    assert host_of(decode)._barred == set()
    counts = decode.scheduler.take_counts()
    assert counts["host_loads"] == 1
    assert counts["host_copies_failed"] >= 1
    if again.recomputed:
        assert "host memory: broken off" in error_of(again)
        assert counts["requests_in_error"] == 1


def test_a_request_that_asks_no_prefill_server_does_not_wait_for_one(small: Servers) -> None:
    """Another has loaded the same blocks, and waits for prefill, which is never asked."""
    decode = left(small, PROMPT[:16])
    load, _ = small.requests("2", PROMPT)
    decode.add(load)
    until(lambda: host_of(decode).num_copies == 0 and "2" in decode.loading, step=decode.step)
    decode.add(plain := Request("3", PROMPT[:18]))
    until(lambda: "3" in decode.outputs, step=decode.step)
    assert (plain.loaded_from, plain.loaded_to) == (0, 16)
    assert "2" in decode.loading
    decode.abort("2")
    until(lambda: not decode.left, step=small.step)
    small.settle()


@pytest.mark.parametrize("moves", ["flush", "move_weights"])
def test_new_weights_empty_host_memory(small: Servers, copies: HeldCopies, moves: str) -> None:
    """A load under way fails; a write under way is not entered behind it."""
    decode = left(small, PROMPT[:16])
    copies.is_open = False
    decode.add(loading := Request("2", PROMPT[:17]))
    until(lambda: "2" in decode.loading, step=decode.step)
    decode.add(Request("3", OTHERS[0][:9]))
    until(lambda: "3" in decode.outputs, step=decode.step)
    assert len(host_of(decode).loading) == 1
    assert host_of(decode).num_copies == 2
    if moves == "flush":
        decode.scheduler.flush()
    else:
        decode.scheduler.move_weights("1")
    assert host_of(decode).num_blocks == 0
    decode.step()
    copies.is_open = True
    until(lambda: "2" in decode.outputs, step=decode.step)
    assert loading.recomputed
    assert "reset" in error_of(loading)
    until(lambda: decode.idle, step=decode.step)
    # Only what was computed behind it: the blocks of "2".
    assert host_of(decode).num_blocks == 4


# --- the scheduler's side -------------------------------------------------------------------------


def hashes(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def test_a_block_that_vllm_has_given_away_is_not_found() -> None:
    pool = BlockPool(8)
    holds = Holds()
    holds.pool = pool
    device = DeviceBlocks(holds)
    blocks = pool.new_blocks(3) or []
    for block, one in zip(blocks, hashes(1, 2, 3), strict=True):
        pool.cache(block, one)
    path = key_of(hashes(1, 2, 3))
    device.leave(path, [0, 1, 2])
    assert device.find(path).blocks == [0, 1, 2]
    assert device.find(path).unprotected_pages == 0
    with device.ending([0, 1]):
        assert device.available_pages == 5 + 2
        assert device.find(path).unprotected_pages == 2
    pool.free_blocks(blocks)
    assert device.find(path).unprotected_pages == 3
    # Another request has computed something else there, and vLLM has cached that.
    pool.cached.pop(blocks[1].block_hash or b"")
    blocks[1].block_hash = hashes(9)[0]
    assert device.find(path).blocks == [0]
    assert device.find(key_of(hashes(1, 2))).blocks == [0]
    device.leave(key_of(hashes(9)), [1])
    assert device.find(key_of(hashes(9))).blocks == [1]
    assert device.find(key_of(hashes(4))).blocks == []
    lock = device.pin_key(key_of(hashes(1)), 0.0)
    assert (pool.blocks[0].ref_cnt, lock.pages.tolist(), lock.held) == (1, [0], True)
    device.unpin(lock)
    assert (pool.blocks[0].ref_cnt, lock.held) == (0, False)
    device.flush()
    assert device.find(path).blocks == []
    assert device.epoch == 1


def test_equal_names_are_equal_hashes_and_no_token_is_negative() -> None:
    one, other = key_of([b"\xff" * 32]), key_of([b"\xff" * 15 + b"\xfe" + b"\xff" * 16])
    assert RadixKey(one.tokens()).data == one.data
    assert len(one) == 4
    assert one.data != other.data
    assert len(key_of([b"short"])) == 4


def two_ranks() -> tuple[SchedulerSide, BlockPool]:
    return side_of(ServerSetup(False, True, 2), num_blocks=32, host_memory="4x")


def finished(side: SchedulerSide, pool: BlockPool, rid: str, **more: Any) -> Request:
    request = Request(rid, [int(rid), *PROMPT[:15]], **more)
    side.on_new_request(request)
    blocks = pool.new_blocks(4) or []
    side.allocated(request, ([one.block_id for one in blocks],), 0)
    request.computed = 16
    for block, one in zip(blocks, request.block_hashes, strict=True):
        pool.cache(block, one)
    side.finished(request, [one.block_id for one in blocks])
    pool.free_blocks(blocks)
    side.check_invariants()
    return request


def test_what_one_rank_has_not_copied_is_not_there() -> None:
    side, pool = two_ranks()
    side.take_reports(WorkerReport(host_pages={0: (60, 60), 1: (60, 60)}), [])
    finished(side, pool, "1")
    (order,) = side.orders(step_of()).copies
    ends = [
        HostCopyDone(order.copy.number, error, 100, 0.1) for error in (OSError("broken off"), None)
    ]
    side.take_reports(WorkerReport(copied=ends), [])
    assert (side.host.num_blocks, side.holds.num_blocks) == (0, 0)
    assert side.take_counts()["host_copies_failed"] == 1
    side.check_invariants()


def test_cache_events_follow_what_is_in_host_memory() -> None:
    """Against a set of hashes; each block has its tokens, and its parent is there."""
    setup = ServerSetup(False, True, publishes=True)
    side, pool = side_of(setup, num_blocks=16, host_memory="4x", host_policy="lru")
    side.take_reports(WorkerReport(host_pages={0: (10, 10)}), [])
    there: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def hear() -> None:
        for event in side.host.take_events():
            if not event.is_stored:
                for one in event.hashes:
                    del there[one]
                continue
            parent = event.blocks[0].parent
            for i, one in enumerate(event.hashes):
                assert one not in there
                assert parent is None or parent in there
                there[one] = parent, event.tokens[i * BLOCK : (i + 1) * BLOCK]
                parent = one
            assert len(event.tokens) == len(event.hashes) * BLOCK

    for rid in ("1", "2", "3", "1", "4"):
        request = finished(side, pool, rid)
        pool.cached.clear()
        for block in pool.blocks:
            block.block_hash = None
        for copy, _ in side.orders(step_of()).copies:
            side.take_reports(WorkerReport(copied=[HostCopyDone(copy.number, None, 1, 0.1)]), [])
        hear()
        assert len(there) == side.gauges()["host_blocks"]
        last: bytes | None = None
        for i, one in enumerate(request.block_hashes):
            assert there[one] == (last, request.all_token_ids[i * BLOCK : (i + 1) * BLOCK])
            last = one
    assert len(there) == 10
    side.flush()
    hear()
    assert there == {}


def test_cache_events_say_what_tells_a_block_apart_beside_its_tokens() -> None:
    """Else a router takes one tenant's blocks, or another image's, for those of a plain prompt."""
    setup = ServerSetup(False, True, publishes=True)
    side, pool = side_of(setup, num_blocks=16, host_memory="4x")
    side.take_reports(WorkerReport(host_pages={0: (10, 10)}), [])
    adapter = SimpleNamespace(adapter_id=7, name="legal", lora_name="legal")
    places = [SimpleNamespace(offset=offset, length=6) for offset in (3, 12)]
    images = [SimpleNamespace(identifier=f"at {at.offset}", mm_position=at) for at in places]
    told: list[list[Any]] = []
    for rid, more in (
        ("1", {"cache_salt": "s", "lora_request": adapter, "mm_features": images}), ("2", {})
    ):  # fmt: skip
        finished(side, pool, rid, **more)
        (order,) = side.orders(step_of()).copies
        done = HostCopyDone(order.copy.number, None, 1, 0.1)
        side.take_reports(WorkerReport(copied=[done]), [])
        (event,) = side.host.take_events()
        told.append([(block.adapter, block.extra_keys) for block in event.blocks])
    assert told == [
        [
            (adapter, ("legal", ("at 3", 3), "s")),
            (adapter, ("legal", ("at 3", -1))),
            (adapter, ("legal", ("at 3", -5))),
            (adapter, ("legal", ("at 12", 0))),
        ],
        [(None, None)] * 4,
    ]


# --- the worker's side ----------------------------------------------------------------------------


def test_a_worker_whose_copies_do_not_start_gives_its_host_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    def fails(self: HostMemory, sink: object) -> None:
        raise RuntimeError("no thread")

    for kind in (HostMemory, Inbox):
        close = kind.close

        def noted(self: Any, name: str = kind.__name__, close: Any = close) -> None:
            closed.append(name)
            close(self)

        monkeypatch.setattr(kind, "close", noted)
    monkeypatch.setattr(HostMemory, "start", fails)
    pool = KVPool.from_tensors([torch.zeros(4, 8, 1)])
    with pytest.raises(RuntimeError, match="no thread"):
        WorkerHost(pool, HostConfig(num_pages=8), 0, "d")
    assert sorted(closed) == ["HostMemory", "Inbox"]


def test_a_write_waits_for_the_kernels_of_its_step() -> None:
    """And a load for those of the steps before."""
    memory = torch.zeros(4, 8, 1)
    memory[2], memory[3] = 2.0, 3.0
    host = WorkerHost(KVPool.from_tensors([memory]), HostConfig(num_pages=8), 0, "d")
    try:
        assert host.take_size() == {0: (8, 8)}
        assert host.take_size() == {}
        ids = np.array([2, 3], np.int32)
        write = CopyOrder(HostCopy(1, False, ids, ids))
        before, step = Gate(), Gate()
        before.answer = True
        assert host.begin([write], before) == []
        assert host.writes
        host.begin_writes(step)
        assert not host.writes
        until(lambda: step.queries > 2)
        memory[3] = 30.0  # computed in the step
        step.answer = True
        until(lambda: [(end.number, rid) for end, rid in host.take_ends()] == [(1, "")])
        load = CopyOrder(HostCopy(2, True, ids, np.array([0, 1], np.int32)), "r")
        former = Gate()
        assert host.begin([load], former) == ["r"]
        memory[0] = 9.0  # the last word of a step that used the block before
        former.answer = True
        until(lambda: [(end.error, rid) for end, rid in host.take_ends()] == [(None, "r")])
        assert memory[0].unique().tolist() == [2.0]
        assert memory[1].unique().tolist() == [30.0]
    finally:
        host.close()
