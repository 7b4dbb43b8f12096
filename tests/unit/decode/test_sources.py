"""The rule by which decode computes what a request lacks, or asks prefill."""

import numpy as np
import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Rate, Sources

HERE, PREFILL = True, False


class Scale:
    """Sources with measurements: decode computes `rate` tokens/s, prefill takes `wait_s` longer
    than it needs to send `sent` tokens/s. A request comes in ten minutes, so none waits."""

    def __init__(self, config: ComputeConfig | None = None, **measured: float) -> None:
        self.sources = Sources(config or ComputeConfig())
        self.now_s = 100.0
        if rate := measured.get("rate"):
            self.compute(rate)
        if sent := measured.get("sent"):
            for _ in range(4):
                self.now_s += 30.0  # none waits for the one before
                self.transfer(1000, measured.get("wait_s", 0.0) + 1000 / sent)
        for _ in range(3):
            self.choose(1)  # it is computed here, whatever was measured

    def compute(self, rate: float) -> None:
        for _ in range(8):
            self.sources.chunk(1000, 1000 / rate, running=0)

    def transfer(self, tokens: int, seconds: float, address: str = "p") -> None:
        room = self.sources.promised(address, self.now_s - seconds, tokens)
        self.sources.arrived(room, self.now_s)

    def choose(
        self, missing: int, due: int = 0, running: int = 0, address: str = "p", again: int = 0,
        goes_on: bool = False, after_s: float = 600.0,
    ) -> bool:  # fmt: skip
        self.now_s += after_s
        return self.sources.is_here(
            missing, due, running, address, self.now_s, again=again, goes_on=goes_on
        )


def test_without_a_config_everything_comes_from_prefill() -> None:
    sources = Sources()
    assert sources.is_here(1, 0, 0, "p", 0.0) is PREFILL
    assert sources.most_tokens(is_down=True) == -1
    assert sources.chunk_tokens(0) == 0


def test_what_is_not_known_is_measured_by_one_request_at_a_time() -> None:
    """First what decode takes, then prefill: where both are busy with that, prefill is asked."""
    scale = Scale()
    assert scale.choose(2049) is PREFILL
    assert scale.choose(2048) is HERE
    assert scale.choose(100, due=1) is PREFILL
    scale.compute(100.0)
    assert scale.choose(100) is PREFILL
    room = scale.sources.promised("p", scale.now_s, 100)
    assert scale.choose(100) is HERE
    assert scale.choose(100, due=2000) is PREFILL
    scale.sources.arrived(room, scale.now_s)
    assert scale.choose(100) is PREFILL


def test_a_few_tokens_are_computed_here_whatever_was_measured() -> None:
    scale = Scale(rate=1.0, sent=1e6)
    assert scale.choose(64) is HERE
    assert scale.choose(65) is PREFILL  # what it takes here is known
    none = Scale(ComputeConfig(below=0))
    assert none.choose(1) is PREFILL


def test_no_measurement_takes_more_than_the_bound_here() -> None:
    bound = ComputeConfig().below
    assert Scale(rate=1e9, sent=1.0).choose(bound) is HERE
    assert Scale(rate=1e9, sent=1.0).choose(bound + 1) is PREFILL


def test_beside_a_batch_each_chunk_waits_for_its_step() -> None:
    scale = Scale(ComputeConfig(chunk_tokens=100), rate=1e4, sent=1e4, wait_s=0.1)
    for _ in range(100):
        scale.sources.step(0.05)
    # A chunk adds .5 * 50 ms at most: but 100 tokens take 10 ms. Ten steps of 60 ms are .6 s.
    assert scale.sources.chunk_tokens(1) == 100
    assert scale.choose(1000, running=0) is HERE
    assert scale.choose(1000, running=1) is PREFILL


def test_a_long_prompt_for_which_others_would_wait_is_prefills() -> None:
    """5,000 tokens take .5 s here and 2 s from prefill: at 20 requests a second ten wait."""
    scale = Scale(rate=1e4, sent=2.5e3)
    assert scale.choose(5000) is HERE
    for _ in range(200):
        scale.choose(500, after_s=0.05)
        scale.transfer(500, 0.2)
    assert scale.choose(5000, after_s=0.05) is PREFILL
    assert scale.choose(500, after_s=0.05) is HERE


def test_a_burst_at_the_beginning_is_no_rate_of_requests() -> None:
    scale = Scale(rate=1e4, sent=1e3)
    assert [scale.choose(200, after_s=0.0) for _ in range(5)] == [HERE] * 5


