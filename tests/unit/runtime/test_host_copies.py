"""The host tier's copies: every byte, loads first, each order reported once and not before nothing
touches its pages. And staging's."""

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import HostConfig
from prefixkv.control.effects import CopyDone
from prefixkv.errors import ClosedError, PageStateError
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.page_copy import PageCopy
from prefixkv.paging import Pages
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.runtime import copies
from prefixkv.runtime.copies import run_settled
from prefixkv.runtime.host_copies import HostCopies
from prefixkv.runtime.staging import CopyPool
from tests.support.gates import Gate
from tests.support.gpu import GPU
from tests.support.patience import until

WAIT_S = 60.0

Results = SimpleQueue[HostCopyDone]
Worlds = Callable[..., "World"]


def _k_and_v_of_a_page_together() -> KVPool:
    tensors = [torch.zeros(24, 2, 4, 2, 8) for _ in range(3)]
    return KVPool.from_tensors([each[:, 0] for each in tensors], [each[:, 1] for each in tensors])


POOLS: dict[str, Callable[[], KVPool]] = {
    "K and V apart": lambda: KVPool.create(24, 4, 3, 2, 8),
    "a rank of two": lambda: KVPool.create(24, 4, 3, 1, 8, order="page_major"),
    "mla": lambda: KVPool.create(24, 4, 5, 1, 24, attention="mla"),
    "K and V of a page together": _k_and_v_of_a_page_together,
    "long runs": lambda: KVPool.create(24, 4, 1, 1, 6144, dtype="uint8", attention="mla"),
}


def pages(*ids: int) -> Pages:
    return np.array(ids, np.int32)


def load(number: int, host: Pages, device: Pages) -> HostCopy:
    return HostCopy(number, True, host, device)


def write(number: int, host: Pages, device: Pages) -> HostCopy:
    return HostCopy(number, False, host, device)


class HeldCopies:
    """The copies' own page copy, behind a gate: calls that fill one of `held` wait until they are
    let go."""

    def __init__(self, copies: HostCopies, *held: int) -> None:
        self._copy: PageCopy = copies._copy
        self._held = set(held)
        self._open = threading.Event()
        self.calls: list[tuple[str, list[int]]] = []  # in the order in which they began
        self.ended: list[list[int]] = []
        copies._copy = self

    def load(self, host_pages: Pages, device_pages: Pages) -> None:
        self._pass("load", device_pages)
        self._copy.load(host_pages, device_pages)
        self.ended.append(device_pages.tolist())

    def write(self, host_pages: Pages, device_pages: Pages) -> None:
        self._pass("write", host_pages)
        self._copy.write(host_pages, device_pages)
        self.ended.append(host_pages.tolist())

    def _pass(self, what: str, filled: Pages) -> None:
        self.calls.append((what, filled.tolist()))
        if self._held & set(filled.tolist()):
            assert self._open.wait(WAIT_S)

    def let_go(self) -> None:
        self._open.set()


