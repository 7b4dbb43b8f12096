"""Host memory for pages: rows apart, in chunks, refused before anything is taken."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixkv.errors import CapacityError, ConfigError, PageStateError
from prefixkv.memory import host_pool
from prefixkv.memory.host_pool import HostPool, free_host_bytes
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.paging import MAX_INDEX
from tests.models.gpu import GPU
from tests.models.patience import until

WAIT_S = 60.0


def layout(attention: str = "mha") -> KVLayout:
    return KVPool.create(3, 4, 2, 1, 8, dtype="float16", attention=attention).layout


@pytest.mark.parametrize("num_pages", [1, 4, 10])
def test_rows_are_apart_and_none_spans_two_chunks(num_pages: int) -> None:
    whole = 2 * 2 * 4 * 8 * 2
    pool = HostPool(layout(), num_pages, chunk_bytes=4 * whole + whole // 2)
    assert pool.page_bytes == whole
    assert pool.num_pages == pool.ready_pages == num_pages
    pages = np.arange(num_pages, dtype=np.int32)
    rows = dict(zip(pages.tolist(), pool.addresses(pages).tolist(), strict=True))
    starts = sorted(rows.values())
    assert all(b - a >= whole for a, b in pairwise(starts))
    stretches = list(pool.stretches(pages))
    assert [len(range(num_pages)[some]) for some, _ in stretches] == [
        min(4, num_pages - first) for first in range(0, num_pages, 4)
    ]
    for some, memory in stretches:
        assert memory.data_ptr() == rows[some.start]
        assert memory.dtype == torch.uint8
        assert memory.numel() == len(range(num_pages)[some]) * whole
        memory.fill_(some.start)  # all of it can be written
    pool.close()
    assert pool.ready_pages == 0
    pool.close()


def test_pages_side_by_side_are_one_stretch() -> None:
    pool = HostPool(layout(), 10, chunk_bytes=4 * layout().page_bytes)
    pages = np.array([8, 5, 6, 7, 8, 2, 1, 0, 1, 9], np.int32)
    found = [pages[some].tolist() for some, _ in pool.stretches(pages)]
    assert found == [[8], [5, 6, 7], [8], [2], [1], [0, 1], [9]]
    pool.close()


def test_a_chunk_holds_one_page_at_least() -> None:
    pool = HostPool(layout("mla"), 3, chunk_bytes=1)
    assert pool.page_bytes == 2 * 4 * 8 * 2
    assert len(list(pool.stretches(np.arange(3, dtype=np.int32)))) == 3
    pool.close()


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    pool = HostPool(layout(), 3)
    assert pool.checked(np.array([2, 0], np.int64)).dtype == np.int32
    with pytest.raises(PageStateError, match=f"host page {page} is not in"):
        pool.checked(np.array([0, page], np.int32))
    pool.close()
    with pytest.raises(PageStateError, match="host page 0"):
        pool.checked(np.array([0], np.int32))


# --- how much -------------------------------------------------------------------------------------


def test_more_than_the_host_has_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(num_bytes: int, device: str) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes were taken")

    monkeypatch.setattr(host_pool, "_host_bytes", taken)
    free = free_host_bytes()
    assert free is not None
    assert free < MAX_INDEX * layout().page_bytes
    with pytest.raises(ConfigError, match=rf"take {MAX_INDEX * 256} bytes, the host has \d+ free"):
        HostPool(layout(), MAX_INDEX)


def test_as_much_as_the_host_has_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, num_pages in ((1023, 3), (1024, 4)):
        monkeypatch.setattr(host_pool, "free_host_bytes", lambda free=free: free)
        HostPool(layout(), num_pages).close()
        with pytest.raises(ConfigError, match=f"1280 bytes, the host has {free} free"):
            HostPool(layout(), 5)


@pytest.mark.parametrize(
    ("available", "limit", "free"),
    [(1000, "max", 1000 << 10), (1000, str(5 << 20), 300), (1, str(6 << 20), 1 << 10),
     (1000, "4096", 0), (None, "max", None), (None, str(5 << 20), 300)],
)  # fmt: skip
def test_the_container_may_have_less_than_the_system(
    tmp_path: Path, available: int | None, limit: str, free: int | None
) -> None:
    meminfo = tmp_path / "meminfo"
    if available is not None:
        meminfo.write_text(f"MemTotal: 9999 kB\nMemAvailable: {available} kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{(5 << 20) - 100}\n")
    (tmp_path / "memory.stat").write_text("anon 77\ninactive_file 200\nactive_file 9000\n")
    assert free_host_bytes(str(meminfo), str(tmp_path)) == free


def test_a_system_without_a_container_says_what_is_available(tmp_path: Path) -> None:
    assert (free_host_bytes(group=str(tmp_path)) or 0) > 1 << 20
    assert free_host_bytes(str(tmp_path / "none"), str(tmp_path)) is None


@pytest.mark.parametrize(
    ("num_pages", "device", "chunk_bytes", "message"),
    [
        (0, "cpu", 1, "num_pages is 0"),
        (1, "cpu", 0, "chunk_bytes is 0"),
        (1, "meta", 1, "device is 'meta'"),
    ],
)
def test_other_settings_are_refused(
    num_pages: int, device: str, chunk_bytes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        HostPool(layout(), num_pages, device, chunk_bytes)


def test_memory_that_the_system_refuses_is_a_lack_of_room() -> None:
    with pytest.raises(CapacityError, match="bytes of host memory"):
        host_pool._host_bytes(1 << 60, "cpu")


# --- chunk by chunk -------------------------------------------------------------------------------


class Pinning:
    """Stands in for pinned memory, of which there is none without a GPU: each chunk waits until it
    is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.asked: list[int] = []
        self.fail_at = fail_at
        self.go_on = threading.Semaphore(0)
        monkeypatch.setattr(host_pool, "check_device", lambda device: None)
        monkeypatch.setattr(host_pool, "_host_bytes", self)

    def __call__(self, num_bytes: int, device: str) -> torch.Tensor:
        assert device == "cuda:0"
        self.asked.append(num_bytes)
        assert self.go_on.acquire(timeout=WAIT_S)
        if len(self.asked) - 1 == self.fail_at:
            raise CapacityError("no more can be pinned")
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_pinned_pages_become_ready_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    pinning = Pinning(monkeypatch)
    pool = HostPool(layout(), 10, "cuda:0", chunk_bytes=1024)
    assert pool.ready_pages == 0, "the start does not wait"
    for ready in (4, 8, 10):
        pinning.go_on.release()
        until(lambda ready=ready: pool.ready_pages == ready)  # type: ignore[misc]
        assert len(set(pool.addresses(np.arange(ready, dtype=np.int32)).tolist())) == ready
        with pytest.raises(PageStateError, match=f"host page {ready} is not in"):
            pool.checked(np.array([ready], np.int32))
    assert pinning.asked == [1024, 1024, 512]
    pool.close()
    assert pool.error is None