def test_where_both_take_as_long_nothing_is_sent() -> None:
    """But for a request that comes in the ten minutes that pass between two, and waits."""
    assert Scale(rate=4096, sent=4080).choose(1024) is HERE


def test_itl_share_bounds_the_chunk_beside_a_batch() -> None:
    scale = Scale(ComputeConfig(itl_share=0.5), rate=1e4)
    assert scale.sources.chunk_tokens(0) == 256
    assert scale.sources.chunk_tokens(1) == 8  # no step is measured yet
    for _ in range(100):
        scale.sources.step(0.03)
    assert scale.sources.chunk_tokens(1) == pytest.approx(150, abs=2)
    for _ in range(200):
        scale.sources.step(0.0001)
    assert scale.sources.chunk_tokens(1) == 8  # prompts go on


def test_where_the_least_chunk_breaks_itl_share_only_some_steps_have_one() -> None:
    """It adds 8 ms to steps of 4, of which 2 are allowed: so one step of four has one."""
    sources, chunks = Sources(ComputeConfig(itl_share=0.5)), []
    for _ in range(20):
        sources.step(0.004)
    for _ in range(400):
        sources.next_pass(running=2)
        tokens = sources.chunk_tokens(2)
        chunks.append(tokens)
        if tokens:
            sources.chunk(tokens, 0.011 + tokens / 8000, 2)
        else:
            sources.step(0.004)
    assert set(chunks) == {0, 8}
    last = chunks[100:]
    assert sum(last) / 8 == pytest.approx(len(last) / 4, rel=0.05)
    # They are spread evenly, not one after the other.
    assert all(not any(last[at + 1 : at + 3]) for at, tokens in enumerate(last) if tokens)
    # So a prompt takes four steps per chunk, which the rule knows: .24 s for 80 tokens.
    for sent_s, chosen in ((0.2, PREFILL), (0.4, HERE)):
        for number in range(8):
            room = sources.promised("p", 100.0 * number, 80)
            sources.arrived(room, 100.0 * number + sent_s)
        assert sources.is_here(80, 0, 2, "p", 1e6) is chosen
    # None waits where nothing runs.
    assert sources.chunk_tokens(0) == 256


class Passes:
    """Passes beside 32 requests, each with the chunk that it may have: a step takes 20 ms, a token
    20 us."""

    def __init__(self, share: float = 0.5) -> None:
        self.sources, self.now_s = Sources(ComputeConfig(itl_share=share), fails_over=True), 0.0
        for _ in range(20):
            self.step()

    def step(self, late_s: float = 0.0) -> None:
        self.now_s += 0.02 + late_s
        self.sources.step(0.02 + late_s)

    def run(self, late_s: float = 0.0) -> int:
        """Make a pass, which is late if it has a chunk. Return the tokens of that."""
        self.sources.next_pass(32)
        tokens = self.sources.chunk_tokens(32)
        if not tokens:
            self.step()
            return 0
        took_s = 0.02 + 2e-5 * tokens + late_s
        self.now_s += took_s
        self.sources.chunk(tokens, took_s, 32)
        return tokens


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("before", [0, 1, 2, 3, 5, 7, 8, 50])
@pytest.mark.parametrize("slow_s", [1, 30, 120])
@pytest.mark.parametrize("kind", ["a chunk", "a step", "chunks alone"])
def test_one_slow_pass_stops_no_prompt(kind: str, slow_s: float, before: int, share: float) -> None:
    """A kernel is compiled, or the engine stood still: half of the usual chunk is there again after
    some tens of steps, and none in between is waited for longer than a third of a second."""
    passes = Passes(share)
    for _ in range(before):
        passes.run()
    usual = passes.sources.chunk_tokens(32)
    if kind == "a chunk":
        while not passes.run(slow_s):
            pass
    elif kind == "a step":
        passes.step(slow_s)
    elif slow_s > 1:
        passes.sources.chunk(256, slow_s, 0)
    tokens = [passes.run() for _ in range(40)]
    assert max(tokens) >= usual / 2
    assert all(any(tokens[at : at + 18]) for at in range(22))


def test_chunks_that_are_dear_each_time_keep_to_itl_share_in_the_end() -> None:
    """The least takes a second: so every hundredth step has one, whatever the first ones had."""
    passes = Passes()
    assert all(passes.run(1.0) <= 8 for _ in range(600))
    chunks = [passes.run(1.0) for _ in range(4000)]
    assert set(chunks) == {0, 8}
    assert sum(chunks) / 8 == pytest.approx(40, rel=0.15)


