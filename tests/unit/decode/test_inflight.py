"""The index of what is on its way, against a list that is searched through; and who goes with
whom."""

import sys
import threading
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixkv.cache.radix_key import RadixKey
from prefixkv.decode.flights import Flight, Flights, Source
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import InternalError
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.request import Request

PAGE_SIZE = 2
BOOKS = PageManager(4, PAGE_SIZE, 2)
SOURCE = Source()
SOURCE.name = "any"


class Air:
    """Flights without pages of their own: places in rows are all that the index knows of them."""

    def __init__(self) -> None:
        self.flights = Flights(PAGE_SIZE)
        self.count = 0

    def start(
        self,
        tokens: str | list[int],
        cached_pages: int = 0,
        namespace: Any = None,
        *,
        shareable: bool = True,
        check: bool = True,
    ) -> Flight:
        """Of tokens of which the tree has `cached_pages`; what is on its way already is joined."""
        key = RadixKey(
            [ord(letter) for letter in tokens] if isinstance(tokens, str) else tokens, namespace
        )
        self.count += 1
        joined, end = self.flights.find(key, cached_pages) if shareable else (None, cached_pages)
        req = DecodeRequest(Request(str(self.count), key, room=self.count), BOOKS, 0.0)
        req.pages_held = RequestPages(0, None, cached_pages, end - cached_pages, len(key), 0)
        flight = Flight(
            SOURCE, req, req.request, "", req.room_key, key, req.pages_held, end,
            len(key) // PAGE_SIZE, joined,
        )  # fmt: skip
        self.flights.enter(flight, shareable)
        assert self.flights.by_owner.get(req) is flight
        if check:
            self.flights.check_invariants()
        return flight

    def find(
        self, tokens: str, cached_pages: int = 0, namespace: Any = None
    ) -> tuple[Flight | None, int]:
        return self.flights.find(
            RadixKey([ord(letter) for letter in tokens], namespace), cached_pages
        )


# --- looking --------------------------------------------------------------------------------------


def test_the_whole_prefix_has_to_be_equal_not_the_page_where_it_begins_alone() -> None:
    air = Air()
    a = air.start("aaxxyy", cached_pages=1)
    b = air.start("bbxxyy", cached_pages=1)
    assert b.joined is None
    assert air.find("aaxxzz", 1) == (a, 2)
    assert air.find("bbxxyyzz", 1) == (b, 3)
    assert air.find("ccxxyy", 1) == (None, 1)
    assert air.find("aaxxyy", 2) == (None, 2), "nobody begins there"


# --- who goes with whom ---------------------------------------------------------------------------


def _chain() -> tuple[Air, list[Flight]]:
    """a <- b <- c, and d beside b."""
    air = Air()
    return air, [air.start("aabb"), air.start("aabbcc"), air.start("aabbccdd"), air.start("aabbxx")]


@pytest.mark.parametrize(
    ("what", "value", "law"),
    [
        ("joined", None, "what waits for it knows that"),
        ("number", 0, "numbers count up"),
        ("start_pages", 3, "no two begin alike"),
        ("end_pages", 0, "what is joined is brought"),
    ],
)
def test_a_broken_law_is_named(what: str, value: Any, law: str) -> None:
    air, (_, b, _, _) = _chain()
    setattr(b, what, value)
    with pytest.raises(InternalError, match=law):
        air.flights.check_invariants()


