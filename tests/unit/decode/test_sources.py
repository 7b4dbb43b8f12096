"""The rule by which decode computes what a request lacks, or asks prefill."""

from __future__ import annotations

import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode import sources as sources_module
from prefixkv.decode.services import FRESH_S
from prefixkv.decode.sources import _SURE, Lack, Source, Sources, Way, fair
from prefixkv.protocol.ids import RoomKey

HERE, PREFILL = Source.HERE, Source.PREFILL


class Scale:
    """Sources with measurements: decode computes `rate` tokens/s, prefill waits `wait_s` and then
    sends `sent` tokens/s."""

    def __init__(self, config: ComputeConfig | None = None, **measured: float) -> None:
        self.sources = Sources(config or ComputeConfig())
        self.now_s = 100.0
        if rate := measured.get("rate"):
            self.compute(rate)
        if sent := measured.get("sent"):
            for number, tokens in enumerate((100, 900, 500, 2000)):
                self.now_s += 30.0  # none waits for the one before
                self.transfer(number, tokens, measured.get("wait_s", 0.0) + tokens / sent)
            self.now_s = 100.0 + 4 * 30.0
            if rate:
                self.compute(rate)

    def compute(self, rate: float) -> None:
        """As many passes, each of 1,000 tokens, as make decode sure of what one costs."""
        for _ in range(_SURE):
            self.sources.chunk(1000, 1000 / rate, running=0, now_s=self.now_s)

    def transfer(self, number: int, tokens: int, seconds: float, address: str = "p") -> None:
        key = RoomKey(number, 0)
        self.sources.promised(address, key, self.now_s - seconds, tokens)
        self.sources.arrived(address, key, tokens, self.now_s)

    def choose(self, missing: int, due: int = 0, running: int = 0, address: str = "p") -> Source:
        return self.sources.choose(missing, due, running, address, self.now_s)


def test_without_a_config_everything_comes_from_prefill() -> None:
    sources = Sources()
    assert sources.choose(1, 0, 0, "p", 0.0) is PREFILL
    assert sources.most_tokens(is_down=True) == -1
    assert sources.chunk_tokens(0) == 0


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
    assert scale.choose(65) is PREFILL  # what it takes here is known
    none = Scale(ComputeConfig(below=0))
    assert none.choose(1) is PREFILL


def test_no_measurement_takes_more_than_the_bound_here() -> None:
    bound = ComputeConfig().below
    assert Scale(rate=1e9, sent=1.0).choose(bound) is HERE
    assert Scale(rate=1e9, sent=1.0).choose(bound + 1) is PREFILL


def test_the_sooner_way_is_taken() -> None:
    # 1,000 tokens from prefill in .1 + .1 s.
    for rate, chosen in ((5100, HERE), (4900, PREFILL), (1e5, HERE), (10, PREFILL)):
        assert Scale(rate=rate, sent=1e4, wait_s=0.1).choose(1000) is chosen


def test_what_is_due_here_makes_it_slower_here() -> None:
    scale = Scale(rate=1e4, sent=1e4, wait_s=0.1)
    assert scale.choose(1000, due=900) is HERE  # .19 of .2 s
    assert Scale(rate=1e4, sent=1e4, wait_s=0.1).choose(1000, due=1100) is PREFILL


def test_beside_a_batch_each_chunk_waits_for_its_step() -> None:
    scale = Scale(ComputeConfig(chunk_tokens=100), rate=1e4, sent=1e4, wait_s=0.1)
    for _ in range(100):
        scale.sources.step(0.05)
    # A chunk adds .5 * 50 ms at most: but 100 tokens take 10 ms. Ten steps of 60 ms are .6 s.
    assert scale.sources.chunk_tokens(1) == 100
    assert scale.choose(1000, running=0) is HERE
    assert scale.choose(1000, running=1) is PREFILL


def test_a_long_prompt_for_which_others_would_wait_is_prefills() -> None:
    """5,000 tokens take .5 s here and 2 s from prefill: at 10 requests a second five wait."""
    scale = Scale(rate=1e4, sent=1e4, wait_s=1.5)
    assert scale.choose(5000) is HERE
    for _ in range(200):
        scale.now_s += 0.1
        scale.choose(500)
    assert scale.choose(5000) is PREFILL
    assert scale.choose(500) is HERE
    # Where a request comes every hundred seconds, none waits.
    scale = Scale(rate=1e4, sent=1e4, wait_s=1.5)
    for number in range(200):
        scale.now_s += 100.0
        scale.transfer(number, 100, 1.6)
        scale.sources.chunk(100, 0.01, running=0, now_s=scale.now_s)
        scale.choose(500)
    assert scale.choose(5000) is HERE


