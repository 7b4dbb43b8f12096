"""Checksums over real transports: a page whose bytes are not those that prefill wrote fails its
request by name, and nothing of it is cached, whatever the meshes, layouts, routes and groups."""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import Backend, DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.control.decode.looks import LookAt, PageLooks, PagesLookedAt, PageSpan
from prefixkv.errors import ChecksumError
from prefixkv.memory import page_sums
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh, Shard
from prefixkv.memory.page_sums import ALGORITHMS, SumPlan
from prefixkv.protocol.ids import ChunkTag
from prefixkv.runtime import staging as staging_copies
from prefixkv.runtime import transfers
from prefixkv.runtime.looks import LookThreads
from prefixkv.transport.base import CHECKS, RankMemory, WriteJob
from prefixkv.transport.transports import Transports
from tests.support.mesh_workers import MeshPair, WindowPair
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.support.state_workers import StatePair
from tests.unit.runtime.conftest import QUICK

LEASE = 16 << 10


def checked(backend: Backend = "nixl", staging: int = 0, **more: Any) -> dict[str, Any]:
    transport = TransportConfig(
        backend=backend, staging_bytes=staging, lease_bytes=LEASE, checksums=True, **more
    )
    return {
        "prefill_config": PrefillConfig(transport=transport, control=QUICK),
        "decode_config": DecodeConfig(transport=transport, control=QUICK),
    }


# --- what goes wrong on the way -------------------------------------------------------------------

Fault = Callable[[WriteJob, np.ndarray, np.ndarray], None]
"""Changes the source and the target pages of a write, in place."""


def swapped(job: WriteJob, src: np.ndarray, dst: np.ndarray) -> None:
    dst[:2] = dst[1::-1]


def repeated(job: WriteJob, src: np.ndarray, dst: np.ndarray) -> None:
    src[1] = src[0]


def dropped(job: WriteJob, src: np.ndarray, dst: np.ndarray) -> None:
    """The last page goes where the first one is, which is then as it ought to be."""
    src[-1], dst[-1] = src[0], dst[0]


def another(job: WriteJob, src: np.ndarray, dst: np.ndarray) -> None:
    """Of another request, say."""
    src[0] = src[0] - 1 if src[0] else 1


