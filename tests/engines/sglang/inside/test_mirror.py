"""Page ids on the host before a checkpoint asks for them, where SGLang's pools are on a device.

The device is `gpu.py`'s: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.mem_cache import allocation
from sglang.srt.plugins.hook_registry import HookRegistry

from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang import plugin
from prefixkv.engines.sglang.mirror import RowMirror
from tests.engines.sglang.inside import gpu
from tests.engines.sglang.inside.desk import Desk, Kv, Request
from tests.engines.sglang.inside.gpu import on_host
from tests.engines.sglang.inside.test_random import Load
from tests.engines.sglang.inside.test_requests import request
from tests.engines.sglang.stubs import CONTEXT


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu.Device]:
    with gpu.Device() as made:
        made.install(monkeypatch)
        yield made


class Watched(Desk):
    """A desk with its pools on the device. `waits` has for each checkpoint how often it waited for
    the device, and how often it might have; `follows` the same for what is queued before."""

    def __init__(self, device: gpu.Device, page_size: int, pool_tokens: int, **named: Any) -> None:
        super().__init__("prefixkv", page_size, pool_tokens, device=gpu.NAME, **named)
        self.waits: list[tuple[int, int]] = []
        self.follows: list[tuple[int, int]] = []
        self._watch(device, self.cache, "checkpoint", self.waits)
        if self.cache.mirror is not None:
            for name in ("written", "grown"):
                self._watch(device, self.cache.mirror, name, self.follows)

    def _watch(self, device: gpu.Device, owner: Any, name: str, waits: list[Any]) -> None:
        called = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> None:
            before = device.reads, device.pageable
            called(*args, **named)
            waits.append((device.reads - before[0], device.pageable - before[1]))

        setattr(owner, name, watched)

    def check(self) -> None:
        super().check()
        mirror, size = self.cache.mirror, self.page_size
        for row_id, row in {} if mirror is None else mirror._rows.items():
            shown = on_host(self.pool.req_to_token)[row_id, ::size] // size
            here = row.first + len(row.pages)
            assert row.pages.tolist() == shown[row.first : here].tolist()


# --- beside the cache without it ------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "eagle"), [(1, False), (4, True), (16, False)])
def test_all_is_as_without_the_mirror_and_no_checkpoint_waits(
    device: gpu.Device, page_size: int, eagle: bool
) -> None:
    with_it, without = (
        Watched(device, page_size, 1024, eagle=eagle, mirror=mirror) for mirror in (True, False)
    )
    load = Load(page_size + eagle, [with_it, without], 200)
    for _ in range(700):
        load.step()
        with_it.check()
        assert gpu.same(with_it.pool.req_to_token, without.pool.req_to_token)
        assert with_it.cache.tree.dump() == without.cache.tree.dump()
    assert len(with_it.waits) > 100
    assert set(with_it.waits) == set(with_it.follows) == {(0, 0)}
    assert len(device._queued) > 100
    assert sum(reads for reads, _ in without.waits) > 50
    assert with_it.cache.counters["rows_read"] == 0
    assert with_it.cache.counters["evicted_tokens"] > 1000
    assert with_it.cache.counters["duplicate_tokens"] > 0
    assert load.seen["retracted"] > 10
    for req in list(with_it.running.values()):
        with_it.finish(req)
    assert not with_it.cache.mirror._rows


def test_nothing_of_it_is_there_on_a_cpu() -> None:
    assert Desk("prefixkv", 4, 64).cache.mirror is None


# --- rows -----------------------------------------------------------------------------------------


class Rows:
    """A mirror over a pool of SGLang's, and requests that are given pages by hand."""

    def __init__(self, page_size: int) -> None:
        self.desk = Desk("prefixkv", page_size, 1024, device=gpu.NAME)
        self.mirror = RowMirror(self.desk.pool, page_size)
        self.size = page_size

    def request(self, row: int | None = None) -> Any:
        req = SimpleNamespace(kv=Kv(row), prefix_len=0)
        if row is None:
            self.desk.pool.alloc([req])
        return req

    def give(self, req: Any, start: int, pages: list[int], end: int) -> None:
        """Slots of these pages for tokens `start` to `end`."""
        slots = np.concatenate([page * self.size + np.arange(self.size) for page in pages])
        slots = slots[start % self.size :][: end - start]
        place = req.kv.req_pool_idx, slice(start, end)
        self.desk.pool.write(place, torch.from_numpy(slots))
        req.kv.kv_allocated_len = end

    def pages(self, req: Any, start: int, end: int) -> list[int] | None:
        found = self.mirror.pages(req.kv.req_pool_idx, start, end)
        self.mirror.check_invariants()
        return None if found is None else found.tolist()


