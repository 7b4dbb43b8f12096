"""The books: turns of rooms, order within a room, and when a job ends."""

import numpy as np
import pytest

from prefixkv.errors import AbortedError
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.transport.base import Stamp, TransportEvent, WriteDone, WriteFailed, WriteJob
from prefixkv.transport.jobs import ActiveJob, JobTable, Outbox
from prefixkv.transport.runs import paired_runs, part_indices
from tests.support.transport_pools import make_pool

LAYOUT = make_pool("page_major", 8).layout
ROUTES = {"pages": paired_runs(LAYOUT, LAYOUT)}
PAGE_BYTES = LAYOUT.page_bytes


def write_job(job_id: int, room: int, num_pages: int = 2) -> WriteJob:
    pages = np.arange(num_pages, dtype=np.int32)
    return WriteJob(job_id, PeerId("decode", 1), pages, pages, ChunkTag(1, room, 0, 0, 0))


class Desk:
    """A table, an outbox, and one part at a time taken as a transport does."""

    def __init__(self, max_bytes: int = PAGE_BYTES) -> None:
        self.events: list[TransportEvent] = []
        self.table = JobTable(self.events.append, max_bytes, 1000)
        self.outbox = Outbox()

    def start(self, *jobs: WriteJob) -> None:
        for job in jobs:
            self.table.start(self.outbox, ROUTES, job)

    def post(self) -> tuple[ActiveJob, int]:
        job = next(iter(self.outbox.round()))
        number = job.next_part
        self.table.part_posted(job)
        return job, number

    def end(
        self, job: ActiveJob, number: int, error: Exception | None = None, may_land: bool = True
    ) -> None:
        self.table.part_ended(job, error, may_land)


def test_rooms_take_turns_and_the_jobs_of_a_room_go_in_order() -> None:
    desk = Desk()
    desk.start(
        write_job(1, room=10),
        write_job(2, room=10),
        write_job(3, room=20),
        write_job(4, room=30, num_pages=1),
    )
    order = []
    while desk.outbox:
        job, number = desk.post()
        order.append((job.job.job_id, number))
    assert order == [(1, 0), (3, 0), (4, 0), (1, 1), (3, 1), (2, 0), (2, 1)]


def test_a_job_has_as_many_parts_as_its_stamp_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stamp, "least_parts", lambda stamp, job: 3)
    desk = Desk(max_bytes=4 * PAGE_BYTES)
    desk.start(write_job(1, 1, num_pages=4))
    assert len(desk.post()[0].parts) >= 3


def test_a_job_is_done_with_its_last_part_in_any_order() -> None:
    desk = Desk()
    desk.start(write_job(1, 1, num_pages=3))
    posted = [desk.post() for _ in range(3)]
    for job, number in reversed(posted[1:]):
        desk.end(job, number)
        assert not desk.events
        assert desk.table
    desk.end(*posted[0])
    assert desk.events == [WriteDone(1, 3 * PAGE_BYTES)]
    assert not desk.table


@pytest.mark.parametrize("may_land", [True, False])
def test_after_an_error_nothing_is_posted_and_the_end_waits_for_what_is_in_flight(
    may_land: bool,
) -> None:
    desk = Desk()
    desk.start(write_job(1, 1, num_pages=4))
    posted = [desk.post() for _ in range(3)]
    first, second = ValueError("first"), ValueError("second")
    desk.end(*posted[1], first, may_land)
    assert not desk.outbox
    assert not desk.events
    desk.end(*posted[0], second, may_land=False)
    desk.end(*posted[2])
    assert desk.events == [WriteFailed(1, first, drained=not may_land)]
    assert not desk.table


def test_cancel_stops_what_is_not_posted_only() -> None:
    desk = Desk()
    desk.start(
        write_job(1, 1, num_pages=3), write_job(2, 2, num_pages=1), write_job(3, 3, num_pages=1)
    )
    first = desk.post()
    desk.table.cancel(1)
    assert not desk.events  # a part is in flight
    second = desk.post()
    assert second[0].job.job_id == 2
    desk.table.cancel(2)  # all of it is posted
    desk.table.cancel(3)
    assert [type(e.error) for e in desk.events if isinstance(e, WriteFailed)] == [AbortedError]
    assert not desk.outbox
    desk.end(*second)
    desk.end(*first)
    assert desk.events[1] == WriteDone(2, PAGE_BYTES)
    assert isinstance(desk.events[2], WriteFailed)
    assert desk.events[2].drained
    assert len(desk.events) == 3


def test_parked_jobs_are_cut_once_there_is_a_peer_or_dropped_or_cancelled() -> None:
    desk = Desk()
    jobs = [write_job(n, n) for n in range(4)]
    for job in jobs:
        desk.table.start(desk.outbox, None, job)
    desk.table.cancel(0)
    assert len(desk.events) == 1
    desk.table.cut(desk.outbox, ROUTES)
    job, number = desk.post()
    assert job.job is jobs[1]
    gone = ValueError("gone")
    desk.table.drop(desk.outbox, gone)
    desk.end(job, number)
    assert desk.events[1:] == [
        WriteFailed(2, gone, drained=True),
        WriteFailed(3, gone, drained=True),
        WriteFailed(1, gone, drained=True),
    ]
    assert not desk.table
    assert not desk.outbox


def test_parts_never_outnumber_what_a_tag_can_count() -> None:
    pages = np.arange(8, dtype=np.int32)
    layout = make_pool("heads_first", 4000).layout
    runs = paired_runs(layout, make_pool("layer_major", 4000).layout)  # blocks of 8 bytes
    pages = np.arange(3000, dtype=np.int32)
    job = WriteJob(1, PeerId("decode", 1), pages, pages, ChunkTag(1, 1, 0, 0, 0))
    active = ActiveJob(job, Outbox())
    active.cut(runs, max_bytes=8, max_descriptors=1)
    assert len(active.parts) <= 65535
    assert sum(part.num_bytes for part in active.parts) == 3000 * layout.page_bytes
    assert active.part_tag(len(active.parts) - 1).num_parts == len(active.parts)
    # Each part is to be posted once, with its own blocks and tag, however many are worked out at
    # once.
    for number, part in enumerate(active.parts[:100]):
        src, dst, tag = active.next_post()
        assert [src.tolist(), dst.tolist()] == [
            side.tolist() for side in part_indices(runs, part, pages, pages)
        ]
        assert tag == active.part_tag(number).pack()
        active.next_part += 1
