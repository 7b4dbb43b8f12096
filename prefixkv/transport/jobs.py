"""The writes under way, the same for both transports: every job ends once, by the same rules.

A transport asks an `Outbox` what to post next, and tells the `JobTable` how each part ended.
Nothing here waits, and nothing knows NIXL.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from prefixkv.errors import AbortedError, CallerError, ClosedError, ConfigError, PageStateError
from prefixkv.paging import Pages, checked_pages
from prefixkv.protocol.ids import ChunkTag, RoomKey
from prefixkv.transport.base import Sink, Stamp, WriteDone, WriteFailed, WriteJob
from prefixkv.transport.runs import Part, Routes, Runs, cut_parts, next_indices

_MAX_PARTS = 2**16 - 1  # a tag counts parts in 16 bits
_COUNTED = {"staging": "block", "state": "slot"}  # else pages


class ActiveJob:
    """A job, cut into parts once its peer is connected, with counts of how many are where.

    A part is unposted, then in flight, then ended. The first error stops the unposted ones; the job
    ends when none is in flight and either all have been posted or an error came. `drained` becomes
    False, and stays so, when a part fails that may still land.
    """

    def __init__(self, job: WriteJob, outbox: Outbox) -> None:
        self.job = job
        self.outbox = outbox
        self.room = RoomKey(job.tag.room, job.tag.generation)
        self.runs: Runs | None = None  # None: not cut yet
        self.src_pages: Pages = job.src_pages
        self.dst_pages: Pages = job.dst_pages
        self.parts: list[Part] = []
        # Parts [0, next_part) are posted; `in_flight` of them have not ended.
        self._ready = job.ready
        self.next_part = 0
        self.in_flight = 0
        self.error: Exception | None = None  # the first one
        self.drained = True
        # Worked out for the next parts, the next one last.
        self._ahead: list[tuple[Pages, Pages, bytes]] = []

    def cut(self, runs: Runs, max_bytes: int, max_descriptors: int) -> None:
        """Check the job's pages and cut its parts. Raises PageStateError for pages outside the
        pool, or not as many on both sides: they must not become addresses."""
        what = _COUNTED.get(self.job.route, "page")
        src, dst = runs.src_positions.num_units, runs.dst_positions.num_units
        self.src_pages = checked_pages(self.job.src_pages, src, "source", what)
        self.dst_pages = checked_pages(self.job.dst_pages, dst, "target", what)
        pages = self.src_pages, self.dst_pages
        if len(pages[0]) != len(pages[1]):
            raise PageStateError(
                f"{len(pages[0])} source {what}s for {len(pages[1])} target {what}s"
            )
        self.runs = runs
        self.parts = cut_parts(runs, *pages, max_bytes, max_descriptors)
        # Smaller parts rather than too few: each brings a share of the stamp.
        least = self.outbox.stamp.least_parts(self.job)
        while len(self.parts) < least:
            max_bytes //= 2
            self.parts = cut_parts(runs, *pages, max_bytes, max_descriptors)
        # Larger parts rather than too many: the tag could not count them.
        while len(self.parts) > _MAX_PARTS:
            max_bytes, max_descriptors = 2 * max_bytes, 2 * max_descriptors
            self.parts = cut_parts(runs, *pages, max_bytes, max_descriptors)

    @property
    def may_post(self) -> bool:
        """True while parts are left to post, or to be cut, and nothing has gone wrong."""
        return self.error is None and (self.runs is None or self.next_part < len(self.parts))

    def poll_ready(self) -> bool:
        """Return whether posting may begin. Raises what `ready.query()` raises."""
        # Asked until it says yes, and never again after.
        if self._ready is not None and self._ready.query():
            self._ready = None
        return self._ready is None

    def part_tag(self, part: int) -> ChunkTag:
        """Return the tag that notifies of a part. The pages are counted from what is posted."""
        tag = self.job.tag._replace(
            part=part, num_parts=len(self.parts), num_pages=len(self.dst_pages)
        )
        return self.outbox.stamp.put(self.job, tag)

    def next_post(self) -> tuple[Pages, Pages, bytes]:
        """Return the next part's block indices in the lists of both sides, and its tag; once per
        part, before it counts as posted."""
        if not self._ahead:
            assert self.runs is not None
            pages = self.src_pages, self.dst_pages
            most = self.outbox.stamp.ahead
            pairs = next_indices(self.runs, self.parts, self.next_part, most, *pages)
            numbers = range(self.next_part, self.next_part + len(pairs))
            tags = [self.part_tag(number).pack() for number in numbers]
            self._ahead = [(*pair, tag) for pair, tag in zip(pairs, tags, strict=True)]
            self._ahead.reverse()
        return self._ahead.pop()


class Outbox(OrderedDict[RoomKey, deque[ActiveJob]]):
    """The jobs to one peer with parts to post, by room, the next in turn first. Only rooms with
    jobs; those of a room go in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stamp = Stamp()

    def discard(self, job: ActiveJob) -> None:
        """Take a job out if it is in. O(jobs of its room)."""
        jobs = self.get(job.room)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self[job.room]

    def round(self) -> Iterator[ActiveJob]:
        """Yield the first job of each room, the next in turn first; a room that was looked at goes
        last. The caller may take a job out, and must stop iterating then."""
        for _ in range(len(self)):
            room = next(iter(self))
            # Last before the job is looked at: a room with a job that is not ready must not keep
            # its turn.
            self.move_to_end(room)
            yield self[room][0]

    def all(self) -> list[ActiveJob]:
        return [job for jobs in self.values() for job in jobs]