class World:
    """A pool of 24 pages, 40 host pages, and the copies between them, a page or two per piece."""

    def __init__(self, name: str = "K and V apart", threads: int = 1, piece_pages: int = 1) -> None:
        self.pool = POOLS[name]()
        layout = self.pool.layout
        self.page_bytes = layout.page_bytes
        self.shape = self.pool.read_pages([0]).shape[1:]
        self.host = HostPool(layout, 40, chunk_bytes=7 * self.page_bytes)
        self.results: Results = SimpleQueue()
        # Somewhat less than another page.
        piece_bytes = (piece_pages + 1) * self.page_bytes - 1
        config = HostConfig(copy_threads=threads, piece_bytes=piece_bytes)
        self.copies = HostCopies(layout, self.host, config, self.results.put, name="here")

    def fill(self, page: int, tag: int) -> None:
        self.pool.write_pages([page], self.bytes_of(tag))

    def bytes_of(self, tag: int) -> torch.Tensor:
        raw = np.random.default_rng(tag).integers(0, 256, (1, *self.shape), np.uint8)
        return torch.from_numpy(raw)

    def holds(self, page: int, tag: int) -> bool:
        return torch.equal(self.pool.read_pages([page]), self.bytes_of(tag))

    def take(self, count: int) -> list[HostCopyDone]:
        return [self.results.get(timeout=WAIT_S) for _ in range(count)]

    def close(self) -> None:
        self.copies.close()
        self.host.close()


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """At the end each is closed, and has nothing more to say."""
    made: list[World] = []
    yield lambda *what, **more: made.append(World(*what, **more)) or made[-1]
    for world in made:
        world.close()
        assert world.results.empty()


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds()


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_loads_and_writes_in_any_order_keep_every_byte(
    name: str, seed: int, worlds: Worlds
) -> None:
    """Against a model that copies a page at once: which bytes each page of both pools has."""
    draw = random.Random(seed)
    world = worlds(name, threads=2, piece_pages=draw.choice([1, 2, 5]))
    on_device, on_host = list(range(24)), [page % 24 for page in range(40)]
    for page, tag in enumerate(on_device):
        world.fill(page, tag)
    world.copies.submit(write(-1, np.arange(40, dtype=np.int32), pages(*on_host)))
    assert world.take(1)[0].error is None

    under_way: dict[int, HostCopy] = {}
    fresh = 100

    def busy(device: bool) -> set[int]:
        """Pages that an order reads or fills."""
        return {
            page
            for order in under_way.values()
            for page in (order.device_pages if device else order.host_pages).tolist()
        }

    def ended(done: HostCopyDone) -> None:
        order = under_way.pop(done.number)
        assert done.error is None
        assert done.num_bytes == len(order.host_pages) * world.page_bytes
        assert done.seconds > 0
        for host, device in zip(order.host_pages, order.device_pages, strict=True):
            if order.is_load:
                on_device[device] = on_host[host]
            else:
                on_host[host] = on_device[device]

    for number in range(120):
        free_device = sorted(set(range(24)) - busy(True))
        free_host = sorted(set(range(40)) - busy(False))
        count = draw.randint(0, min(6, len(free_device), len(free_host)))
        if not count:
            ended(world.take(1)[0]) if under_way else None
            continue
        device, host = draw.sample(free_device, count), draw.sample(free_host, count)
        if draw.random() < 0.3:  # what an engine computes meanwhile
            fresh += 1
            on_device[device[0]] = fresh
            world.fill(device[0], fresh)
        order = HostCopy(number, draw.random() < 0.5, pages(*host), pages(*device))
        under_way[number] = order
        world.copies.submit(order)
        while not world.results.empty():
            ended(world.results.get())
    while under_way:
        ended(world.take(1)[0])
    assert world.results.empty()
    assert all(world.holds(page, tag) for page, tag in enumerate(on_device))
    for first in (0, 16):  # the host's, as they come back
        there = np.arange(first, first + 24, dtype=np.int32)
        world.copies.submit(load(1000, there, np.arange(24, dtype=np.int32)))
        assert world.take(1)[0].error is None
        assert all(world.holds(page, on_host[first + page]) for page in range(24))


def test_pieces_of_one_load_run_at_once_and_its_end_comes_once(worlds: Worlds) -> None:
    world = worlds(threads=3, piece_pages=2)
    gate = HeldCopies(world.copies, 0, 2)
    world.copies.submit(load(7, pages(*range(8)), pages(*range(8))))
    # Two pieces are held, and the third thread makes the others.
    until(lambda: len(gate.ended) == 2)
    assert sorted(gate.ended) == [[4, 5], [6, 7]]
    assert world.results.empty()
    gate.let_go()
    (done,) = world.take(1)
    assert done == HostCopyDone(7, None, 8 * world.page_bytes, done.seconds)


def test_a_load_overtakes_writes_and_waits_for_the_piece_that_runs(world: World) -> None:
    gate = HeldCopies(world.copies, 20)
    world.copies.submit(write(1, pages(20, 21, 22), pages(0, 1, 2)))
    world.copies.submit(write(2, pages(23), pages(3)))
    until(lambda: gate.calls == [("write", [20])])
    world.copies.submit(load(3, pages(5, 6), pages(8, 9)))
    world.copies.submit(load(4, pages(7), pages(10)))
    gate.let_go()
    assert [done.number for done in world.take(4)] == [3, 4, 1, 2]
    assert gate.calls == [
        ("write", [20]), ("load", [8]), ("load", [9]), ("load", [10]),
        ("write", [21]), ("write", [22]), ("write", [23]),
    ]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_write_has_its_turns_beside_loads_that_follow_each_other(
    threads: int, num_pages: int
) -> None:
    world = World(threads=threads)
    gate = HeldCopies(world.copies, 1, 2)
    num_loads = 0

    def begin_load() -> None:
        nonlocal num_loads
        num_loads += 1
        page = num_loads % 16
        world.copies.submit(load(num_loads, pages(page), pages(page)))

    for _ in range(20):
        begin_load()
    until(lambda: len(gate.calls) == threads)
    written = pages(*range(20, 20 + num_pages))
    world.copies.submit(write(0, written, written))
    gate.let_go()
    # There is always a load that waits, until the write has ended: it keeps its pages that long.
    while (done := world.take(1)[0]).number:
        assert num_loads < 400, "it waits as long as loads follow each other"
        begin_load()
    assert done.error is None
    # One piece a page. Threads may begin a piece each before one of them is heard of.
    turns = [number for number, (what, _) in enumerate(gate.calls) if what == "write"]
    assert max(np.diff([0, *turns])) <= 8 + 2 * threads, gate.calls
    world.close()


