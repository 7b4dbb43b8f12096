"""Whatever cannot be admitted holds up none; none that can is overtaken beyond its patience; all
end in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.admission_day import AdmissionDay, Mix

DAY_S = 86_400.0
POLICIES = ["hit_aware", "fifo", "priority"]
WEIGHT = st.sampled_from([0.0, 0.05, 0.3])


@pytest.mark.slow
@pytest.mark.parametrize("admission", POLICIES)
def test_a_day_of_loads_that_cannot_all_be_admitted(admission: str) -> None:
    day = AdmissionDay(7, admission)
    day.run(DAY_S, step_s=20.0)
    day.finish()
    outcomes, aside = day.outcomes, day.scheduler.waiting.stepped_aside
    for outcome in ("finished", "refused", "PeerLostError", "TransferTimeoutError",
                    "AdmissionTimeoutError", "TransferError"):  # fmt: skip
        assert outcomes[outcome], (outcome, outcomes)
    assert all(aside.values()), aside
    assert day.retractions
    for kind, waits in day.waits.items():
        assert waits, kind


@pytest.mark.slow
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    admission=st.sampled_from(POLICIES),
    weights=st.tuples(WEIGHT, WEIGHT, WEIGHT, WEIGHT),
    nearly=WEIGHT,
    fails=WEIGHT,
    every_s=st.sampled_from([5.0, 15.0]),
    max_retries=st.integers(0, 2),
)
def test_an_hour_of_any_mix_with_every_law_checked_after_each_step(
    seed: int,
    admission: str,
    weights: tuple[float, float, float, float],
    nearly: float,
    fails: float,
    every_s: float,
    max_retries: int,
) -> None:
    at = dict(zip(("stops", "dead", "mute", "small"), weights, strict=True))
    mix = Mix(small=0.6, nearly=nearly, at={"good": 0.5, **at}, fails=fails)
    day = AdmissionDay(seed, admission, mix, every_s=every_s, audits=True, max_retries=max_retries)
    day.run(1000.0)
    day.finish()