def test_a_burst_at_the_beginning_is_no_rate_of_requests() -> None:
    scale = Scale(rate=1e4, sent=1e4, wait_s=1.5)
    assert [scale.choose(200) for _ in range(5)] == [HERE] * 5


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
        sources.step(0.004, 2)
    for number in range(400):
        sources.next_pass(running=2)
        tokens = sources.chunk_tokens(2)
        chunks.append(tokens)
        if tokens:
            sources.chunk(tokens, 0.011 + tokens / 8000, 2, 0.01 * number)
        else:
            sources.step(0.004, 2)
    assert set(chunks) == {0, 8}
    last = chunks[100:]
    assert sum(last) / 8 == pytest.approx(len(last) / 4, rel=0.05)
    # They are spread evenly, not one after the other.
    assert all(not any(last[at + 1 : at + 3]) for at, tokens in enumerate(last) if tokens)
    # So a prompt takes four steps per chunk, which the rule knows.
    assert sources._compute_s(80, 2) == pytest.approx(10 * (4 * 0.004 + 0.008), rel=0.15)
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
        self.sources.step(0.02 + late_s, 32)

    def run(self, late_s: float = 0.0) -> int:
        """Make a pass, which is late if it has a chunk. Return the tokens of that."""
        self.sources.next_pass(32)
        tokens = self.sources.chunk_tokens(32)
        if not tokens:
            self.step()
            return 0
        took_s = 0.02 + 2e-5 * tokens + late_s
        self.now_s += took_s
        self.sources.chunk(tokens, took_s, 32, self.now_s)
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
        passes.sources.chunk(256, slow_s, 0, passes.now_s + slow_s)
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
    """Each prompt costs 1 ms, and each token .1: 4 ms are left in a step of 10."""
    sources = Sources(ComputeConfig(itl_share=0.5))
    for number in range(64):
        sources.step(0.01)
        prompts, tokens = 1 + number % 3, 10 + 7 * (number % 5)
        sources.chunk(tokens, 0.01 + 1e-3 * prompts + 1e-4 * tokens, 1, 0.0, prompts)
    assert sources.chunk_tokens(1) == pytest.approx(40, abs=2)
    assert sources.further_prompt_tokens(1) == pytest.approx(10, abs=2)
    assert sources.further_prompt_tokens(0) == 0, "none waits"
    assert sources.chunk_s(20, prompts=3) == pytest.approx(0.005, rel=0.05)


def test_a_chunk_beside_a_batch_is_measured_without_the_step() -> None:
    sources = Sources(ComputeConfig())
    for _ in range(100):
        sources.step(0.02)
    sources.chunk(200, 0.03, running=1, now_s=0.0)
    assert sources.chunk_s(200) == pytest.approx(0.01, rel=0.05)
    # Noise may make it seem to cost nothing, or less.
    for _ in range(100):
        sources.chunk(200, 0.001, running=1, now_s=0.0)
        assert 0.0 <= sources.chunk_s(200) <= 0.01


def test_beside_a_batch_that_never_steps_alone_the_step_is_guessed() -> None:
    """1,000 tokens a second were measured before: of a pass with 8 that takes 28 ms 20 are a
    step."""
    scale = Scale(ComputeConfig(itl_share=0.5), rate=1e3)
    sources = scale.sources
    tokens = [sources.chunk_tokens(1)]
    for _ in range(10):
        sources.chunk(tokens[-1], 0.02 + 1e-3 * tokens[-1], 1, scale.now_s)
        tokens.append(sources.chunk_tokens(1))
    assert tokens[0] == 8
    assert tokens[1:] == pytest.approx([10] * 10, abs=1)


def test_chunks_beside_a_batch_grow_no_faster_than_twice_as_long() -> None:
    """Whatever the first ones seem to cost: those of a GPU cost nothing."""
    sources, tokens = Sources(ComputeConfig()), []
    for _ in range(7):
        sources.step(0.02)
        tokens.append(sources.chunk_tokens(1))
        sources.chunk(tokens[-1], 0.02, 1, 0.0)
    assert tokens == [8, 16, 32, 64, 128, 256, 256]