def test_an_order_that_fails_ends_after_its_pieces_that_run(worlds: Worlds) -> None:
    world = worlds(threads=2)
    for page in range(4):
        world.fill(page, page)
    world.copies.submit(write(0, pages(0, 1, 2, 3), pages(0, 1, 2, 3)))
    assert world.take(1)[0].error is None
    gate = HeldCopies(world.copies, 10)
    # The second page is in no pool; the third must not be begun any more.
    world.copies.submit(load(5, pages(0, 1, 2), pages(10, 24, 11)))
    world.copies.submit(load(6, pages(3), pages(12)))
    # The thread that failed goes on.
    assert [(done.number, done.error) for done in world.take(1)] == [(6, None)]
    assert gate.calls == [("load", [10]), ("load", [24]), ("load", [12])]
    assert world.results.empty(), "its first piece may still write page 10"
    gate.let_go()
    (done,) = world.take(1)
    assert (done.number, done.num_bytes) == (5, world.page_bytes)
    assert isinstance(done.error, PageStateError)
    assert "device page 24" in str(done.error)
    assert world.holds(10, 0)
    assert not world.pool.read_pages([11]).any()
    assert world.holds(12, 3)


def test_close_waits_for_what_runs_and_ends_the_rest(worlds: Worlds) -> None:
    world = worlds(threads=2)
    for page in range(24):
        world.fill(page, page)
    gate = HeldCopies(world.copies, 20, 21)
    world.copies.submit(write(1, pages(20, 21), pages(0, 1)))
    world.copies.submit(write(2, pages(30), pages(2)))
    until(lambda: len(gate.calls) == 2)
    for number in (3, 4):
        world.copies.submit(load(number, pages(number), pages(number)))
    world.copies.submit(write(5, pages(35), pages(5)))
    closer = threading.Thread(target=world.copies.close)
    closer.start()
    until(lambda: world.copies._closed)
    assert world.results.empty()
    gate.let_go()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    found = {done.number: done for done in world.take(5)}
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert world.results.empty()
    assert found[1] == HostCopyDone(1, None, 2 * world.page_bytes, found[1].seconds)
    for number in (2, 3, 4, 5):
        assert isinstance(found[number].error, ClosedError)
        assert (found[number].num_bytes, found[number].seconds) == (0, 0)
    assert len(gate.calls) == 2
    world.copies.close()
    with pytest.raises(ClosedError):
        world.copies.submit(load(6, pages(0), pages(0)))