def test_a_row_that_another_request_has_is_not_known(device: gpu.Device) -> None:
    """Also where SGLang did not say that it was released."""
    rows = Rows(4)
    first = rows.request()
    rows.give(first, 0, [7, 3, 9], 11)
    rows.mirror.written(first.kv, 0)
    assert rows.pages(first, 0, 3) == [7, 3, 9]
    row = first.kv.req_pool_idx
    rows.desk.pool.free(first)
    second = rows.request()
    assert second.kv.req_pool_idx == row
    assert rows.pages(second, 0, 3) is None
    rows.give(second, 0, [5, 6], 8)
    rows.mirror.grown([second])  # what came before it is not known
    assert rows.pages(second, 0, 1) is None
    rows.mirror.forget(row, 1)
    rows.mirror.written(second.kv, 0)
    assert rows.pages(second, 0, 2) == [5, 6]
    rows.mirror.released(row)
    assert rows.pages(second, 0, 2) is None


def test_pages_that_were_given_back_and_others_in_their_place(device: gpu.Device) -> None:
    """SGLang does so with diffusion models; the first copy comes late."""
    rows = Rows(4)
    req = rows.request()
    rows.give(req, 0, [1, 2, 3, 4], 16)
    rows.mirror.written(req.kv, 0)
    rows.give(req, 8, [8, 9, 6], 20)
    rows.mirror.written(req.kv, 8)
    assert rows.pages(req, 2, 5) == [8, 9, 6]
    assert rows.pages(req, 0, 5) is None


def test_a_part_of_a_page_is_known_once(device: gpu.Device) -> None:
    rows = Rows(4)
    req = rows.request()
    rows.give(req, 0, [5], 3)
    rows.mirror.written(req.kv, 0)
    rows.give(req, 3, [5, 8], 6)
    rows.mirror.written(req.kv, 3)
    rows.give(req, 6, [8, 2], 9)
    for _ in range(3):
        rows.mirror.step([req])
    assert rows.pages(req, 0, 3) is None
    rows.mirror.step([req])
    assert rows.pages(req, 0, 3) == [5, 8, 2]
    assert rows.pages(req, 1, 2) == [8]
    assert rows.pages(req, 0, 4) is None


def test_what_a_checkpoint_handed_over_is_forgotten(device: gpu.Device) -> None:
    rows = Rows(2)
    req = rows.request()
    row = req.kv.req_pool_idx
    rows.give(req, 0, [5, 6, 7], 6)
    rows.mirror.written(req.kv, 0)
    rows.mirror.forget(row, 2)
    assert rows.pages(req, 1, 3) is None
    assert rows.pages(req, 2, 3) == [7]
    rows.mirror.forget(row, 1)
    assert rows.pages(req, 2, 3) == [7]
    rows.give(req, 6, [8, 9], 10)
    rows.mirror.forget(row, 4)  # one of these was read from the row
    assert rows.pages(req, 2, 3) is None
    rows.mirror.grown([req])
    assert rows.pages(req, 4, 5) == [9]


def test_a_copy_is_not_read_before_it_is_over(device: gpu.Device) -> None:
    """Three requests' copies are queued; of those that come later the memory holds something else,
    and nothing waits for more than it needs."""
    rows, given = Rows(1), [[3, 4], [5, 6, 7], [8]]
    device._rng = SimpleNamespace(random=lambda: 1.0)  # none comes by itself
    reqs = []
    for pages in given:
        reqs.append(rows.request())
        rows.give(reqs[-1], 0, pages, len(pages))
        rows.mirror.written(reqs[-1].kv, 0)
    assert device._num_done == 0
    assert rows.pages(reqs[1], 0, 3) == [5, 6, 7]
    assert device._num_done == 2
    assert rows.pages(reqs[0], 0, 2) == [3, 4]
    assert rows.pages(reqs[2], 0, 1) == [8]
    assert device.reads == 0


