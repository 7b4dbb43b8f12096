"""The decode side under fire, a short run; `fuzz/scheduler.py` is the long one."""

from collections import Counter

from tests.models.scheduler_machine import fuzz_round, run


def test_nothing_is_left_after_a_storm() -> None:
    totals: Counter[str] = Counter()
    fuzz_round(round_seed=1, examples=12, storm_steps=400, totals=totals)
    assert totals["runs"] >= 12
    for what in ("finished", "shared_flights", "transfers_failed", "aborted", "hit_tokens"):
        assert totals[what], what


def test_a_run_follows_from_its_integers() -> None:
    steps = [(place * 2654435761) % 2**32 for place in range(300)]
    first, again = (run(12345, steps) for _ in range(2))
    assert first.trace == again.trace
    assert first.decode.scheduler.counters == again.decode.scheduler.counters
