"""A state machine over the decode scheduler: any order of arrive, admit, transfer, fail, abort,
retract, finish, evict and flush, with the other side played by rules. After every rule all laws
hold; at the end nothing may be left.

What a page was written with is known: for which tokens, and of which weights. A second rank follows
the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import OutOfPagesError, RequestError, TransferError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.commands import AbortRoom, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.timed import DecodeScheduler

PAGE_SIZE = 2


@dataclass
class Event:
    """Device work that is done when told so."""

    done: bool = False

    def query(self) -> bool:
        return self.done


class LockMachine(RuleBasedStateMachine):
    """`rooms` are those the control plane has open; `aborting` those it has been told to abort and
    may still see succeed; `undrained` have ended and may still be written. `writable` are their
    pages, and what comes there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.count = 0
        self.count_bursts = 0
        self.rooms: set[RoomKey] = set()
        self.aborting: set[RoomKey] = set()
        self.undrained: set[RoomKey] = set()
        self.writable: dict[RoomKey, dict[int, Written]] = {}
        self.written: dict[int, Written] = {}  # whole pages
        self.running: list[DecodeRequest] = []
        self.events: list[Event] = []

    @initialize(
        num_pages=st.sampled_from([8, 12, 16, 24, 32]),
        rows=st.sampled_from([2, 3, 6]),
        reserve=st.sampled_from([0, 2]),
        policy=st.sampled_from(["fail", "retry"]),
        caching=st.sampled_from([True, True, True, False]),
        admission=st.sampled_from(["hit_aware", "hit_aware", "fifo", "priority"]),
        patience_s=st.sampled_from([0.0, 5.0, 1e9]),
        waiting_timeout_s=st.sampled_from([20.0, 1e9]),
    )
    def start(
        self, num_pages: int, rows: int, reserve: int, policy: str, caching: bool, admission: str,
        patience_s: float, waiting_timeout_s: float,
    ) -> None:  # fmt: skip
        self.patience_s, self.waiting_timeout_s = patience_s, waiting_timeout_s
        self.log = RankLog()
        self.log.sizes = RankSizes("decode", num_pages, PAGE_SIZE, rows)
        self.follower = RowFollower(self.log.sizes)
        pages = PageManager(num_pages, PAGE_SIZE, rows, caching=caching)
        pages.hash_every_pages = 1
        self.scheduler = DecodeScheduler(
            pages, reserve_tokens=reserve, max_retries=int(policy == "retry"), admission=admission,
            patience_s=patience_s, waiting_timeout_s=waiting_timeout_s,
        )  # fmt: skip

    # --- the engine's side ------------------------------------------------------------------------

    @rule(
        tokens=st.one_of(
            st.sampled_from([[0] * 6, [0] * 7, [0] * 4 + [1] * 3]),
            st.lists(st.integers(0, 1), min_size=1, max_size=12),
        ),
        max_new=st.sampled_from([1, 3, 6]),
        cacheable=st.sampled_from([True, True, True, False]),
        namespace=st.sampled_from([None, None, "lora"]),
        twins=st.sampled_from([1, 2, 4]),
    )
    def arrive(
        self, tokens: list[int], max_new: int, cacheable: bool, namespace: str | None, twins: int
    ) -> None:
        for _ in range(twins):
            self._arrive(tokens, max_new, cacheable, namespace)

    @rule(
        system=st.integers(1, 4),
        suffixes=st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=2, max_size=5),
        then=st.sampled_from(
            ["nothing", "the first is aborted", "its room fails", "it succeeds", "a flush"]
        ),
    )
    def burst(self, system: int, suffixes: list[list[int]], then: str) -> None:
        """Requests with one new system prompt, and what becomes of the first while they are on
        their way."""
        first = self.count + 1
        for suffix in suffixes:
            self._arrive([2 + self.count_bursts % 3] * (system * PAGE_SIZE) + suffix, 3, True, None)
        self.count_bursts += 1
        self.admit()
        key = RoomKey(first, 0)
        if then == "the first is aborted":
            self._abort(f"r{first}", None)
        elif then == "its room fails" and key in self.rooms:
            self._fail(key)
        elif then == "it succeeds" and key in self.rooms:
            self._succeed(key)
        elif then == "a flush":
            self.flush()

    def _arrive(
        self, tokens: list[int], max_new: int, cacheable: bool, namespace: str | None
    ) -> None:
        self.count += 1
        request = Request(
            f"r{self.count}", tokens, max_new_tokens=max_new, room=self.count, prefill="p",
            namespace=namespace, cacheable=cacheable, priority=self.count % 3,
        )  # fmt: skip
        try:
            self.scheduler.add(request, self.now_s)
        except RequestError:
            assert len(tokens) + max_new > PAGE_SIZE * self.scheduler.pages.num_pages - PAGE_SIZE

    @rule()
    def admit(self) -> None:
        waited = {req: req.state for req in self.scheduler.waiting}
        proved = self._proved_pages()
        admitted = [
            req
            for req in self.scheduler.pop_preallocated(self.now_s)
            if waited[req] is DecodeState.QUEUED
        ]
        self._nobody_was_overtaken_for_too_long(admitted, min(proved, self._proved_pages()))
        self._carry_out()
        for ask in self.scheduler.pop_needs_prefill():
            assert RoomKey(ask.room, ask.generation) in self.rooms
            assert (
                ask.known_token is None
                or ask.known_token == self.scheduler.requests[ask.rid].output[-1]
            )

    def _proved_pages(self) -> int:
        """Those that nobody but running requests keeps from the waiting ones."""
        pages = self.scheduler.pages.allocator
        return pages.num_pages - pages.held_pages - pages.quarantined_pages

    def _nobody_was_overtaken_for_too_long(
        self, admitted: list[DecodeRequest], proved: int
    ) -> None:
        """But for those that may need more pages than the running ones can give back."""
        waiting = [req for req in self.scheduler.waiting if req.max_pages <= proved]
        if any(req.state is DecodeState.RETRACTED for req in waiting):
            assert not admitted, "who was admitted before comes first of all"
        for late in [req for req in waiting if req.state is DecodeState.QUEUED]:
            waited_s = self.now_s - late.arrived_s
            assert waited_s < self.waiting_timeout_s
            if waited_s >= self.patience_s:
                assert all(req.room < late.room for req in admitted), (
                    "nothing overtakes it any more"
                )

    @rule()
    def commit(self) -> None:
        committed = self.scheduler.pop_transferred(self.now_s)
        self.running += committed
        for req in committed:
            self._check_content(req)

    @rule(token=st.integers(0, 1))
    def all_goes_well(self, token: int) -> None:
        """A shortcut to where requests run, so that what happens there is seen often."""
        self.admit()
        for key in sorted(self.rooms):
            self._succeed(key)
        self.commit()
        for req in [req for req in self.running if len(req.output) == req.max_new_tokens]:
            self.running.remove(req)
            self._check_content(req)
            self.scheduler.finish(req, self.now_s)
        if self.running:
            self._append(list(self.running), token)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        reqs = data.draw(st.lists(st.sampled_from(self.running), unique_by=id, min_size=1))
        self._append([req for req in reqs if len(req.output) < req.max_new_tokens], token)

    def _append(self, reqs: list[DecodeRequest], token: int) -> None:
        pages_before = self.scheduler.pages.allocator.owned_pages
        try:
            self.scheduler.append_many(reqs, [token] * len(reqs), self.now_s)
        except OutOfPagesError as error:
            assert self.scheduler.pages.allocator.owned_pages == pages_before
            assert self.running_rids()[0] not in error.retract, "the oldest is never named"
            for rid in error.retract[:1]:
                self._retract(rid, None)
            return
        for req in reqs:
            if req.kv_len % PAGE_SIZE == 0:  # the step before has filled a page
                page = req.kv_len // PAGE_SIZE - 1
                self.written[int(req.pages[page])] = written(req, page)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), deferred=st.booleans(), continues=st.sampled_from([None, True, False]),
        keep=st.none() | st.integers(0, 40),
    )  # fmt: skip
    def finish(
        self, data: st.DataObject, deferred: bool, continues: bool | None, keep: int | None
    ) -> None:
        req = data.draw(st.sampled_from(self.running))
        self.running.remove(req)
        self._check_content(req)
        self.scheduler.finish(req, self.now_s, self._event(deferred), continues, keep)

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data(), deferred=st.booleans())
    def retract(self, data: st.DataObject, deferred: bool) -> None:
        oldest = self.running_rids()[0]
        req = data.draw(st.sampled_from(self.running))
        if req.rid != oldest:
            self._retract(req.rid, self._event(deferred))

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), deferred=st.booleans())
    def abort(self, data: st.DataObject, deferred: bool) -> None:
        self._abort(
            data.draw(st.sampled_from(sorted(self.scheduler.requests))), self._event(deferred)
        )

    @precondition(lambda self: any(flight.waiters for flight in self.scheduler.flights))
    @rule(data=st.data())
    def abort_an_owner(self, data: st.DataObject) -> None:
        owners = [
            flight.owner.rid for flight in self.scheduler.flights if flight.waiters and flight.owner
        ]
        if owners:
            self._abort(data.draw(st.sampled_from(owners)), None)

    def _abort(self, rid: str, after: Event | None) -> None:
        if rid not in self.scheduler.requests:
            return
        assert self.scheduler.abort(rid, self.now_s, after=after)
        assert not self.scheduler.abort(rid, self.now_s), "a second abort is a no-op"
        self.running = [req for req in self.running if req.rid != rid]
        self._carry_out()

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        page_manager = self.scheduler.pages
        pages = page_manager.cache.evict(
            min(num_pages, page_manager.cache.evictable_pages), now_s=self.now_s
        )
        page_manager.allocator.uncache(pages)
        page_manager.allocator.free(pages)
        page_manager.version += 1

    @rule()
    def flush(self) -> None:
        self.scheduler.flush()
        self._carry_out()

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def device_is_done(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.events))
        event.done = True
        self.events.remove(event)
        self.scheduler.release_deferred(self.now_s)

    # --- the other side ---------------------------------------------------------------------------

    @precondition(lambda self: self.rooms | self.aborting)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        self._succeed(data.draw(st.sampled_from(sorted(self.rooms | self.aborting))))

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def abort_crosses_success(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rooms)))
        flight = self.scheduler.arriving.get(key)
        assert flight is not None
        if flight.owner is not None:
            self.scheduler.abort(flight.owner.rid, self.now_s)
            self._carry_out()
        self._succeed(key)

    @precondition(lambda self: self.aborting)
    @rule(data=st.data())
    def abort_comes_through(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.aborting)))
        self.aborting.remove(key)
        self.undrained.add(key)
        self.scheduler.room_ended(key, KVPoll.FAILED, TransferError("aborted"), b"", self.now_s)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), drained=st.booleans())
    def fail(self, data: st.DataObject, drained: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.rooms)))
        self._fail(key)
        if drained:
            self._drain(key)

    def _fail(self, key: RoomKey) -> None:
        self.rooms.remove(key)
        self.undrained.add(key)
        self.scheduler.room_ended(key, KVPoll.FAILED, TransferError("failed"), b"", self.now_s)
        self._carry_out()

    @precondition(lambda self: self.undrained)
    @rule(data=st.data(), overdue_first=st.booleans())
    def drain(self, data: st.DataObject, overdue_first: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.undrained)))
        if overdue_first:
            self.scheduler.room_overdue(key)
        self._drain(key)

    # --- what all rules share ---------------------------------------------------------------------

    def running_rids(self) -> list[str]:
        return [rid for rid, req in self.scheduler.requests.items() if req.state in _CAN_RUN]

    def _event(self, deferred: bool) -> Event | None:
        if not deferred:
            return None
        self.events.append(Event())
        return self.events[-1]

    def _retract(self, rid: str, after: Event | None) -> None:
        self.scheduler.retract(rid, self.now_s, after)
        self.running = [req for req in self.running if req.rid != rid]

    def _succeed(self, key: RoomKey) -> None:
        self.rooms.discard(key)
        self.aborting.discard(key)
        self.written |= self.writable.pop(key)
        self.scheduler.room_ended(key, KVPoll.SUCCESS, None, b"", self.now_s)

    def _drain(self, key: RoomKey) -> None:
        self.undrained.remove(key)
        for page in self.writable.pop(key):
            self.written.pop(page, None)  # perhaps some of it has come, perhaps not
        self.scheduler.room_drained(key)

    def _carry_out(self) -> None:
        for command in self.scheduler.take_commands():
            match command:
                case OpenRoom(promise):
                    key = RoomKey(promise.room, promise.generation)
                    self.rooms.add(key)
                    flight = self.scheduler.arriving.get(key)
                    assert flight is not None
                    assert flight.owner is not None
                    assert promise.prefix_len == flight.start_pages * PAGE_SIZE
                    pages = enumerate(promise.page_ids().tolist(), flight.start_pages)
                    self.writable[key] = {
                        page: written(flight.owner, place) for place, page in pages
                    }
                    for page in self.writable[key]:
                        self.written.pop(page, None)
                case RefuseRoom(key):
                    self.undrained.add(key)
                    self.writable[key] = {}
                case AbortRoom(key, _) if key in self.rooms:
                    self.rooms.remove(key)
                    self.aborting.add(key)

    def _check_content(self, req: DecodeRequest) -> None:
        """Law 8: each whole page below `kv_len` was written for these tokens, with weights of one
        time."""
        for place, page in enumerate(req.pages[: req.kv_len // PAGE_SIZE].tolist()):
            assert self.written.get(page) == written(req, place), f"law 8: page {place} of {req}"

    @invariant()
    def laws_hold(self) -> None:
        self.now_s += 1.0
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            pages = [page for pages in self.writable.values() for page in pages]
            assert len(set(pages)) == len(pages), "law 5: a page is writable by two rooms"
            state = self.scheduler.pages.allocator.state
            assert all(state(page) in _MAY_BE_WRITTEN for page in pages), (
                "law 4: a page with a possible writer is in use"
            )
            self.follower.apply(self.log.take(self.scheduler.pages))
            assert self.follower.is_like(self.scheduler.pages), "the second rank has other rows"

    def teardown(self) -> None:
        """Whatever happened, once everybody has gone nothing is locked, owned or held."""
        if not hasattr(self, "scheduler"):
            return
        for event in self.events:
            event.done = True
        self.scheduler.release_deferred(self.now_s)
        for rid in list(self.scheduler.requests):
            self.scheduler.abort(rid, self.now_s)
        self._carry_out()
        for key in sorted(self.rooms | self.aborting | self.undrained):
            self.scheduler.room_ended(key, KVPoll.FAILED, TransferError("the end"), b"", self.now_s)
            self.scheduler.room_drained(key)
        assert_at_rest(self.scheduler)
        assert not len(self.scheduler.waiting)
        assert not len(self.scheduler.arriving)
        assert self.scheduler.budget.active == 0
        assert not self.scheduler.num_deferred


Written = tuple[Any, ...]


def written(req: DecodeRequest, place: int) -> Written:
    """What the page at this place of a request's row is written with: all tokens before its end, by
    which weights."""
    assert req.pages_held is not None
    tokens: Sequence[int] = req.tokens[: (place + 1) * PAGE_SIZE].tolist()
    return (req.pages_held.epoch, req.request.namespace, *tokens)


_MAY_BE_WRITTEN = (PageState.OWNED, PageState.HELD, PageState.QUARANTINED)
_CAN_RUN = (DecodeState.TRANSFERRED, DecodeState.RUNNING)