def test_copies_that_are_over_are_not_kept(device: gpu.Device) -> None:
    rows = Rows(1)
    device._rng = SimpleNamespace(random=lambda: 0.0)
    req = rows.request()
    for token in range(50):
        rows.give(req, token, [token + 1], token + 1)
        rows.mirror.written(req.kv, token)
        assert len(rows.mirror._copies) <= 1


# --- SGLang's functions ---------------------------------------------------------------------------


@pytest.fixture
def sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's functions with our hooks, as its registry puts them in."""
    monkeypatch.setattr(allocation, "support_triton", lambda backend: False)
    monkeypatch.setattr(allocation, "attention_backends", lambda: ("torch_native",) * 2)
    monkeypatch.setattr(allocation, "get_last_loc", allocation.get_last_loc_torch)
    monkeypatch.setattr(allocation, "is_pin_memory_available", lambda device: False)
    monkeypatch.setattr(allocation, "assign_req_to_token_pool_func", write_rows)
    plugin.load()
    for target in (sgl.ALLOC_FOR_DECODE, sgl.ALLOC_FOR_SPEC_DECODE):
        name = target.rpartition(".")[2]
        monkeypatch.setattr(allocation, name, getattr(allocation, name))
        HookRegistry._apply_target(target, HookRegistry._hooks[target])


def write_rows(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, num_reqs: int) -> None:
    """What a kernel of SGLang's does."""
    begin = 0
    for row, start, end in zip(*(on_host(one) for one in (rows, starts, ends)), strict=True):
        table[int(row), int(start) : int(end)] = slots[begin : begin + int(end - start)]
        begin += int(end - start)
    assert len(starts) == num_reqs


def batch_of(desk: Desk, reqs: list[Request], ends: list[int]) -> Any:
    """The part of a `ScheduleBatch` that is read where slots are allocated."""
    starts = [req.prefix_len for req in reqs]
    lens = torch.tensor(ends)
    return SimpleNamespace(
        reqs=reqs, req_to_token_pool=desk.pool, tree_cache=desk.cache, device=gpu.NAME,
        prefix_lens=starts, extend_lens=[e - s for s, e in zip(starts, ends, strict=True)],
        extend_num_tokens=sum(ends) - sum(starts), seq_lens=lens.to(gpu.NAME), seq_lens_cpu=lens,
        req_pool_indices=torch.tensor([req.kv.req_pool_idx or 0 for req in reqs]).to(gpu.NAME),
        req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx or 0 for req in reqs]),
        model_config=SimpleNamespace(is_encoder_decoder=False), hisparse_coordinator=None,
        maybe_evict_swa=lambda: None, is_dllm=lambda: False,
    )  # fmt: skip


def admitted(desk: Desk, rid: str, tokens: Any) -> Request:
    """Matched and locked, without pages of its own yet."""
    req = request(rid, tokens)
    desk.match(req)
    req.lock = desk.cache.lock(req.last_node)
    req.kv.cache_protected_len = req.prefix_len
    desk.running[rid] = req
    return req


