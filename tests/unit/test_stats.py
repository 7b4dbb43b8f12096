"""Histograms, tallies and the journal's sums."""

import random

from prefixkv.stats import OTHER, Histogram, Journal, Tally, namespace_label


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    rng = random.Random(1)
    histogram = Histogram((0.1, 0.5, 2.0))
    values = [rng.choice([0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0]) for _ in range(200)]
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [
        sum(value <= bound for value in values) for bound in (0.1, 0.5, 2.0, 9.9)
    ]
    assert abs(histogram.total - sum(values)) < 1e-9


def test_a_tally_is_bounded_and_counts_the_rest_together() -> None:
    tally = Tally(1, max_labels=3)
    for label in ("a", "b", "c", "d", "e", "a"):
        tally.row(label)[0] += 1
    assert tally.read() == {"a": [2], "b": [1], "c": [1], OTHER: [2]}
    for number in range(1000):
        tally.row(number)[0] += 1
    assert (tally.read()[OTHER], len(tally._rows)) == ([1002], 3)


def test_labels_that_read_alike_share_a_row_and_a_reading_is_a_copy() -> None:
    tally = Tally(1, name=namespace_label)
    tally.row("x" * 70)[0] += 1
    tally.row("x" * 80)[0] += 1
    tally.row(None)[0] += 1
    read = tally.read()
    assert read == {"x" * 64: [2], "": [1]}
    tally.row(None)[0] += 1
    assert read[""] == [1]


def test_the_recent_ratio_forgets() -> None:
    journal = Journal(())
    for _ in range(1000):
        journal.found("a", 100, 0)
    for _ in range(300):
        journal.found("a", 100, 90, 5)
    (row,) = journal.tokens.read().values()
    assert (row[Journal.PROMPT], row[Journal.HIT], row[Journal.SHARED]) == (130_000, 27_000, 1_500)
    assert 0.8 < row[Journal.RECENT_HIT] / row[Journal.RECENT_PROMPT] < 0.9


def test_a_wait_with_an_unknown_end_is_none() -> None:
    journal = Journal(("pages",))
    journal.waited("pages", None, 1.0)
    journal.waited("pages", 1.0, None)
    journal.waited("pages", 1.0, 3.0)
    assert (journal.waits["pages"].cumulative()[-1], journal.waits["pages"].total) == (1, 2.0)