class FaultyWires:
    """Writes go wrong, of `rooms` the first that is long enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault: Fault | None = None
        self.routes = ("pages", "staging")
        self.rooms: set[int] = set()
        self.hit: set[int] = set()
        self.num_jobs = 0
        write = Transports.write

        def faulty(transports: Transports, job: WriteJob) -> None:
            self.num_jobs += 1
            write(transports, self.changed(job))

        monkeypatch.setattr(Transports, "write", faulty)

    def changed(self, job: WriteJob) -> WriteJob:
        room = job.tag.room
        enough = len(job.src_pages) > (self.fault is not another)
        if self.fault is None or room not in self.rooms - self.hit or not enough:
            return job
        if job.route not in self.routes:
            return job
        src, dst = job.src_pages.copy(), job.dst_pages.copy()
        self.fault(job, src, dst)
        assert (src.tolist(), dst.tolist()) != (job.src_pages.tolist(), job.dst_pages.tolist())
        # What is summed is what the engine has handed over, as of a transport that goes wrong.
        units = job.src_pages if job.units is None else job.units
        self.hit.add(room)
        return replace(job, src_pages=src, dst_pages=dst, units=units)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> FaultyWires:
    return FaultyWires(monkeypatch)


def sums_of(pair: Any) -> dict[str, int]:
    """Over all ranks of decode."""
    sides = [pair.decode, *getattr(pair.decode, "others", [])]
    stats = [side.transfers.stats() for side in sides]
    names = "checksums", "checksum_mismatches"
    return {name: sum(one.get(name, 0) for one in stats) for name in names}


def prompts(length: int, rids: Iterable[str]) -> dict[str, Any]:
    return {
        rid: tokens_of(int(rid.split(".")[0]), length + number) for number, rid in enumerate(rids)
    }


def find_each(pair: MeshPair, wires: FaultyWires, rooms: range = range(1, 7)) -> None:
    """Every second request goes wrong: it fails by name, and only it; nothing of it is cached; and
    asked for again it comes whole."""
    wires.rooms = {*rooms[::2]}
    rids = [f"{number}.first" for number in rooms]
    pair.serve(rooms.start, prompts(61, rids))
    assert wires.hit == wires.rooms
    bad = {rids[room - rooms.start] for room in wires.hit}
    assert pair.failed.keys() == bad
    for error in pair.failed.values():
        assert isinstance(error, ChecksumError)
        assert re.search("room .* chunk .*page ", str(error))
    found = sums_of(pair)
    assert found["checksum_mismatches"] >= len(bad)
    assert found["checksums"] > 0
    wires.fault = None
    again = [rid.replace("first", "again") for rid in rids]
    pair.serve(rooms.stop, prompts(61, again))
    assert pair.failed.keys() == bad
    whole = [pair.d.prefix_lens[rid][0] for rid in again]
    page_size = pair.decode_pools[0].layout.page_size
    assert [length > 0 for length in whole] == [rid not in bad for rid in rids], whole
    assert max(whole) >= 60 // page_size * page_size - page_size
    pair.check_at_rest()


def mesh(tp: int) -> Mesh:
    return Mesh(4, 4, tp)


FAULTS = [swapped, repeated, dropped, another]
SMALL = {"post_bytes": 1 << 12}  # many parts for each write
PAIRS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "direct": ((1, 1), checked()),
    "direct, shm": ((1, 1), checked("shm")),
    "direct, in many parts": ((1, 1), checked(**SMALL)),
    "direct, shm in many parts": ((1, 1), checked("shm", **SMALL)),
    "sliced": ((2, 1), checked()),
    "sliced, shm": ((1, 2), checked("shm")),
    "staged": ((2, 1), checked(staging=8 * LEASE)),
    "staged, 1.5 leases, in many parts": ((1, 2), checked(staging=LEASE * 3 // 2, **SMALL)),
}
ORDERS = ("page_major", "layer_major")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", PAIRS)
def test_each_page_that_is_not_what_was_written_is_found(
    kind: str, fault: Fault, wires: FaultyWires
) -> None:
    (prefill, decode), options = PAIRS[kind]
    wires.fault = fault
    with MeshPair(mesh(prefill), mesh(decode), orders=ORDERS, num_pages=256, **options) as pair:
        find_each(pair, wires)
        assert (pair.prefill.stats()["staging_pieces_written"] > 0) is kind.startswith("staged")


@pytest.mark.parametrize("page_sizes", [(4, 16), (16, 4)], ids=str)
@pytest.mark.parametrize("backend", ["nixl", "shm"])
def test_pages_of_other_sizes_are_compared_in_units_of_the_smaller_one(
    page_sizes: tuple[int, int], backend: Backend, wires: FaultyWires
) -> None:
    wires.fault = repeated
    options: Any = checked(backend) | {"page_sizes": page_sizes, "chunk": 32, "num_pages": 128}
    with MeshPair(mesh(2), mesh(2), **options) as pair:
        find_each(pair, wires)


@pytest.mark.parametrize(
    ("meshes", "more"),
    [
        ((Mesh(4, 1, 2), Mesh(4, 1)), {"attention": "mla"}),
        ((mesh(2), mesh(2)), {"opaque": "amx"}),
        ((Mesh(4, 4, 1, 2, (1, 3)), mesh(2)), {}),
    ],
    ids=["mla", "opaque", "uneven stages"],
)
def test_pages_of_each_kind(
    meshes: tuple[Mesh, Mesh], more: dict[str, Any], wires: FaultyWires
) -> None:
    wires.fault = repeated
    with MeshPair(*meshes, num_pages=256, **checked("shm"), **more) as pair:
        find_each(pair, wires)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_sides_take_the_best_algorithm_that_both_have(
    algorithm: str, wires: FaultyWires, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CHECKS[0]._replace(algorithms=(algorithm,))
    monkeypatch.setattr(transfers, "CHECKS", [one])
    wires.fault = swapped
    with MeshPair(mesh(1), mesh(1), num_pages=256, **checked("shm")) as pair:
        find_each(pair, wires)


@pytest.mark.parametrize("kind", ["direct", "direct, shm in many parts", "sliced"])
def test_a_bit_that_flips_in_memory_is_found(
    kind: str, wires: FaultyWires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the write, before the notification is heard."""
    (num_writers, decode), options = PAIRS[kind]
    with MeshPair(mesh(num_writers), mesh(decode), num_pages=256, **options) as pair:
        on_landed = PageLooks.on_landed

        def flipped(looks: PageLooks, room: Any, tag: ChunkTag, now_s: float) -> None:
            if room.key.room in wires.rooms - wires.hit:
                wires.hit.add(room.key.room)
                page, keys = int(room.promise.page_ids()[tag.first]), pair.decode_pools[0].k(1)
                # Of this rank's heads: the write of another rank may still come.
                head = tag.rank * keys.shape[2] // num_writers
                keys.view(torch.uint8)[page, 3, head, 7] ^= 1
            on_landed(looks, room, tag, now_s)

        monkeypatch.setattr(PageLooks, "on_landed", flipped)
        find_each(pair, wires)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_so_is_a_scatter_that_goes_wrong(
    sizes: tuple[int, int], wires: FaultyWires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last scatter of a room, too: success has been held back for it."""
    scatter = staging_copies.scatter_together
    calls: list[int] = []

    def wrong(parts: Any, units: Any) -> None:
        calls.append(len(units))
        scatter(parts, units if len(calls) % 4 else units[::-1].copy())

    monkeypatch.setattr(staging_copies, "scatter_together", wrong)
    with MeshPair(
        mesh(sizes[0]), mesh(sizes[1]), num_pages=256, **checked(staging=8 * LEASE)
    ) as pair:
        pair.serve(1, prompts(61, [f"{number}.first" for number in range(8)]))
        num_wrong = sum(1 for nth, count in enumerate(calls, 1) if nth % 4 == 0 and count > 1)
        assert len(pair.failed) > 0 < num_wrong
        assert all(isinstance(error, ChecksumError) for error in pair.failed.values())
        pair.check_at_rest()


def test_what_keeps_a_look_from_being_done_is_its_answer() -> None:
    pool = KVPool.create(num_pages=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=4)
    layout = pool.layout
    answers: list[PagesLookedAt] = []
    threads = LookThreads(RankMemory(layout), TransportConfig(), "test", answers.append)
    span = PageSpan(-1, np.arange(1, dtype=np.int32), bytes(4))
    threads.submit(LookAt(7, SumPlan("md5", Shard.whole(layout), 4), [span], "a chunk"))
    until(lambda: bool(answers))
    threads.close()
    assert [(one.look_id, type(one.error)) for one in answers] == [(7, KeyError)]


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nixl", "shm"])
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("route", ["window 0", "pages"])
def test_pages_of_windows_and_of_aligned_groups(
    route: str, tp_sizes: tuple[int, int], backend: Backend, wires: FaultyWires
) -> None:
    wires.fault, wires.routes, wires.rooms = another, (route,), {1, 3}
    options = checked(backend)
    options["prefill_config"] = replace(options["prefill_config"], checkpoints=4)
    options["decode_config"] = replace(options["decode_config"], reserve_tokens=0)
    heads = (2, 4, 2)
    with WindowPair(tp_sizes=tp_sizes, heads=heads, shared=backend == "shm", **options) as pair:
        for number in range(1, 5):
            pair.submit(f"r{number}", tokens_of(number, 30), 6, room=number)
            pair.run(f"r{number}")
        assert pair.failed.keys() == {"r1", "r3"}
        assert all(isinstance(error, ChecksumError) for error in pair.failed.values())
        pair.serve(5, {"r1 again": tokens_of(1, 30), "r3 again": tokens_of(3, 30)})
        assert pair.d.prefix_lens["r1 again"] == pair.d.prefix_lens["r3 again"] == [0]
        pair.check_at_rest()


@pytest.mark.parametrize(
    ("sizes", "leases"), [((1, 1), 0), ((2, 1), 0), ((1, 2), 0), ((2, 1), 8)], ids=str
)
def test_extra_state(sizes: tuple[int, int], leases: int, wires: FaultyWires) -> None:
    wires.fault, wires.routes, wires.rooms = another, ("state",), {1, 3}
    with StatePair(mesh(sizes[0]), mesh(sizes[1]), **checked(staging=leases * LEASE)) as pair:
        pair.serve(1, prompts(30, [f"{number}.first" for number in range(4)]))
        assert pair.failed.keys() == {"0.first", "2.first"}
        assert all(isinstance(error, ChecksumError) for error in pair.failed.values())
        pair.check()


# --- whether it is on -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_where_one_side_has_it_off_nothing_is_summed_and_both_logs_say_so_once(
    side: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = checked("shm")
    config = options[f"{side}_config"]
    options[f"{side}_config"] = replace(
        config, transport=replace(config.transport, checksums=False)
    )
    monkeypatch.setattr(page_sums.PageSums, "of", None)
    caplog.set_level(logging.INFO, "prefixkv.peers")
    with MeshPair(mesh(1), mesh(1), **options) as pair:
        pair.serve(1, prompts(61, ["0.first", "1.first"]))
        assert not pair.failed
        assert sums_of(pair) == {"checksums": 0, "checksum_mismatches": 0}
    said = [line for line in caplog.messages if "unchecked" in line]
    assert len(said) == (2 if side == "prefill" else 1)
    assert all(f"{side} has `checksums` off" in line or "it has" in line for line in said)