@pytest.mark.parametrize("page_size", [1, 4])
def test_sglangs_allocation_tells_what_it_writes(
    device: gpu.Device, sglangs: None, page_size: int
) -> None:
    desk = Watched(device, page_size, 1024, keep_kv=False)
    reqs = [admitted(desk, "a", range(30)), admitted(desk, "b", range(50, 73))]
    allocation.alloc_for_extend(batch_of(desk, reqs, [16, 23]))
    for req, end in zip(reqs, (16, 23), strict=True):
        req.extend_end = end
        desk.checkpoint(req)
    allocation.alloc_for_extend(batch_of(desk, reqs[:1], [30]))
    reqs[0].extend_end = 30
    desk.checkpoint(reqs[0])
    for token in range(21):
        for req in reqs:
            req.output_ids.append(token)
        allocation.alloc_for_decode(
            batch_of(desk, reqs, [req.kv.kv_allocated_len for req in reqs]), 1
        )
    desk.finish(reqs[0])
    again = admitted(desk, "again", [*range(30), *range(15)])
    assert again.prefix_len > 40
    allocation.alloc_for_extend(batch_of(desk, [again], [45]))
    again.extend_end = 45
    desk.checkpoint(again)
    desk.finish(again)
    desk.finish(reqs[1])
    desk.check()
    assert set(desk.waits) == set(desk.follows) == {(0, 0)}
    assert desk.cache.counters["rows_read"] == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_so_does_speculation_which_allocates_ahead(
    device: gpu.Device, sglangs: None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 12 slots ahead, of which a step keeps some; what is never used is given back."""
    monkeypatch.setattr(CONTEXT.spec, "speculative_algorithm", "EAGLE")
    desk = Watched(device, page_size, 1024, keep_kv=False, eagle=True)
    reqs = [admitted(desk, "a", range(30)), admitted(desk, "b", range(50, 73))]
    allocation.alloc_for_extend(batch_of(desk, reqs, [30, 23]))
    for req, end in zip(reqs, (30, 23), strict=True):
        req.extend_end = end
        desk.checkpoint(req)
    for step in range(8):
        batch = batch_of(desk, reqs, [0, 0])
        now = [req.kv.kv_allocated_len for req in reqs]
        ahead = [-(-(req.kv.kv_committed_len + 12) // page_size) * page_size for req in reqs]
        following = [max(pair) for pair in zip(now, ahead, strict=True)]
        allocation.alloc_for_spec_decode(
            desk.cache, desk.pool, reqs=reqs, req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=torch.tensor(now).to(gpu.NAME), cur_kv_lens_cpu=torch.tensor(now),
            nxt_kv_lens=torch.tensor(following).to(gpu.NAME),
            nxt_kv_lens_cpu=torch.tensor(following), batch=batch,
            num_needed_tokens=sum(following) - sum(now),
        )  # fmt: skip
        for req in reqs:
            kept = 1 + step % 4
            req.output_ids.extend(range(kept))
            req.kv.kv_committed_len += kept
        desk.check()
    for req in reqs:
        desk.finish(req)
    desk.check()
    assert set(desk.waits) == set(desk.follows) == {(0, 0)}
    assert desk.cache.counters["rows_read"] == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_and_so_does_decodes_queue(device: gpu.Device, sglangs: None, page_size: int) -> None:
    """With a prefix that decode has, and without: what is sent for a request is checkpointed."""
    desk = Watched(device, page_size, 1024, keep_kv=False)
    queue = object.__new__(DecodePreallocQueue)
    queue.__dict__.update(
        tree_cache=desk.cache, req_to_token_pool=desk.pool, token_to_kv_pool=None,
        token_to_kv_pool_allocator=desk.allocator,
        scheduler=SimpleNamespace(
            enable_hisparse=False, tp_worker=SimpleNamespace(is_hybrid_swa=False)
        ),
    )  # fmt: skip
    for rid, prompt, cached in (("first", range(30), 0), ("second", range(43), 28)):
        req = admitted(desk, rid, prompt)
        assert req.prefix_len >= cached
        held = desk.cache.prefix_device_indices(req)
        queue._pre_alloc(req, held, req.prefix_len)
        desk.checkpoint(req)
        desk.finish(req)
        desk.check()
    assert set(desk.waits) == set(desk.follows) == {(0, 0)}
    assert len(desk.follows) == 2
    assert desk.cache.counters["rows_read"] == 0


def test_it_can_be_turned_off(device: gpu.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = Desk("prefixkv", 4, 64, device=gpu.NAME).params
    context = SimpleNamespace(
        params=params, is_hybrid_swa=False, is_hybrid_ssm=False, enable_hierarchical_cache=False
    )
    assert plugin.build(context).mirror is not None
    monkeypatch.setenv("PREFIXKV_MIRROR", "0")
    assert plugin.build(context).mirror is None