def test_the_chunks_of_several_prompts_keep_to_the_share_of_a_step_together() -> None:
    """Each prompt costs 1 ms, and each token .1: with two of them 5 ms are 30 tokens."""
    sources, tokens = Sources(ComputeConfig(itl_share=0.5)), 8
    for _ in range(64):
        sources.step(0.01)
        sources.next_pass(1)
        tokens = sources.chunk_tokens(1) or tokens
        half = tokens // 2
        sources.chunk(half, 0.011 + 1e-4 * half, 1)
        sources.chunk(tokens, 0.012 + 1e-4 * tokens, 1, goes_on=True)
    assert tokens == pytest.approx(30, abs=3)


def test_beside_a_batch_that_never_steps_alone_the_step_is_guessed() -> None:
    """1,000 tokens a second were measured before: of a pass with 8 that takes 28 ms 20 are a
    step."""
    scale = Scale(ComputeConfig(itl_share=0.5), rate=1e3)
    sources = scale.sources
    tokens = []
    for _ in range(12):
        sources.next_pass(1)
        if chunk := sources.chunk_tokens(1):  # else this step goes without
            tokens.append(chunk)
            sources.chunk(chunk, 0.02 + 1e-3 * chunk, 1)
    assert tokens[0] == 8
    assert tokens[1:] == pytest.approx([10] * 11, abs=1)


def test_chunks_beside_a_batch_grow_no_faster_than_twice_as_long() -> None:
    """Whatever the first ones seem to cost: those of a GPU cost nothing."""
    sources, tokens = Sources(ComputeConfig()), []
    for _ in range(7):
        sources.step(0.02)
        tokens.append(sources.chunk_tokens(1))
        sources.chunk(tokens[-1], 0.02, 1)
    assert tokens == [8, 16, 32, 64, 128, 256, 256]


def test_a_prefill_worker_answers_one_promise_after_the_other() -> None:
    """.2 s for 1,000 tokens each: the third is there after .6 s. Here they take .5 s."""
    scale = Scale(rate=2e3, sent=5e3)
    rooms = []
    for number in range(3):
        assert scale.choose(1000, after_s=0.0) is (HERE if number == 2 else PREFILL)
        rooms.append(scale.sources.promised("p", scale.now_s, 1000))
    assert scale.choose(1000, address="other", after_s=0.0) is PREFILL
    # When one has arrived, the next one begins: it is no slower for having waited.
    for number in range(3):
        scale.now_s += 0.2
        scale.sources.arrived(rooms[number], scale.now_s)
        assert scale.choose(1000, after_s=0.0) is (HERE if number == 0 else PREFILL)


def test_a_prefill_worker_that_does_not_answer_counts_as_slow_as_it_is_by_now() -> None:
    scale = Scale(rate=1e4, sent=1e6)  # prefill takes no time
    assert scale.choose(1000) is PREFILL
    room = scale.sources.promised("p", scale.now_s, 1000)
    assert scale.choose(1000, after_s=0.01) is PREFILL
    assert scale.choose(1000, after_s=1.0) is HERE
    scale.sources.gave_up(room)
    assert scale.choose(1000) is PREFILL


@pytest.mark.parametrize("side", ["here", "prefill"])
@pytest.mark.parametrize("at", range(8))
def test_one_slow_measure_changes_no_choice(side: str, at: int) -> None:
    """A kernel is compiled, or a machine stood still for two minutes."""
    faster, slower = (1e4, 2e3) if side == "here" else (2e3, 1e4)
    scale = Scale()
    for number in range(8):
        late_s = 120.0 if number == at else 0.0
        scale.sources.chunk(256, 256 / faster + late_s * (side == "here"), 0)
        scale.transfer(256, 256 / slower + late_s * (side == "prefill"))
        scale.now_s += 600.0
        if number >= 2:
            assert scale.choose(1000) is (HERE if side == "here" else PREFILL)


# --- what is measured again -----------------------------------------------------------------------


def test_the_slower_way_is_tried_again_at_two_hundredths_of_what_requests_take() -> None:
    """It takes ten times as long: so one request in 450 has it, which takes 9 times longer."""
    for rate, sent, slower in ((1e4, 1e3, PREFILL), (1e3, 1e4, HERE)):
        scale, tries = Scale(rate=rate, sent=sent), 0
        for _ in range(4000):
            source = scale.choose(1000)
            tries += source is slower
            if source is HERE:
                scale.sources.chunk(1000, 1000 / rate, running=0)
            else:
                scale.transfer(1000, 1000 / sent)
        assert tries == pytest.approx(4000 / 450, abs=1)