# --- the model ------------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """A tree that is a set of prefixes, and a list of flights: every chain of them is tried."""

    @initialize()
    def start(self) -> None:
        self.air = Air()
        self.tree: set[tuple[Any, ...]] = set()
        self.live: list[Flight] = []

    def _prefix(self, key: RadixKey, num_pages: int) -> tuple[Any, ...]:
        return (key.namespace, *key.tokens()[: num_pages * PAGE_SIZE].tolist())

    def _cached(self, key: RadixKey) -> int:
        num_pages = 0
        while num_pages < len(key) // PAGE_SIZE and self._prefix(key, num_pages + 1) in self.tree:
            num_pages += 1
        return num_pages

    def _search(self, key: RadixKey, start: int) -> tuple[Flight | None, int]:
        """The best of all ways to go on from flight to flight."""
        best: tuple[Flight | None, int] = (None, start)
        for flight in self.live:
            if flight not in self.air.flights.starts or flight.start_pages != start:
                continue
            for end in range(start + 1, min(flight.end_pages, len(key) // PAGE_SIZE) + 1):
                if self._prefix(key, end) == self._prefix(flight.key, end):
                    further = self._search(key, end)
                    best = max(
                        best, further if further[0] else (flight, end), key=lambda way: way[1]
                    )
        return best

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        namespace=st.sampled_from([None, None, "lora"]),
        shareable=st.sampled_from([True, True, True, False]),
    )
    def depart(self, tokens: list[int], namespace: Any, shareable: bool) -> None:
        key = RadixKey(tokens, namespace)
        cached = self._cached(key) if shareable else 0
        expected = self._search(key, cached) if shareable else (None, 0)
        flight = self.air.start(tokens, cached, namespace, shareable=shareable)
        assert (flight.joined, flight.start_pages) == expected
        self.live.append(flight)

    @precondition(lambda self: any(flight.joined is None for flight in self.live))
    @rule(which=st.integers(0, 20))
    def commit(self, which: int) -> None:
        ready = [flight for flight in self.live if flight.joined is None]
        flight = ready[which % len(ready)]
        waiters = [other for other in self.live if other.joined is flight]
        is_shared = flight in self.air.flights.starts
        assert self.air.flights.commit(flight) == waiters
        self.live.remove(flight)
        if is_shared:
            self.tree |= {self._prefix(flight.key, end) for end in range(1, flight.end_pages + 1)}
        for waiter in waiters:
            waiter.pages.num_locked, waiter.pages.num_joined = waiter.start_pages, 0

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def lose(self, which: int) -> None:
        flight = self.live[which % len(self.live)]
        gone = {flight}
        while True:  # until nothing more goes
            more = {other for other in self.live if other.joined in gone}
            more |= {
                one.joined
                for one in gone
                if one.joined and not one.joined.owner and one.joined.waiters.keys() <= gone
            }
            if more <= gone:
                break
            gone |= more
        expected = [other for other in self.live if other in gone and other is not flight]
        assert self.air.flights.remove(flight) == expected
        self.live = [other for other in self.live if other not in gone]

    @precondition(lambda self: any(flight.waiters for flight in self.live))
    @rule(which=st.integers(0, 20))
    def adopt(self, which: int) -> None:
        needed = [flight for flight in self.live if flight.waiters]
        self.air.flights.disown(needed[which % len(needed)])

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A prefix that nothing goes on from, and no flight holds."""
        held = {
            self._prefix(one.key, end)
            for one in self.live
            for end in range(1, one.pages.num_locked + 1)
        }
        free = [
            one
            for one in self.tree - held
            if not any(other[: len(one)] == one for other in self.tree - {one})
        ]
        if free:
            self.tree.remove(data.draw(st.sampled_from(sorted(free, key=repr))))

    @rule(often=st.integers(0, 9))
    def flush(self, often: int) -> None:
        if often:
            return
        gone = [flight for flight in self.live if flight.joined is not None or flight.owner is None]
        assert self.air.flights.flush() == gone
        self.live = [flight for flight in self.live if flight not in gone]
        self.tree.clear()
        for flight in self.live:
            assert flight not in self.air.flights.starts

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "air"):
            self.air.flights.check_invariants()
            assert list(self.air.flights) == self.live


TestModel = Model.TestCase


def test_another_thread_may_ask_for_all_while_flights_come_and_go() -> None:
    air, done = Air(), threading.Event()
    failures: list[BaseException] = []

    def look_on() -> None:
        try:
            while not done.is_set():
                assert len(list(air.flights)) <= 3
        except BaseException as error:
            failures.append(error)

    interval_s = sys.getswitchinterval()
    looker = threading.Thread(target=look_on)
    looker.start()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(500):
            for flight in [air.start(first * 4, check=False) for first in "abc"]:
                air.flights.commit(flight)
    finally:
        sys.setswitchinterval(interval_s)
        done.set()
        looker.join()
    assert failures == []
