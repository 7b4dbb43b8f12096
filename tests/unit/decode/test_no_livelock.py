"""Running requests that need more than the pool take turns, and all end: how often one is taken
back is stated."""

from __future__ import annotations

import pytest

from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import OutOfPagesError
from prefixkv.protocol.ids import RoomKey
from tests.unit.decode.desk import Desk, OpenRoom

POLICIES = ["hit_aware", "fifo", "priority"]


class Engine:
    """The loop of docs/integrate.md: one token a step for all that run; transfers take one step.

    `tries_again`: it takes back as many as it must within a step; that one takes back one, and
    sees to the rest in its next pass, after admission.
    """

    def __init__(self, desk: Desk, tries_again: bool = True) -> None:
        self.desk = desk
        self.tries_again = tries_again
        self.batch: list[DecodeRequest] = []
        self.retractions = 0
        self.steps = 0
        self.order: list[str] = []  # in which they were first admitted
        self.finished: list[str] = []

    def step(self) -> None:
        desk, scheduler = self.desk, self.desk.scheduler
        self.steps += 1
        desk.now_s += 1.0
        self.order += [rid for rid in desk.admit() if rid not in self.order]
        scheduler.pop_needs_prefill()
        for command in desk.commands():
            if isinstance(command, OpenRoom):
                desk.succeed(RoomKey(command.promise.room, command.promise.generation))
        self.batch += [scheduler.requests[rid] for rid in desk.transferred()]
        self._append()
        for req in [req for req in self.batch if len(req.output) == req.max_new_tokens]:
            self.batch.remove(req)
            desk.finish(req)
            self.finished.append(req.rid)

    def _append(self) -> None:
        while self.batch:
            try:
                self.desk.token(*self.batch)
                return
            except OutOfPagesError as error:
                [victim, *_] = error.retract
                self.retractions += 1
                self.desk.retract(self.desk.scheduler.requests[victim])
                self.batch = [req for req in self.batch if req.rid != victim]
                if not self.tries_again:
                    return

    def run(self, most_steps: int) -> None:
        while self.desk.scheduler.requests:
            self.step()
            assert self.steps <= most_steps, "it goes on for ever"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reserve_tokens", [0, 8])
def test_twice_the_pool_runs_to_its_end(policy: str, reserve_tokens: int) -> None:
    """Eight requests grow to eight pages each, in a pool of 32 that takes all their prompts at
    once."""
    desk = Desk(32, rows=8, admission=policy, reserve_tokens=reserve_tokens)
    for rid in "abcdefgh":
        desk.add(rid, 8, max_new=24)
    engine = Engine(desk)
    engine.run(most_steps=100)
    assert len(engine.finished) == 8
    assert 1 <= engine.retractions <= 4, "four of the eight, once each, under every policy"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_taken_back_returns_only_once_the_others_can_go_on(policy: str) -> None:
    """All it had is cached still, so it could return at once, take the page that was freed, and be
    taken back again."""
    desk = Desk(9, rows=4, admission=policy, reserve_tokens=0)
    for rid in "abc":
        desk.add(rid, 8, max_new=8)
    engine = Engine(desk, tries_again=False)
    engine.run(most_steps=100)
    assert len(engine.finished) == 3