def test_a_prefill_worker_answers_one_promise_after_the_other() -> None:
    """.2 s for 1,000 tokens each: the third is there after .6 s."""
    scale = Scale(rate=100, sent=1e4, wait_s=0.1)

    def seconds(address: str = "p") -> float:
        return scale.sources.choose_way([Lack(1000)], 0, 0, address, scale.now_s).seconds

    for number in range(3):
        assert seconds() == pytest.approx(0.2 * (number + 1), abs=0.01)
        scale.sources.promised("p", RoomKey(70 + number, 0), scale.now_s, 1000)
    assert seconds("other") == pytest.approx(0.2, abs=0.01)
    # When one has arrived, the next one begins: it is no slower for having waited.
    for number in range(3):
        scale.now_s += 0.2
        scale.sources.arrived("p", RoomKey(70 + number, 0), 1000, scale.now_s)
        assert seconds() == pytest.approx(0.2 * (3 - number), abs=0.01)


def test_a_prefill_worker_that_does_not_answer_counts_as_slow_as_it_is_by_now() -> None:
    scale = Scale(rate=1e4, sent=1e6)  # prefill takes no time
    assert scale.choose(1000) is PREFILL
    scale.sources.promised("p", RoomKey(77, 0), scale.now_s - 1.0, 1000)
    scale.now_s += 0.01  # its last answer was before
    assert scale.choose(1000) is PREFILL
    scale.now_s += 1.0
    assert scale.choose(1000) is HERE
    scale.sources.gave_up("p", RoomKey(77, 0))
    assert scale.choose(1000) is PREFILL


def test_a_prefill_worker_that_is_slower_than_the_others_is_known() -> None:
    scale = Scale(rate=1e4, sent=1e6)
    for number in range(40):
        scale.now_s += 3.0
        scale.transfer(number, 1000, 0.01, address="p")
        scale.transfer(number, 1000, 3.0, address="slow")
    scale.sources.chunk(1000, 0.1, running=0, now_s=scale.now_s)
    assert scale.choose(1000, address="slow") is HERE
    assert scale.choose(1000, address="p") is PREFILL


def test_a_new_prefill_worker_counts_as_one_that_does_nothing_else() -> None:
    scale = Scale(rate=1e4, sent=1e6)
    assert scale.choose(1000, address="new") is PREFILL
    assert Scale(rate=1e6, sent=1e4).choose(1000, address="new") is HERE


def test_transfers_of_one_size_say_nothing_of_the_rate() -> None:
    scale = Scale(rate=500.0)
    for number in range(9):
        scale.now_s += 1.0
        scale.transfer(number, 1000, 1.0)
    # Whatever the size, it takes 1 s: 400 tokens take .8 s here, 600 take 1.2.
    assert scale.choose(400) is HERE
    assert scale.choose(600) is PREFILL


def test_a_short_transfer_counts_as_much_as_a_long_one() -> None:
    """One that took 6 s, where .35 are expected, says little of what 200 tokens take."""
    scale = Scale(rate=2500)  # .08 s for 200 tokens
    for number, tokens in enumerate((200, 60_000, 400, 200, 300, 30_000, 200)):
        scale.now_s += 100.0
        scale.transfer(number, tokens, 6.0 if tokens == 30_000 else tokens / 1e5 + 0.05)
    scale.compute(2500)
    way = scale.sources.choose_way([Lack(200)], 0, 0, "p", scale.now_s)
    assert way.source is PREFILL
    assert way.seconds < 0.08


# --- what is measured again -----------------------------------------------------------------------


def test_prefill_is_tried_where_nothing_of_it_is_known_one_request_at_a_time() -> None:
    """Decode is slow, and all that it is given is below what it takes while nothing is known."""
    scale = Scale(rate=100.0)
    taken = []
    for number in range(12):
        chosen = scale.choose(200)
        taken.append(chosen)
        if chosen is PREFILL:
            key = RoomKey(number, 0)
            scale.sources.promised("p", key, scale.now_s, 200)
            if number < 3:
                assert scale.choose(200) is HERE  # it is not answered yet
            scale.now_s += 0.1
            scale.sources.arrived("p", key, 200, scale.now_s)
    assert taken == [PREFILL] * 12  # three to know it, the others because it is sooner


def test_prefill_is_tried_again_when_it_was_not_measured_lately() -> None:
    """As soon as all that was computed here has taken 50 times what the try takes longer, .97 s."""
    scale, times = Scale(rate=1e4, sent=1000.0), []
    for number in range(700):
        scale.now_s += FRESH_S / 60
        scale.sources.chunk(1000, 0.1, running=0, now_s=scale.now_s)
        if scale.choose(1000) is PREFILL:
            assert not times or number - times[-1] >= 440
            times.append(number)
            scale.sources.promised("p", RoomKey(number, 0), scale.now_s, 1000)
            assert scale.choose(1000) is HERE, "one at a time"
            scale.sources.arrived("p", RoomKey(number, 0), 1000, scale.now_s + 1.0)
    assert times[0] >= 60
    assert len(times) == 1


