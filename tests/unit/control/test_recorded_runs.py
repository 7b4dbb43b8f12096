"""Every tenth of the recorded runs; all: `python -m tests.support.recording check`."""

from __future__ import annotations

import random

import pytest

from tests.support.recording import Recording, Run, differences, play, recorded, runs

SOME = [
    pytest.param(run, marks=() if number % 3 == 0 else pytest.mark.slow, id=run.name)
    for number, run in enumerate(run for kind in ("pair", "mesh") for run in runs(kind)[::10])
]


@pytest.mark.slow
@pytest.mark.parametrize("run", SOME)
def test_a_recorded_run_draws_and_ends_as_it_did(run: Run) -> None:
    assert differences(recorded()[run.name], play(run).line) == []


def test_recording_changes_nothing_that_is_drawn() -> None:
    drawn = []
    recording = Recording()
    for chance in (random.Random(7), recording.new_random(7)):
        letters = list("abcdefg")
        chance.shuffle(letters)
        drawn.append(
            [
                letters, chance.random(), chance.choice("xyz"), chance.randint(3, 9),
                chance.randrange(100), chance.sample(range(30), 4), chance.sample(range(5), 5),
            ]
        )  # fmt: skip
    assert drawn[0] == drawn[1]
    assert recording.counts[0] > 20
    assert recording.counts[1] == 0