def test_what_is_pinned_stays_where_more_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pinning = Pinning(monkeypatch, fail_at=1)
    pool = HostPool(layout(), 10, "cuda:0", chunk_bytes=1024)
    pinning.go_on.release(3)
    until(lambda: pool.error is not None)
    assert isinstance(pool.error, CapacityError)
    assert pool.ready_pages == 4
    pool.close()


def test_close_waits_for_the_chunk_that_is_pinned_and_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinning = Pinning(monkeypatch)
    pool = HostPool(layout(), 10, "cuda:0", chunk_bytes=1024)
    until(lambda: bool(pinning.asked))
    (thread,) = (one for one in threading.enumerate() if one.name == "prefixkv-host-pool")
    closer = threading.Thread(target=pool.close)
    closer.start()
    until(lambda: pool._closing)
    assert closer.is_alive()
    pinning.go_on.release(3)
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert not thread.is_alive()
    assert pinning.asked == [1024]
    assert pool.ready_pages == 0


@GPU
def test_memory_for_a_gpu_is_pinned() -> None:
    pool = HostPool(layout(), 10, "cuda:0", chunk_bytes=1024)
    until(lambda: pool.ready_pages == 10)
    pages = np.arange(10, dtype=np.int32)
    assert all(memory.is_pinned() for _, memory in pool.stretches(pages))
    pool.close()