def test_a_way_that_has_become_faster_is_found() -> None:
    scale, taken = Scale(rate=1e3, sent=1e4), []
    for _ in range(2000):
        taken.append(scale.choose(1000))
        if taken[-1] is HERE:
            scale.sources.chunk(1000, 0.01, running=0)
        else:
            scale.transfer(1000, 0.1)
    assert set(taken[:400]) == {PREFILL}
    # Four tries are the median of seven measures.
    assert set(taken[1900:]) == {HERE}


@pytest.mark.parametrize(("rate", "chosen"), [(2e4, HERE), (5e3, PREFILL)])
def test_the_sooner_way_by_what_is_known_is_taken_however_old_that_is(
    rate: float, chosen: bool
) -> None:
    scale = Scale(rate=rate, sent=1e4)
    assert [scale.choose(500, after_s=6000.0) for _ in range(2)] == [chosen, chosen]


# --- what decode has computed, and prefill has not ------------------------------------------------


def test_prefill_takes_longer_where_decode_has_computed_the_prompts_beginning() -> None:
    """1 ms a token for those too, and 3 ms here."""
    scale = Scale(rate=333.0, sent=1e3)
    assert scale.choose(200) is PREFILL
    assert scale.choose(200, again=300) is PREFILL
    assert scale.choose(200, again=500) is HERE
    # What waits with the worker takes as long.
    scale.sources.promised("p", scale.now_s, 100, again=400)
    assert scale.choose(200, after_s=0.0) is HERE


def test_what_prefill_computes_again_is_part_of_what_it_took() -> None:
    scale = Scale(rate=2e3)
    for _ in range(8):
        room = scale.sources.promised("p", scale.now_s, 100, again=900)
        scale.now_s += 0.2
        scale.sources.arrived(room, scale.now_s)
    assert scale.choose(100) is PREFILL, ".02 s, and .05 here"


def test_what_is_computed_here_costs_a_later_request_that_is_asked_of_prefill() -> None:
    """600 tokens take .06 s here and .1 s from prefill: but .1 s of prefill's when the next turn is
    asked of it, as nearly all are."""
    for goes_on in (False, True):
        scale = Scale(rate=1e4, sent=6e3)
        for _ in range(100):
            scale.choose(10**6, goes_on=goes_on)
        assert scale.choose(600) is (PREFILL if goes_on else HERE)


def test_pages_are_computed_again_from_the_first_that_prefill_does_not_have() -> None:
    sources = Sources(ComputeConfig())
    path = np.arange(20, 30, dtype=np.int32)
    assert sources.again_pages(path) == 0
    sources.computed_pages(path[4:6])
    assert [sources.again_pages(path[:num]) for num in (4, 5, 10)] == [0, 1, 6]
    sources.sent_pages(path[:5])
    assert sources.again_pages(path) == 5
    sources.sent_pages(path)
    assert sources.again_pages(path) == 0


# --- what is loaded meanwhile ---------------------------------------------------------------------


@pytest.mark.parametrize(("load_s", "is_loaded"), [(0.23, True), (0.25, False)])
def test_what_is_loaded_is_sent_instead_where_that_is_much_sooner(
    load_s: float, is_loaded: bool
) -> None:
    """All of it is sent in .11 s, and a load may take twice that, and 20 ms."""
    sources = Sources(loads=True)
    for number in range(3):
        assert sources.worth_loading(1100, 800, load_s, "p", 100.0 * number), "not known yet"
        sources.arrived(sources.promised("p", 100.0 * number, 1000), 100.0 * number + 0.1)
    assert sources.worth_loading(1100, 800, load_s, "p", 1e3) is is_loaded
    assert sources.worth_loading(1100, 800, 0.0, "p", 1e3), "not known"


# --- the rest -------------------------------------------------------------------------------------


def test_where_prefill_is_down_the_other_bound_holds() -> None:
    config = ComputeConfig(below=100, down_below=5000)
    assert Sources(config, fails_over=True).most_tokens(is_down=True) == 5000
    assert Sources(config, fails_over=True).most_tokens(is_down=False) == 100
    assert Sources(config).most_tokens(is_down=True) == 100


def test_workers_that_were_asked_long_ago_are_forgotten() -> None:
    scale = Scale(rate=1e4)
    for number in range(400):
        scale.transfer(100, 0.1, address=f"p{number}")
    assert len(scale.sources._workers) == 256


def test_a_measure_that_grew_takes_the_place_of_the_last_one() -> None:
    rate = Rate()
    for units, seconds, amends in ((100, 1.0, False), (100, 1.0, False), (200, 6.0, True)):
        rate.add(units, seconds, amends)
    assert (len(rate), rate.most_units, rate.unit_s) == (2, 200, 0.01)
