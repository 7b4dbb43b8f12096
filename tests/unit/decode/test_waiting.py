"""The list of waiting requests against a naive one, which keeps no order and no line; and copies
that are broken in one place, each of which it has to find."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from prefixkv.admission import AdmissionPolicy, rank_as_tuple
from prefixkv.decode import admission
from prefixkv.decode.admission import RANKED, RETURNED, Admission, Waiter
from prefixkv.decode.rooms import Worker, Workers
from prefixkv.errors import UserErrors
from prefixkv.protocol.ids import RoomKey

ADDRESSES = ["", "p", "q", "r"]  # the first is of requests that need no worker
PATIENCE_S, AWAY_S, TIMEOUT_S = 20.0, 30.0, 50.0
SHARE = 8


@dataclass(eq=False)
class Req:
    max_pages: int
    arrived_s: float
    number: int
    is_back: bool
    committed_s: float | None = None
    request: Any = field(default_factory=lambda: SimpleNamespace(deadline_s=None))

    @property
    def turn(self) -> int:
        return -self.number if self.is_back else self.number


class BySize(AdmissionPolicy):
    """Few pages first; 7 has no rank."""

    def __init__(self, overtakes: bool) -> None:
        self.overtakes = overtakes

    def rank(self, req: Any, new_pages: int) -> Any:
        return math.nan if new_pages == 7 else new_pages // 2


class Case:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.workers = Workers(self.chance.random() < 0.5, AWAY_S, SHARE)
        self.policy = BySize(self.chance.random() < 0.7)
        self.errors = UserErrors()
        config: Any = SimpleNamespace(
            admission=self.policy, admission_patience_s=PATIENCE_S, admission_wait_s=TIMEOUT_S
        )
        pages = SimpleNamespace(
            errors=self.errors, caching=False, cache=SimpleNamespace(num_wants=0)
        )
        ledger: Any = SimpleNamespace(workers=self.workers, pages=pages)
        planner: Any = None
        self.list = Admission(ledger, config, planner)
        self.all: list[Waiter] = []
        self.for_pages: set[Waiter] = set()
        self.for_share: set[Waiter] = set()
        self.with_share: set[str] = set()
        self.shares_at = -1
        self.most = 10
        self.now_s, self.number, self.version = 0.0, 0, 0
        self.rooms: dict[RoomKey, str] = {}
        self.held: set[RoomKey] = set()
        self.workers.is_held = self.held.__contains__

    # --- steps ------------------------------------------------------------------------------------

    def _known(self) -> Worker | None:
        address = self.chance.choice(ADDRESSES[1:])
        return next((one for one in self.workers.all() if one.address == address), None)

    def come(self) -> None:
        self.number += 1
        address, pages = self.chance.choice(ADDRESSES), self.chance.randint(1, 6)
        size, is_back = self.chance.choice([2, 5, 9]), self.chance.random() < 0.2
        req: Any = Req(size, self.now_s, self.number, is_back)
        waiter = Waiter(req, RETURNED if is_back else RANKED, self.now_s, req.turn)
        waiter.worker = self.workers.of(address)
        waiter.look = SimpleNamespace(new_pages=pages)
        if not is_back:
            waiter.rank = rank_as_tuple(self.policy.rank(waiter.req, pages))
        self._enter(waiter)

    def _enter(self, waiter: Waiter) -> None:
        self.all.append(waiter)
        self.list._enter(waiter, self.most)
        if waiter.req.max_pages > self.most:
            self.for_pages.add(waiter)

    def _line(self, address: str) -> list[Waiter]:
        aside = self.for_pages | self.for_share
        return [one for one in self.all if one.worker.address == address and one not in aside]

    def _out(self, waiter: Waiter) -> None:
        self.all.remove(waiter)
        self.list._exit(waiter)
        self.for_pages.discard(waiter)
        self.for_share.discard(waiter)
        if not self._line(waiter.worker.address):
            self.with_share.discard(waiter.worker.address)

    def _end(self, waiter: Waiter) -> None:
        self._out(waiter)
        self.list._late.forget(waiter.req)

    def go(self) -> None:
        if self.all:
            self._end(self.chance.choice(self.all))

    def move(self) -> None:
        if self.all:
            waiter = self.chance.choice(self.all)
            self._out(waiter)
            waiter.worker = self.workers.of(self.chance.choice(ADDRESSES))
            self._enter(waiter)

    def answer(self) -> None:
        worker = self._known()
        if worker is not None:
            if self.chance.random() < 0.6:
                self.list.opens(worker, 0)
            else:
                self.list.closes(worker, self.now_s)

    def promise(self) -> None:
        """Pages come into the power of a worker, stay there without proof, or leave it."""
        worker, key = self._known(), RoomKey(self.number, 0)
        if worker is not None and key not in self.rooms and self.chance.random() < 0.5:
            self.workers.promise(key, worker, self.chance.randint(1, 7))
            self.rooms[key] = worker.address
        elif self.rooms:
            key = self.chance.choice(list(self.rooms))
            if self.chance.random() < 0.4:
                self.held.add(key)
            else:
                self.workers.release(key)
                del self.rooms[key]

    def new_pass(self) -> None:
        self.now_s += self.chance.choice([0.0, 1.0, 9.0])
        self.version += 1
        self.most = self.chance.choice([4, 8, 10])
        is_all = self.list._bring_back(self.most)
        back = sorted(
            (one for one in self.for_pages if one.req.max_pages <= self.most),
            key=lambda one: (one.req.max_pages, one.req.turn),
        )
        self.for_pages -= set(back[: admission.MAX_BACK])
        assert is_all or len(back) >= admission.MAX_BACK
        self.with_share.clear()
        if self.shares_at != self.workers.version:
            self.shares_at = self.workers.version
            self.for_share.clear()

    def look(self) -> None:
        """The first does not fit; another gets a new estimate, which may have no rank."""
        first = self._list_first()
        if first is not None:
            address, over = first.worker.address, self._is_over(first)
            hopeless = self.workers.is_hopeless(first.worker, first.look.new_pages)
            stepped = self.list._step_aside(first)
            assert stepped == (first.req.max_pages > self.most or over)
            if first.req.max_pages > self.most:
                self.for_pages.add(first)
            elif over and hopeless:
                self.for_share.add(first)
            elif over:
                self.with_share.add(address)
            if not self._line(address):
                self.with_share.discard(address)
        ranked = [one for one in self.in_order() if not one.req.is_back]
        if ranked:
            waiter = self.chance.choice(ranked)
            before, num_errors = waiter.rank, self.errors.num
            waiter.look.new_pages = self.chance.randint(1, 7)
            assert self.list._renew(waiter) == (waiter.rank > before)
            pages = waiter.look.new_pages
            assert self.errors.num - num_errors == (pages == 7)
            assert waiter.rank == (before if pages == 7 else (pages // 2,))
            waiter.seen_at = self.chance.choice([-1, self.version])

    def _is_over(self, waiter: Waiter) -> bool:
        worker = waiter.worker
        others = [one for one in self.workers.all() if one.is_open and one.address]
        has = worker.num_pages
        return has > 0 and has + waiter.look.new_pages > SHARE and bool({*others} - {worker})

    # --- the naive list ---------------------------------------------------------------------------

    def in_order(self) -> list[Waiter]:
        lines = [
            waiter
            for address in ADDRESSES
            if address not in self.with_share
            for waiter in self._line(address)
            if waiter.worker.is_open
        ]
        return sorted(lines, key=lambda one: (
            (0, -one.req.number) if one.req.is_back
            else (1, one.req.number) if self._is_overdue(one)
            else (2, one.rank, one.req.number)
        ))  # fmt: skip

    def _is_overdue(self, waiter: Waiter) -> bool:
        return self.now_s - waiter.req.arrived_s >= PATIENCE_S

    def _list_first(self) -> Waiter | None:
        """As at the beginning of a pass."""
        self.list._note_overdue(self.now_s)
        return self.list._first_of_all()

    def first_of_all(self) -> Waiter | None:
        order = self.in_order()
        if not order or order[0].req.is_back:
            return order[0] if order else None
        return None if self.policy.overtakes and not self._is_overdue(order[0]) else order[0]

    def check(self) -> None:
        found, order = self.list, self.in_order()
        found.check_invariants()
        self.workers.check_invariants(set(self.rooms))
        assert self._list_first() is self.first_of_all()
        assert [*found._in_turn()] == order[: admission.MAX_WALK]
        lines = {address: self._line(address) for address in ADDRESSES}
        away = [one for line in lines.values() for one in line if not one.worker.is_open]
        assert found.aside() == {
            "pages": len(self.for_pages),
            "share": len(self.for_share)
            + sum(len(lines[one]) for one in self.with_share if self.workers.of(one).is_open),
            "prefill": len(away),
        }
        due = [one.req.arrived_s + PATIENCE_S for one in order if not one.req.is_back]
        assert self.now_s < found._overdue.next_s
        assert found._overdue.next_s <= min(
            (one for one in due if one > self.now_s), default=math.inf
        )
        self._check_late(away)

    def _check_late(self, away: list[Waiter]) -> None:
        due = {
            one.req for one in away
            if max(one.since_s, one.worker.away_s) + AWAY_S <= self.now_s
        }  # fmt: skip
        late = self.list.unanswered(self.now_s)
        in_turn = sorted(self.all, key=lambda one: one.req.turn)
        assert late == [one.req for one in in_turn if one.req in due]
        for waiter in [one for one in self.all if one.req in due]:
            self._end(waiter)


def storm(seed: int, steps: int = 150) -> None:
    case = Case(seed)
    calls: list[Callable[[], None]] = [
        case.come, case.come, case.come, case.go, case.move, case.answer, case.promise,
        case.new_pass, case.look, case.look,
    ]  # fmt: skip
    for _ in range(steps):
        case.chance.choice(calls)()
        case.check()


def storms(num: int) -> None:
    for seed in range(num):
        storm(seed)


def test_the_list_is_what_a_naive_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_BACK", 2)
    monkeypatch.setattr(admission, "MAX_WALK", 5)
    storms(60)


def _all_have_turns(self: Admission) -> list[Worker]:
    return [one for one in self._workers.all() if one.line and one.is_open]


def _never_overdue(self: Admission, now_s: float) -> None:
    self._overdue.due(now_s)


BROKEN: dict[str, tuple[type, str, Any]] = {
    "patience ends no overtaking": (Admission, "_note_overdue", _never_overdue),
    "a line has a turn in spite of its share": (Admission, "_turns", _all_have_turns),
    "a wait for an answer is not timed": (Admission, "_answer_due_s", lambda *_: math.inf),
    "the last to return is not the first": (
        Waiter, "turn", property(lambda self: self.req.number, lambda self, turn: None),
    ),
    "a share binds a worker that is alone": (
        Workers, "refuses",
        lambda self, worker, num: bool(worker.num_pages) and worker.num_pages + num > SHARE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    with pytest.raises(Exception):  # noqa: B017  # whatever breaks first
        storms(30)
