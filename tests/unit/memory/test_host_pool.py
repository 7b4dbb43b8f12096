"""Host memory for pages: rows apart, in chunks, refused before anything is taken."""

import os
import tempfile
import threading
import warnings
import weakref
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
from tests.support.gpu import GPU
from tests.support.patience import until

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


GB = 1 << 30
V1 = "memory/"
V1_FILES = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}


def make_group(root: Path, path: str, limit: int | str, taken: int) -> None:
    """A control group with a limit, of version 1 where the path is below `memory/`."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    is_v1 = path.startswith(V1)
    for name, value in (("memory.max", limit), ("memory.current", taken)):
        (folder / (V1_FILES[name] if is_v1 else name)).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n" if is_v1 else "inactive_file 0\n")


@pytest.mark.parametrize(
    ("groups", "own", "free"),
    [
        ({"": (8, 1)}, "0::/", 7),
        ({"memory/": (8, 1)}, "4:memory:/", 7),
        ({"system.slice/serve.service": (8, 1)}, "0::/system.slice/serve.service", 7),
        # Each group around the own one has a limit for all in it. Others' are of no concern.
        ({"a.slice": (8, 5), "a.slice/b": (6, 1), "c.slice": (1, 1)}, "0::/a.slice/b", 3),
        ({"a.slice": ("max", 5), "a.slice/b": (6, 1), "a.slice/c": (1, 1)}, "0::/a.slice/b", 5),
        ({"memory/": ((1 << 33) - 1, 50), "memory/docker/x": (4, 2)}, "4:cpu,memory:/docker/x", 2),
        # Both versions at once: memory is counted by one of them.
        ({"memory/x": (4, 1)}, "1:name=systemd:/y\n4:memory:/x\n0::/z", 3),
        # A container whose own group is mounted as the root, and one that cannot see its own.
        ({"": (8, 1)}, "0::/system.slice/docker-1.scope", 7),
        ({"memory/": (8, 1)}, "4:memory:/docker/1", 7),
        ({"": (8, 1)}, "0::/../other", 7),
        # A root that was given: the only groups below it count.
        ({"system.slice/serve.service": (8, 1)}, "0::/", 7),
        ({"a": (3, 1), "b": (3, 1)}, "0::/", 100),
    ],
)
def test_each_group_around_the_process_has_its_limit(
    tmp_path: Path, groups: dict[str, tuple[int | str, int]], own: str, free: int
) -> None:
    meminfo, names = tmp_path / "meminfo", tmp_path / "self"
    meminfo.write_text(f"MemAvailable: {100 << 20} kB\n")
    names.write_text(own + "\n")
    for path, (limit, taken) in groups.items():
        most = limit if limit == "max" else int(limit) * GB
        make_group(tmp_path / "groups", path, most, taken * GB)
    assert free_host_bytes(str(meminfo), str(tmp_path / "groups"), str(names)) == free * GB


class Host:
    """Stands in for a host of this many bytes, which falls as memory is taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self.taken = threading.Event()
        self.take = host_pool._host_bytes
        monkeypatch.setattr(host_pool, "free_host_bytes", lambda: self.free)
        monkeypatch.setattr(host_pool, "_host_bytes", self)

    def __call__(self, num_bytes: int, device: str) -> torch.Tensor:
        seen = self.free
        self.taken.wait(0.05)  # another pool that does not wait for its turn sees as much
        self.free = seen - num_bytes
        return self.take(num_bytes, device)


def test_pools_that_are_made_at_once_take_no_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch, 10 * 256)
    errors: list[Exception] = []

    def make() -> None:
        try:
            HostPool(layout(), 6, chunk_bytes=256)
        except (CapacityError, ConfigError) as error:
            errors.append(error)

    makers = [threading.Thread(target=make) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(WAIT_S)
    assert host.free >= 0
    assert errors


def test_a_fork_does_not_keep_the_turn() -> None:
    ours, theirs = os.pipe()
    with host_pool._in_turn(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        if (pid := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the parent's end is closed
            os._exit(0)
    os.close(ours)
    with host_pool._in_turn():
        os.close(theirs)
    os.waitpid(pid, 0)


def test_without_a_file_to_lock_no_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_SHM", str(tmp_path / "away"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    with pytest.raises(
        CapacityError, match=r"lock on a file: .*No such.*away/prefixkv-host-\d+.lock"
    ):
        HostPool(layout(), 1)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(CapacityError, match="No usable temporary directory"):
        HostPool(layout(), 1)


def test_processes_with_other_temporary_folders_take_turns_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = threading.Event()

    def enter() -> None:
        with host_pool._in_turn():
            entered.set()

    other = threading.Thread(target=enter)
    with host_pool._in_turn():
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        other.start()
        assert not entered.wait(0.1)
    other.join(WAIT_S)
    assert entered.is_set()


def test_a_pool_that_cannot_be_made_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host, taken = Host(monkeypatch, 1 << 20), []

    def take(num_bytes: int, device: str) -> torch.Tensor:
        chunk = host(num_bytes, device)
        host.free = 0  # another process has taken it
        taken.append(weakref.ref(chunk))
        return chunk

    monkeypatch.setattr(host_pool, "_host_bytes", take)
    with pytest.raises(CapacityError, match="are free") as error:
        HostPool(layout(), 1 << 10, chunk_bytes=1 << 17)
    assert taken
    assert not any(chunk() is not None for chunk in taken)
    assert error.value.__traceback__ is not None


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


def test_what_is_pinned_stays_where_more_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = Pinning(monkeypatch, fail_at=1)
    pool = HostPool(layout(), 10, "cuda:0", chunk_bytes=1024)
    pinning.go_on.release(3)
    until(lambda: pool.error is not None)
    assert isinstance(pool.error, CapacityError)
    assert pool.ready_pages == 4
    pool.close()
    said = "host memory: 4 of 10 pages: no more can be pinned"
    assert caplog.messages == [said], "nothing else tells an operator"


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