class JobTable(dict[int, ActiveJob]):
    """Every job that has not ended. Each end is made here, so a job ends once, with one event."""

    def __init__(self, emit: Sink, max_bytes: int, max_descriptors: int) -> None:
        self._emit = emit
        self._max_bytes = max_bytes
        self._max_descriptors = max_descriptors

    def refuse(self, job: WriteJob, error: Exception) -> None:
        """End a job for a peer that is not there."""
        self._emit(WriteFailed(job.job_id, error, drained=True))

    def start(self, outbox: Outbox, routes: Routes | None, job: WriteJob) -> None:
        """Queue a job, to be cut now, or once its peer is connected where `routes` are None."""
        active = self[job.job_id] = ActiveJob(job, outbox)
        outbox.setdefault(active.room, deque()).append(active)
        if routes is not None:
            self._cut(active, routes)

    def cut(self, outbox: Outbox, routes: Routes) -> None:
        """Cut the jobs that waited for the peer, in their order."""
        for job in outbox.all():
            if job.runs is None:
                self._cut(job, routes)

    def _cut(self, job: ActiveJob, routes: Routes) -> None:
        """Bad pages or blocks, or a route that is not there, end it."""
        peer, route = job.job.peer, job.job.route
        try:
            if route not in routes:
                what = f"a write to {peer.name} by way of {route}"
                raise ConfigError(f"{what}: this side or that one has none")
            job.cut(routes[route], self._max_bytes, self._max_descriptors)
        except CallerError as error:
            self.stop(job, error.with_traceback(None))  # its frames would keep the agent

    def cancel(self, job_id: int) -> None:
        """Post no more of a job. Ended or unknown: no-op."""
        if (job := self.get(job_id)) is not None:
            self.stop(job, AbortedError(f"job {job_id} was cancelled"))

    def stop(self, job: ActiveJob, error: Exception) -> None:
        """Post no more of the job. It ends now, or with the last of its parts in flight. Once all
        is posted there is nothing to stop: the parts decide."""
        if job.may_post:
            job.error = error
        self._end_if_over(job)

    def part_posted(self, job: ActiveJob) -> None:
        """Count a part as posted; a job with nothing left to post leaves its outbox."""
        job.next_part += 1
        job.in_flight += 1
        if not job.may_post:
            job.outbox.discard(job)

    def part_ended(self, job: ActiveJob, error: Exception | None, may_land: bool) -> None:
        """Take the end of a part: DONE if `error` is None; `may_land`: it may still land."""
        job.in_flight -= 1
        if error is not None:
            job.drained = job.drained and not may_land
            job.error = job.error or error
        self._end_if_over(job)

    def drop(self, outbox: Outbox, error: Exception) -> None:
        """Post no more jobs to a peer: all in its outbox end, now or with their parts in flight."""
        for job in outbox.all():
            self.stop(job, error)

    def close(self, fenced: bool) -> None:
        """End every job; `fenced`: nothing of the transport can land any more."""
        # Emptied first, so that an event's consequences find no job that is ended twice.
        jobs = dict(self)
        self.clear()
        closed = ClosedError("the transport was closed")
        for job_id, job in jobs.items():
            self._emit(WriteFailed(job_id, job.error or closed, drained=fenced))

    def _end_if_over(self, job: ActiveJob) -> None:
        # Out of its outbox first: nothing more of it may be posted, even if parts are in flight.
        if job.may_post:
            return
        job.outbox.discard(job)
        if not job.in_flight and self.pop(number := job.job.job_id, None) is not None:
            if job.error is not None:
                self._emit(WriteFailed(number, job.error, job.drained))
            else:
                assert job.runs is not None
                of_page = sum(group.num_runs * group.block_bytes for group in job.runs.groups)
                self._emit(WriteDone(number, len(job.src_pages) * of_page))
