"""A decode scheduler with the other side played by hand, one call a step; all books are checked
after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from prefixkv.config import PageOptions
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import TransferError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.groups import GroupSpec
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import still_pending
from prefixkv.protocol.commands import AbortRoom, DecodeCommand, OpenRoom, RefuseRoom
from prefixkv.protocol.events import PrefillAway, PrefillReady, RoomEnded
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.schedulers import decode_scheduler

PAGE_SIZE = 4
BROKEN = TransferError("broken")


class Desk:
    """Those that a test has made settle as it ends (conftest.py)."""

    made: ClassVar[list[Desk]] = []

    def __init__(
        self,
        num_pages: int = 16,
        *,
        rows: int = 8,
        caching: bool = True,
        num_slots: int = 0,
        policy: str = "",
        spare_rows: int = 0,
        windows: Sequence[GroupSpec] = (),
        num_checkpoints: int = 0,
        **settings: Any,
    ) -> None:
        self.pages = PageManager(
            num_pages,
            PAGE_SIZE,
            rows,
            options=PageOptions(
                caching=caching,
                num_slots=num_slots,
                policy=policy,
                spare_rows=spare_rows,
                windows=windows,
                num_saved=num_checkpoints,
            ),
        )
        self.pages.hash_every_pages = 1
        settings = {"reserve_tokens": 0, **settings}
        self.scheduler = decode_scheduler(self.pages, **settings)
        self.failed: list[DecodeRequest] = []
        self.num_rooms = 0
        self.made.append(self)

    @property
    def now_s(self) -> float:
        return self.scheduler.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.scheduler.now_s = now_s

    # --- one call each ----------------------------------------------------------------------------

    def request(
        self, rid: str, tokens: int | list[int] = 8, max_new: int = 4, **fields: Any
    ) -> Request:
        """`tokens` as a number: so many that no other request shares, unless its rid begins
        alike."""
        self.num_rooms += 1
        if isinstance(tokens, int):
            tokens = [ord(rid[0]) * 1000 + place for place in range(tokens)]
        return Request(
            rid,
            tokens,
            max_new_tokens=max_new,
            **{"room": self.num_rooms, "prefill": "p", **fields},
        )

    def add(
        self, rid: str, tokens: int | list[int] = 8, max_new: int = 4, **fields: Any
    ) -> DecodeRequest:
        req = self.scheduler.add(self.request(rid, tokens, max_new, **fields))
        return self._checked(req)

    def admit(self, at_s: float | None = None) -> list[str]:
        if at_s is not None:
            self.now_s = at_s
        admitted = [req.rid for req in self.scheduler.pop_preallocated()]
        assert self.scheduler.wake_s > self.now_s, "else a sleep ends at once, again and again"
        return self._checked(admitted)

    def commands(self) -> list[DecodeCommand]:
        return self.scheduler.take_commands()

    def succeed(self, key: RoomKey, aux: bytes = b"") -> None:
        self._checked(self.scheduler.hear(RoomEnded(key, KVPoll.SUCCESS, None, aux), self.now_s))

    def fail(self, key: RoomKey, *, drained: bool = False) -> None:
        self._checked(self.scheduler.hear(RoomEnded(key, KVPoll.FAILED, BROKEN, b""), self.now_s))
        if drained:
            self.drain(key)

    def drain(self, key: RoomKey) -> None:
        self._checked(self.scheduler.room_drained(key))

    def transferred(self) -> list[str]:
        return self._checked([req.rid for req in self.scheduler.pop_transferred()])

    def token(self, *reqs: DecodeRequest, token: int = 1) -> None:
        self._checked(self.scheduler.append_many(reqs, [token] * len(reqs)))

    def finish(self, req: DecodeRequest, **how: Any) -> None:
        self._checked(self.scheduler.finish(req, **how))

    def retract(self, req: DecodeRequest, **how: Any) -> None:
        self._checked(self.scheduler.retract(req.rid, **how))

    def abort(self, req: DecodeRequest, **how: Any) -> bool:
        return self._checked(self.scheduler.abort(req.rid, **how))

    def pop_failed(self) -> list[DecodeRequest]:
        return self._checked(self.scheduler.pop_failed())

    def down(self, address: str = "p") -> None:
        self._checked(self.scheduler.hear(PrefillAway(address), self.now_s))

    def up(self, address: str = "p") -> None:
        self._checked(self.scheduler.hear(PrefillReady(address), self.now_s))

    # --- several at once --------------------------------------------------------------------------

    def start(self, rid: str, tokens: int | list[int] = 8, max_new: int = 4, *, outputs: int = 0,
              **fields: Any) -> DecodeRequest:  # fmt: skip
        """Add, admit, transfer, and append `outputs` tokens."""
        req = self.add(rid, tokens, max_new, **fields)
        assert self.admit() == [rid]
        self.succeed(req.room_key)
        assert self.transferred() == [rid]
        for _ in range(outputs):
            self.token(req)
        return req

    def admitted(self, rid: str, tokens: int | list[int] = 8, max_new: int = 4, **fields: Any
                 ) -> DecodeRequest:  # fmt: skip
        req = self.add(rid, tokens, max_new, **fields)
        assert self.admit() == [rid]
        return req

    def arrive(self, req: DecodeRequest) -> None:
        """Its KV is here, and all that it waits for with it."""
        self.succeed(req.room_key)
        assert self.transferred() == [req.rid]

    def prefix_of(self, req: DecodeRequest) -> int:
        """Tokens of a request that the tree has now."""
        return self.pages.cache.match_prefix(req.key).prefix_len

    def evict(self, num_pages: int) -> None:
        """Other requests have needed these pages meanwhile."""
        freed = self.pages.cache.evict(num_pages, self.now_s)
        self.pages.allocator.uncache(freed)
        self.pages.allocator.free(freed)
        self.pages.version += 1

    def carry_out_aborts(self) -> None:
        """What the control plane does with an abort: the room fails, and is drained some time
        later."""
        for command in self.commands():
            if isinstance(command, AbortRoom):
                self.fail(command.key, drained=True)
            elif isinstance(command, RefuseRoom):
                self.drain(command.key)

    def count_looks(self, monkeypatch: pytest.MonkeyPatch) -> list[DecodeRequest]:
        """The requests that are looked at from now on, whether they fit, in order; it grows as that
        goes on."""
        looks: list[DecodeRequest] = []
        waiting = self.scheduler.waiting
        look = waiting._look
        monkeypatch.setattr(
            waiting,
            "_look",
            lambda waiter, now_s: looks.append(waiter.req) or look(waiter, now_s),
        )
        return looks

    def snapshot(self) -> Any:
        """All that a call which changes nothing leaves as it was."""
        scheduler = self.scheduler
        requests = [
            (req.rid, req.state, req.kv_len, tuple(req.output), req.pages.tolist())
            for req in scheduler.requests.values()
        ]
        return (
            requests, self.states(), self.pages.version, self.pages.evicted_pages,
            dict(scheduler.counters), repr(scheduler.rooms), len(scheduler.waiting),
            len(scheduler.budget), scheduler.budget.private_pages,
        )  # fmt: skip

    def states(self) -> dict[str, int]:
        counts = {state.name: len(self.pages.allocator.pages_in(state)) for state in PageState}
        return {name: count for name, count in counts.items() if count}

    def settle(self) -> None:
        """All that lives goes on without a fault; what is computed here, or waits for a worker that
        is away, is aborted. Then nothing may be held, but for a device that is never done."""
        self._go_on_for_long()
        for flight in [one for one in self.scheduler.flights if one.source.name == "computed"]:
            self.scheduler.abort(flight.request.rid)
        self._go_on_for_long()
        if deferred := self.scheduler.ledger.deferred:
            waits = [still_pending(event, self.pages.errors) for event, _ in deferred.values()]
            assert None not in waits, f"{list(deferred)} wait for nothing"
            return
        for req in list(self.scheduler.requests.values()):
            is_away = not self.scheduler.workers.of(req.prefill).is_open
            assert is_away, f"{req} does not run, though nothing else does"
            self.abort(req)
        self._go_on()
        self.at_rest()

    def _go_on_for_long(self) -> None:
        for number in range(3 * len(self.scheduler.requests) + 9):
            if number < 9 or self.scheduler.requests:
                self._go_on()

    def _go_on(self) -> None:
        scheduler = self.scheduler
        scheduler.pop_preallocated()
        scheduler.pop_needs_prefill()
        for key in list(scheduler.prefill.open):
            scheduler.hear(RoomEnded(key, KVPoll.SUCCESS, None, b""), self.now_s)
            assert key not in scheduler.rooms.undrained(), f"{key} has succeeded"
        for req in scheduler.pop_local():
            scheduler.computed(req, req.fill_len)
        scheduler.pop_transferred()
        for req in list(scheduler.requests.values()):
            if req.state in (DecodeState.TRANSFERRED, DecodeState.RUNNING):
                scheduler.finish(req)
        scheduler.pop_failed()
        scheduler.take_commands()
        for key in scheduler.rooms.undrained():
            scheduler.room_drained(key)
        scheduler.check_invariants()  # once: a test may have made very many

    def at_rest(self) -> None:
        assert_at_rest(self.scheduler)
        assert not self.scheduler.ledger.deferred
        assert not self.scheduler.rooms
        assert (len(self.scheduler.budget), self.scheduler.budget.private_pages) == (0, 0)

    def _checked(self, result: Any) -> Any:
        self.scheduler.check_invariants()
        return result


__all__ = ["BROKEN", "PAGE_SIZE", "AbortRoom", "Desk", "OpenRoom", "RefuseRoom"]