def test_own_compute_is_tried_again_with_little_when_it_was_not_measured_lately() -> None:
    """As soon as all that prefill sent has taken 50 times what the try takes longer."""
    scale, times = Scale(rate=1e4, sent=1e5), []
    for number in range(4000):
        scale.now_s += FRESH_S / 60
        if scale.choose(512) is HERE:
            assert scale.choose(100) is PREFILL, "one at a time"
            times.append(number)
            scale.sources.chunk(512, 0.0512, running=0, now_s=scale.now_s)
        else:
            scale.transfer(number, 512, 0.005)
    assert times[0] >= 59
    # It takes .046 s longer than .005: at 2 % of those once in 460 requests.
    assert 1 < len(times) <= 4000 / 440
    scale.now_s += 2 * FRESH_S
    for missing, due in ((513, 0), (500, 13)):
        scale.sources._try_s = 1e9
        assert scale.choose(missing, due=due) is PREFILL, "only with little"
    assert scale.choose(500) is HERE


def test_a_way_that_would_cost_much_is_hardly_ever_tried() -> None:
    """5 s more, where a request takes 5 ms and comes every 10 minutes: each would be a try."""
    scale = Scale(rate=100.0, sent=1e5)
    for number in range(1000):
        scale.now_s += 10 * FRESH_S
        assert scale.choose(500) is PREFILL
        scale.transfer(number, 500, 0.005)


@pytest.mark.parametrize(("rate", "chosen"), [(2e4, HERE), (5e3, PREFILL)])
def test_the_sooner_way_by_what_is_known_is_taken_however_old_that_is(
    rate: float, chosen: Source
) -> None:
    scale = Scale(rate=rate, sent=1e4)
    scale.now_s += 100 * FRESH_S
    assert [scale.choose(500) for _ in range(2)] == [chosen, chosen]


# --- what decode has computed, and prefill has not ------------------------------------------------


def test_prefill_takes_longer_where_decode_has_computed_the_prompts_beginning() -> None:
    """1 ms a token for those too: the rest of the line does not see them."""
    scale = Scale(rate=100.0)
    for number in range(40):
        tokens, again = 100 + 37 * (number % 11), 600 * (number % 3 == 0)
        key = RoomKey(number, 0)
        scale.sources.promised("p", key, scale.now_s, tokens, again=again)
        scale.now_s += 0.05 + 1e-4 * tokens + 1e-3 * again
        scale.sources.arrived("p", key, tokens, scale.now_s)
    scale.compute(100.0)
    for again, seconds in ((0, 0.07), (900, 0.97)):
        way = scale.sources.choose_way([Lack(200, again=again)], 0, 0, "p", scale.now_s)
        assert way.source is PREFILL
        assert way.seconds == pytest.approx(seconds, rel=0.1)
    # What waits with the worker takes as long.
    scale.sources.promised("p", RoomKey(90, 0), scale.now_s, 200, again=900)
    way = scale.sources.choose_way([Lack(200)], 0, 0, "p", scale.now_s)
    assert way.seconds == pytest.approx(0.97 + 0.07, rel=0.1)


def test_until_it_is_measured_prefill_computes_as_fast_as_it_sends() -> None:
    scale = Scale(sent=1e3)
    assert scale.sources._line.per_again_s == 0.0
    scale.sources.promised("p", RoomKey(70, 0), scale.now_s, 100, again=16)
    scale.sources.arrived("p", RoomKey(70, 0), 100, scale.now_s + 0.1)
    assert scale.sources._line.per_again_s == pytest.approx(1e-3, rel=0.1)


def test_what_is_computed_here_costs_a_later_request_that_is_asked_of_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """600 tokens take .06 s here and .1 s from prefill: but .06 s of prefill's when the next turn
    is asked of it, as nearly all are."""
    monkeypatch.setattr(sources_module, "OTHERS", 0.0)
    taken = {}
    for goes_on in (False, True):
        scale = Scale(rate=1e4)
        for number in range(200):
            tokens, again = 100 + 37 * (number % 11), 600 * (number % 3 == 0)
            key = RoomKey(number, 0)
            scale.sources.choose(tokens, 10**6, 0, "p", scale.now_s, goes_on=goes_on)
            scale.sources.promised("p", key, scale.now_s, tokens, again=again)
            scale.now_s += 0.04 + 1e-4 * (tokens + again)
            scale.sources.arrived("p", key, tokens, scale.now_s)
            scale.sources.chunk(100, 0.01, running=0, now_s=scale.now_s)
        scale.now_s += 1.0
        taken[goes_on] = scale.choose(600)
    assert taken == {False: HERE, True: PREFILL}