def test_threads_of_which_one_cannot_be_had_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has no stream: it would leave its orders without an end."""
    before, start = set(threading.enumerate()), threading.Thread.start

    def fails_at_the_third(thread: threading.Thread) -> None:
        if thread.name == "prefixkv-many-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    def none_left(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(threading.Thread, "start", fails_at_the_third)
    monkeypatch.setattr(torch.cuda, "Stream", none_left)
    for num, device, why in ((4, "cpu", "can't start"), (2, "cuda:0", "out of memory")):
        with pytest.raises(RuntimeError, match=why):
            copies.CopyThreads(num, device, "many")
        assert set(threading.enumerate()) == before


@GPU
def test_on_cuda_a_copy_is_over_when_it_is_reported() -> None:
    pool = KVPool.create(64, 16, 8, 4, 64, device="cuda:0")
    layout = pool.layout
    host = HostPool(layout, 64, "cuda:0")
    until(lambda: host.ready_pages == 64)
    data = torch.randint(0, 256, (64, 16, 16, 4, 128), dtype=torch.uint8)
    pool.write_pages(range(64), data)
    results: Results = SimpleQueue()
    config = HostConfig(piece_bytes=4 * layout.page_bytes)
    copies = HostCopies(layout, host, config, results.put, "cuda:0")
    rows = np.random.default_rng(1).permutation(64).astype(np.int32)
    copies.submit(write(1, rows, np.arange(64, dtype=np.int32)))
    assert results.get(timeout=WAIT_S).error is None
    pool.write_pages(range(64), torch.zeros_like(data))
    copies.submit(load(2, rows[::-1].copy(), np.arange(64, dtype=np.int32)))
    assert results.get(timeout=WAIT_S).error is None
    assert torch.equal(pool.read_pages(range(64)), data.flip(0))
    copies.close()
    host.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_order_waits_for_the_device_and_others_overtake_it(threads: int, worlds: Worlds) -> None:
    world = worlds(threads=threads)
    world.fill(0, 0)
    world.fill(1, 1)
    late, later = Gate(), Gate()
    world.copies.submit(write(1, pages(0, 1), pages(0, 1)), late)
    world.copies.submit(load(2, pages(10), pages(10)), later)
    until(lambda: late.queries > 3 and later.queries > 3)
    world.copies.submit(write(3, pages(2), pages(2)))
    world.copies.submit(load(4, pages(11), pages(11)))
    assert sorted(done.number for done in world.take(2)) == [3, 4]
    assert world.results.empty()
    # What the device has done by then is what is copied.
    world.fill(1, 7)
    late.answer = True
    assert [done.number for done in world.take(1)] == [1]
    later.answer = True
    assert [(done.number, done.error) for done in world.take(1)] == [(2, None)]
    world.copies.submit(load(5, pages(1), pages(5)))
    world.take(1)
    assert world.holds(5, 7)


def test_threads_sleep_once_no_order_waits_for_the_device(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class Wakes(SimpleQueue[None]):
        def get(self, block: bool = True, timeout: float | None = None) -> None:
            waits.append(timeout)
            super().get(block, timeout)

    monkeypatch.setattr(copies, "SimpleQueue", Wakes)
    world, event = worlds(), Gate()
    world.copies.submit(write(1, pages(0), pages(0)), event)
    # Nothing wakes a thread when the device is done, so it has to look now and then.
    until(lambda: event.queries > 3)
    assert waits[-1] is not None
    event.answer = True
    world.take(1)
    until(lambda: waits[-1] is None, state=lambda: f"waiting without a limit: {waits[-1]}")


def test_an_event_that_raises_fails_its_order_alone(world: World) -> None:
    lost, late = Gate(RuntimeError("the device is lost")), Gate()
    world.copies.submit(write(1, pages(0), pages(0)), lost)
    world.copies.submit(write(2, pages(1), pages(1)))
    failed, good = sorted(world.take(2), key=lambda done: done.number)
    assert isinstance(failed.error, RuntimeError)
    assert (failed.num_bytes, failed.seconds, good.error) == (0, 0.0, None)
    world.copies.submit(write(3, pages(2), pages(2)), late)
    world.close()
    (cut_off,) = world.take(1)
    assert isinstance(cut_off.error, ClosedError)


# --- staging's copies, by threads of the same class -----------------------------------------------


def test_staging_s_copies_start_in_order_and_each_is_reported_once() -> None:
    results: SimpleQueue[CopyDone] = SimpleQueue()
    ran: list[int] = []
    error = OSError("no")

    def copy(number: int) -> None:
        ran.append(number)
        if number == 7:
            raise error

    pool = CopyPool(1, results.put)
    for number in range(50):
        pool.submit(number, partial(copy, number))
    found = [results.get(timeout=WAIT_S) for _ in range(50)]
    assert found == [CopyDone(number, error if number == 7 else None) for number in range(50)]
    assert ran == list(range(50))
    pool.close()
    assert results.empty()
    with pytest.raises(ClosedError):
        pool.submit(50, lambda: None)


@pytest.mark.parametrize(("failing", "first"), [(0, -1), (1, 0), (2, 1), (3, 0)])
def test_the_device_is_waited_for_whatever_became_of_the_copy(failing: int, first: int) -> None:
    errors = [OSError("copy"), OSError("device")]
    ran: list[int] = []

    def step(number: int) -> None:
        ran.append(number)
        if failing & (1 << number):
            raise errors[number]

    error = run_settled(lambda: step(0), lambda: step(1))
    assert error is (errors[first] if failing else None)
    assert ran == [0, 1]


@GPU
def test_on_cuda_a_copy_of_stagings_is_over_when_it_is_reported() -> None:
    results: SimpleQueue[CopyDone] = SimpleQueue()
    source = torch.arange(1 << 24, device="cuda")
    target = torch.zeros_like(source)
    host = torch.zeros(1 << 24, dtype=torch.int64).pin_memory()  # else the copy itself waits
    torch.cuda.synchronize()
    streams: set[int] = set()

    def copy() -> None:
        streams.add(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(200_000_000)  # cycles: without the wait the report would be early
        target.copy_(source)
        host.copy_(target, non_blocking=True)

    pool = CopyPool(1, results.put, device="cuda")
    pool.submit("copy", copy)
    assert results.get(timeout=WAIT_S) == CopyDone("copy")
    assert torch.equal(host, torch.arange(1 << 24))
    assert streams.isdisjoint({torch.cuda.default_stream().cuda_stream})
    pool.close()
