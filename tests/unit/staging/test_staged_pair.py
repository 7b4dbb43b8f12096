"""Senders and receivers of staging joined, over memory: whole, with little room, and with faults
everywhere."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.laws.staged_machine import StagedMachine
from tests.support.staged_world import World


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_writers", "num_readers", "pieces", "slots", "window"),
    [(1, 1, 3, 4, 4), (2, 1, 1.5, 1, 4), (3, 2, 1.5, 2, 2), (3, 1, 1, 1, 1), (2, 2, 8, 3, 3)],
)
def test_three_rooms_arrive_whole_however_little_room_there_is(
    num_writers: int, num_readers: int, pieces: float, slots: int, window: int, seed: int
) -> None:
    world = World(num_writers, num_readers, pieces, slots, window)
    chunks = [[(9, True), (1, False), (13, True)], [(4, False)], [(5, True), (6, True)]]
    for again in range(3):
        for room in range(3):
            assert world.open(room, chunks[(room + again) % 3])
        world.finish(seed=3 * seed + again + 1)
    assert [use.state for use in world.uses] == ["succeeded"] * 9
    written = sum(writer.sender.counters["pieces_written"] for writer in world.writers.values())
    assert written == 3 * num_writers * (8 + 1 + 4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_writers", "pieces", "window"), [(1, 1, 1), (2, 1.5, 4), (3, 3, 2)])
def test_frames_that_are_lost_do_no_harm(
    num_writers: int, pieces: float, window: int, seed: int
) -> None:
    world = World(num_writers, 1, pieces, 3, window)
    for room in range(3):
        assert world.open(room, [(9, True), (6, False)])
    world.finish(seed=seed + 1, loss_percent=40)
    assert [use.state for use in world.uses] == ["succeeded"] * 3


@pytest.mark.parametrize("seed", range(40))
def test_whatever_goes_wrong_all_comes_to_rest(seed: int) -> None:
    shape = (
        1 + seed % 3,
        1 + seed // 3 % 2,
        (1, 1.5, 3)[seed // 6 % 3],
        1 + seed % 4,
        1 + seed // 2 % 4,
    )
    world = World(*shape)
    world.storm(seed, num_steps=300, fault_every=(4, 12, 40)[seed % 3])
    world.finish(seed=seed + 1)
    for room in range(3):
        assert world.open(room, [(9, True), (4, False)])
    world.finish(seed=seed + 1)
    assert [use.state for use in world.uses[-3:]] == ["succeeded"] * 3


StagedMachine.TestCase.settings = settings(stateful_step_count=25)
TestStagedPair = StagedMachine.TestCase
