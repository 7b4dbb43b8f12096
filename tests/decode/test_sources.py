"""The rule by which decode computes what a request lacks, or asks prefill."""

from __future__ import annotations

import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import FRESH_S, Source, Sources, Way, fair
from prefixkv.protocol.ids import RoomKey

HERE, PREFILL = Source.HERE, Source.PREFILL


class Scale:
    """Sources with measurements: decode computes `rate` tokens/s, prefill waits `wait_s` and then
    sends `sent` tokens/s."""

    def __init__(self, config: ComputeConfig | None = None, **measured: float) -> None:
        self.sources = Sources(config or ComputeConfig())
        self.now_s = 100.0
        if rate := measured.get("rate"):
            self.sources.chunk(1000, 1000 / rate, beside=False, now_s=self.now_s)
        if sent := measured.get("sent"):
            for number, tokens in enumerate((100, 900, 500, 2000)):
                self.transfer(number, tokens, measured.get("wait_s", 0.0) + tokens / sent)

    def transfer(self, number: int, tokens: int, seconds: float, address: str = "p") -> None:
        key = RoomKey(number, 0)
        self.sources.promised(address, key, self.now_s - seconds)
        self.sources.arrived(address, key, tokens, self.now_s)

    def choose(
        self, missing: int, due: int = 0, is_busy: bool = False, address: str = "p"
    ) -> Source:
        return self.sources.choose(missing, due, is_busy, address, self.now_s)


def test_without_a_config_everything_comes_from_prefill() -> None:
    sources = Sources()
    assert sources.choose(1, 0, False, "p", 0.0) is PREFILL
    assert sources.most_tokens(is_down=True) == -1
    assert sources.chunk_tokens(False) == 0


def test_without_measurements_the_bound_decides() -> None:
    scale = Scale()
    assert scale.choose(2048) is HERE
    assert scale.choose(2049) is PREFILL
    # What is due here already counts: a burst does not end on decode whole.
    assert scale.choose(1000, due=1048) is HERE
    assert scale.choose(1000, due=1049) is PREFILL


def test_a_few_tokens_are_computed_here_whatever_was_measured() -> None:
    scale = Scale(rate=1.0, sent=1e6)
    assert scale.choose(64) is HERE
    assert scale.choose(65) is PREFILL
    none = Scale(ComputeConfig(below=0))
    assert none.choose(1) is PREFILL


def test_no_measurement_takes_more_than_the_bound_here() -> None:
    assert Scale(rate=1e9, sent=1.0).choose(2049) is PREFILL


def test_the_faster_way_is_taken_but_a_little_slower_one_that_sends_nothing_goes_before() -> None:
    # 1,000 tokens from prefill in .1 + .1 s: here they may take .2 * 2 + .02 s.
    for rate, chosen in ((2400, HERE), (2300, PREFILL), (1e5, HERE)):
        assert Scale(rate=rate, sent=1e4, wait_s=0.1).choose(1000) is chosen


def test_what_is_due_here_makes_it_slower_here() -> None:
    scale = Scale(rate=1e4, sent=1e4, wait_s=0.1)
    assert scale.choose(1000, due=3000) is HERE  # .4 of .2 * 2 + .02 s
    assert scale.choose(1000, due=3300) is PREFILL


def test_beside_a_batch_each_chunk_waits_for_its_step() -> None:
    scale = Scale(ComputeConfig(chunk_tokens=100), rate=1e4, sent=1e4, wait_s=0.1)
    for _ in range(100):
        scale.sources.step(0.05)
    # A chunk adds .5 * 50 ms at most: but 100 tokens take 10 ms. Ten steps of 60 ms are .6 s.
    assert scale.sources.chunk_tokens(True) == 100
    assert scale.choose(1000, is_busy=False) is HERE
    assert scale.choose(1000, is_busy=True) is PREFILL


def test_itl_share_bounds_the_chunk_beside_a_batch() -> None:
    scale = Scale(ComputeConfig(itl_share=0.5), rate=1e4)
    assert scale.sources.chunk_tokens(False) == 256
    assert scale.sources.chunk_tokens(True) == 64  # no step is measured yet
    for _ in range(100):
        scale.sources.step(0.03)
    assert scale.sources.chunk_tokens(True) == pytest.approx(150, abs=1)
    for _ in range(200):
        scale.sources.step(0.0001)
    assert scale.sources.chunk_tokens(True) == 16  # prompts go on


def test_a_chunk_beside_a_batch_is_measured_without_the_step() -> None:
    sources = Sources(ComputeConfig())
    for _ in range(100):
        sources.step(0.02)
    sources.chunk(200, 0.03, beside=True, now_s=0.0)
    assert sources.tokens_per_s == pytest.approx(20_000)
    # Noise may make it seem to cost nothing: the rate stays finite.
    sources.chunk(200, 0.001, beside=True, now_s=0.0)
    assert sources.tokens_per_s < 1e7


def test_a_prefill_worker_that_does_not_answer_counts_as_slow_as_it_is_by_now() -> None:
    scale = Scale(rate=1e4, sent=1e6)  # prefill takes no time
    assert scale.choose(1000) is PREFILL
    scale.sources.promised("p", RoomKey(77, 0), scale.now_s - 1.0)
    assert scale.choose(1000) is HERE
    scale.sources.gave_up("p", RoomKey(77, 0))
    assert scale.choose(1000) is PREFILL


def test_each_prefill_worker_is_measured_by_itself() -> None:
    scale = Scale(rate=1e4, sent=1e6)
    for number in range(9):
        scale.transfer(number, 1000, 3.0, address="slow")
    assert scale.choose(1000, address="slow") is HERE
    assert scale.choose(1000, address="p") is PREFILL
    assert scale.choose(1000, address="new") is HERE  # by its bound: not measured


def test_transfers_of_one_size_say_nothing_of_the_rate() -> None:
    scale = Scale(rate=500.0)
    for number in range(9):
        scale.transfer(number, 1000, 1.0)
    # Whatever the size, it takes 1 s: 100 tokens take .2 s here, 1,200 take 2.4.
    assert scale.choose(100) is HERE
    assert scale.choose(1200) is PREFILL


def test_old_measurements_are_forgotten() -> None:
    scale = Scale(rate=100.0, sent=1e6)
    assert scale.choose(1000) is PREFILL
    scale.now_s += FRESH_S + 1
    assert scale.choose(1000) is HERE


def test_where_prefill_is_down_the_other_bound_holds() -> None:
    config = ComputeConfig(below=100, down_below=5000)
    assert Sources(config, fails_over=True).most_tokens(is_down=True) == 5000
    assert Sources(config, fails_over=True).most_tokens(is_down=False) == 100
    assert Sources(config).most_tokens(is_down=True) == 100


def test_fair_takes_the_way_that_sends_least_of_those_that_are_fast_enough() -> None:
    ways = [Way(PREFILL, 1.0, 500), Way(PREFILL, 1.9, 100), Way(HERE, 2.02, 0)]
    assert fair(ways).seconds == 2.02
    assert fair([*ways[:2], Way(HERE, 2.03, 0)]).seconds == 1.9
    assert fair([Way(HERE, 3.0, 0), Way(HERE, 2.0, 0)]).seconds == 2.0


def test_workers_that_were_asked_long_ago_are_forgotten() -> None:
    scale = Scale(rate=1e4)
    for number in range(400):
        scale.transfer(number, 100, 0.1, address=f"p{number}")
    assert len(scale.sources._lines) == 256