# --- what is loaded meanwhile ---------------------------------------------------------------------


def test_what_prefill_computes_again_beside_a_load_is_known() -> None:
    """1 ms a token for those that decode loads, .1 ms for those that are sent."""
    scale = Scale(rate=1e5)
    for number in range(60):
        tokens, loaded = 100 + 37 * (number % 11), 500 * (number % 7)
        scale.now_s += 30.0
        key = RoomKey(number, 0)
        scale.sources.promised("p", key, scale.now_s - 20.0, tokens, loaded)
        scale.now_s += 1e-4 * tokens + 1e-3 * loaded - 20.0
        scale.sources.arrived("p", key, tokens, scale.now_s)
    scale.sources.chunk(1000, 100.0, running=0, now_s=scale.now_s)
    for lack, seconds in ((Lack(400), 0.04), (Lack(400, 2000, 0.01), 2.04)):
        way = scale.sources.choose_way([lack], 0, 0, "p", scale.now_s)
        assert way.source is PREFILL
        assert way.seconds == pytest.approx(seconds, rel=0.1, abs=0.01)


@pytest.mark.parametrize(("load_s", "loaded"), [(0.2, 800), (0.3, 0)])
def test_what_is_loaded_is_sent_instead_where_that_is_much_sooner(
    load_s: float, loaded: int
) -> None:
    """All of it is sent in .11 s, and a load may take twice that, and 20 ms."""
    scale = Scale(rate=100.0, sent=1e4)
    lacks = [Lack(300, 800, load_s), Lack(1100)]
    way = scale.sources.choose_way(lacks, 0, 0, "p", scale.now_s)
    assert (way.source, way.loaded, way.sent_tokens) == (PREFILL, loaded, 1100 - loaded)


def test_decode_computes_no_sooner_than_what_is_before_it_is_loaded() -> None:
    scale = Scale(rate=1e5, sent=1e3)
    lacks = [Lack(300, 800, 5.0), Lack(1100)]
    way = scale.sources.choose_way(lacks, 0, 0, "p", scale.now_s)
    assert (way.source, way.loaded, way.sent_tokens) == (HERE, 0, 0)
    way = scale.sources.choose_way(lacks[:1], 0, 0, "p", scale.now_s)
    assert way.loaded == 800
    assert way.seconds == pytest.approx(5.003, abs=0.01)


# --- the rest -------------------------------------------------------------------------------------


def test_where_prefill_is_down_the_other_bound_holds() -> None:
    config = ComputeConfig(below=100, down_below=5000)
    assert Sources(config, fails_over=True).most_tokens(is_down=True) == 5000
    assert Sources(config, fails_over=True).most_tokens(is_down=False) == 100
    assert Sources(config).most_tokens(is_down=True) == 100


def test_of_the_ways_that_send_fair_takes_the_one_that_sends_least_if_it_is_fast_enough() -> None:
    sends = [Way(PREFILL, 1.0, 500), Way(PREFILL, 2.02, 100)]
    assert fair(sends).sent_tokens == 100
    assert fair([sends[0], Way(PREFILL, 2.03, 100)]).sent_tokens == 500
    # One that sends nothing takes nothing from the link, and need not be slower for that.
    assert fair([*sends, Way(HERE, 1.9, 0)]).source is HERE
    assert fair([*sends, Way(HERE, 2.1, 0)]).sent_tokens == 100
    assert fair([Way(HERE, 3.0, 0), Way(HERE, 2.0, 0)]).seconds == 2.0


def test_seconds_for_which_others_wait_weigh_more() -> None:
    sent, here = Way(PREFILL, 1.0, 500), Way(HERE, 0.6, 0)
    assert fair([sent, here]) is here
    assert fair([sent, here._replace(weight=1.6)]) is not sent
    assert fair([sent, here._replace(weight=1.7)]) is sent


def test_workers_that_were_asked_long_ago_are_forgotten() -> None:
    scale = Scale(rate=1e4)
    for number in range(400):
        scale.transfer(number, 100, 0.1, address=f"p{number}")
    assert len(scale.sources._workers) == 256
