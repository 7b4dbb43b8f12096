"""When each key is woken: `Timers` against a dict, the pauses of `Backoff`, the end of a `Wait`."""

import weakref
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefixkv.protocol.timers
from prefixkv.protocol.timers import Backoff, Timers, Wait

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wake"), st.sampled_from("abc"), st.integers(0, 20)),
        st.tuples(st.just("forget"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("due"), st.none(), st.integers(0, 5)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("few", [0, 64], ids=["always tidy", "as it is"])
@given(steps=_STEPS)
def test_timers_wake_each_key_once_and_never_late(
    steps: list[tuple[str, str | None, int | None]], few: int
) -> None:
    with patch.object(prefixkv.protocol.timers, "_FEW", few):
        _against_a_dict(steps)


def _against_a_dict(steps: list[tuple[str, str | None, int | None]]) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, int] = {}
    now_s = 0
    for what, key, number in steps:
        if what == "wake":
            timers.wake(key, now_s + number)
            model[key] = min(model.get(key, now_s + number), now_s + number)
        elif what == "forget":
            timers.forget(key)
            model.pop(key, None)
        else:
            now_s += number
            due = timers.due(now_s)
            assert sorted(due) == sorted(key for key, when_s in model.items() if when_s <= now_s)
            model = {key: when_s for key, when_s in model.items() if key not in due}
        assert len(timers) == len(model)
        assert timers.next_s <= min(model.values(), default=float("inf")), (
            "a wake-up would come late"
        )


@pytest.mark.parametrize("waiting", [1, 500])
def test_keys_that_are_forgotten_are_let_go_long_before_their_time(waiting: int) -> None:
    """Most waits end long before their deadlines: what waited is not to be held until then."""
    timers: Timers[Any] = Timers()
    keys = [_Key() for _ in range(2000)]
    for key in range(waiting):
        timers.wake(key, 100.0 + key)
    for key in keys:
        timers.wake(key, 600.0)
        timers.forget(key)
        timers.wake(0, 100.0 - key.number / 100)
    refs = [weakref.ref(key) for key in keys]
    del key, keys
    assert sum(ref() is not None for ref in refs) <= 64 + 2 * waiting
    assert timers.due(1000.0) == list(range(waiting))


def test_what_is_dropped_is_what_was_forgotten_not_what_was_asked_for_since() -> None:
    timers: Timers[int] = Timers()
    for when_s in (3.0, 5.0):
        timers.forget(-1)
        timers.wake(-1, when_s)
    for key in range(200):
        timers.wake(key, 600.0)
        timers.forget(key)
    assert timers.next_s == 5.0, "it has been made anew"
    assert (timers.due(3.0), timers.due(5.0)) == ([], [-1])


class _Key:
    numbers = count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


def test_a_key_that_asks_for_now_again_comes_with_the_next_call() -> None:
    timers: Timers[str] = Timers()
    timers.wake("a", 1.0)
    woken = []
    for key in timers.due(1.0):
        woken.append(key)
        assert len(woken) < 3, "due never ends"
        timers.wake(key, 1.0)
    assert woken == ["a"]
    assert timers.due(1.0) == ["a"]


@pytest.mark.parametrize("first_s", [0.25, 3.0])
def test_backoff_doubles_up_to_eight_times_its_first_pause(first_s: float) -> None:
    backoff = Backoff(first_s)
    assert not backoff.take(1e9), "nothing was said yet"
    backoff.start(0.0)
    now_s, pauses = 0.0, []
    for _ in range(6):
        pauses.append((backoff.due_s - now_s) / first_s)
        assert not backoff.take(backoff.due_s - 1e-6)
        now_s = backoff.due_s
        assert backoff.take(now_s)
    assert pauses == [1, 2, 4, 8, 8, 8]
    backoff.start(now_s)
    assert backoff.due_s == now_s + first_s


def test_a_visit_that_breaks_off_forgets_no_peer() -> None:
    """The key that raised is visited again a second later, those behind it at once."""
    timers: Timers[str] = Timers()
    for number, key in enumerate("abcd"):
        timers.wake(key, 1.0 + number)
    seen: list[str] = []

    def look(key: str) -> None:
        seen.append(key)
        if key == "b" and len(seen) == 2:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        timers.visit(10.0, look)
    assert seen == ["a", "b"]
    timers.visit(10.0, look)
    assert seen == ["a", "b", "c", "d"]
    assert timers.next_s == 11.0
    timers.visit(11.0, look)
    assert seen[4:] == ["b"]


@given(st.integers(1, 30), st.integers(1, 30), st.lists(st.integers(0, 8), max_size=30))
def test_a_wait_ends_a_patience_after_it_began_or_last_heard_and_at_its_longest(
    patience_s: int, longest_s: int, pauses: list[int]
) -> None:
    """Words come after these pauses; what waits looks when the wait is due, not more often."""
    wait = Wait(longest_s)
    wait.start(100.0, patience_s)
    words = [100.0]
    for pause_s in pauses:
        words.append(words[-1] + pause_s)
    end_s = words[0] + patience_s
    for word_s in words:
        if word_s <= end_s:
            end_s = max(end_s, word_s + patience_s)
    end_s = min(end_s, 100.0 + max(longest_s, patience_s))
    looks = 0
    while wait.goes_on(max(word for word in words if word <= wait.due_s), wait.due_s):
        looks += 1
        assert looks <= 40, "it has no end"
    assert wait.due_s == end_s
    assert (wait.limit == "longest_wait_s") <= (end_s == 100.0 + longest_s)


def test_a_wait_that_is_not_due_goes_on_and_stays_as_it_is() -> None:
    wait = Wait(60.0)
    wait.start(0.0, 10.0)
    assert wait.goes_on(5.0, 9.9)
    assert (wait.due_s, wait.limit) == (10.0, "the deadline")
    assert not wait.goes_on(-1e9, 10.0)
    assert not wait.goes_on(-1e9, 10.0), "nor later"
    assert wait.due_s == 10.0, "what was due is due"
    wait.start(20.0, 100.0)
    assert (wait.due_s, wait.last_s, wait.limit) == (120.0, 120.0, "the deadline")
