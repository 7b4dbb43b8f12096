"""The inbox: nothing is lost, nobody waits for what is there, nobody spins on what is not. And
nodes are used from one thread, and say so where PREFIXKV_DEBUG is 1, as it is in tests."""

import fcntl
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixkv import DecodeConfig, DecodeNode, Mesh, PrefillConfig, PrefillNode, Request, threads
from prefixkv.errors import CallerError
from prefixkv.spi import DecodeGroup, PrefillGroup
from prefixkv.threads import VARIABLE, Inbox, OneThread
from prefixkv.transfer import DecodeTransfers, PrefillTransfers
from tests.support.node_pair import make_pool
from tests.support.patience import PATIENCE_S, returned


@pytest.fixture
def inbox() -> Iterator[Inbox[int]]:
    made: Inbox[int] = Inbox()
    yield made
    made.close()


def readable(inbox: Inbox[int]) -> bool:
    return bool(select.select([inbox.fd], [], [], 0)[0])


def test_the_descriptor_is_readable_while_something_is_queued(inbox: Inbox[int]) -> None:
    assert not readable(inbox)
    assert not inbox.pending
    inbox.put(1)
    inbox.put(2)
    assert readable(inbox)
    assert inbox.pending
    assert inbox.drain() == [1, 2]
    assert not readable(inbox)
    assert not inbox.pending
    assert inbox.drain() == []
    inbox.put(3)
    assert readable(inbox)


@pytest.mark.parametrize("timeout_s", [None, math.inf])
def test_a_wait_without_end_is_woken_by_a_put(inbox: Inbox[int], timeout_s: float | None) -> None:
    timer = threading.Timer(0.05, inbox.put, (1,))
    timer.start()
    assert returned(lambda: inbox.wait(timeout_s))
    timer.join()


def test_wait_ends_at_its_timeout_without_burning_the_processor(inbox: Inbox[int]) -> None:
    inbox.put(1)
    inbox.drain()
    before_s, before_cpu_s = time.monotonic(), time.thread_time()
    assert not inbox.wait(0.2)
    assert time.monotonic() - before_s >= 0.19
    assert time.thread_time() - before_cpu_s < 0.05


def test_a_wait_of_less_than_a_millisecond_is_not_a_whole_one(inbox: Inbox[int]) -> None:
    """The shortest of many: a slow machine makes some longer, never all."""
    took = []
    for _ in range(200):
        began_s = time.perf_counter()
        assert not inbox.wait(0.0002)
        took.append(time.perf_counter() - began_s)
    assert 0.0002 <= min(took) < 0.001


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), -math.inf])
def test_a_wait_for_less_than_no_time_looks_once(inbox: Inbox[int], timeout_s: float) -> None:
    assert not inbox.wait(timeout_s)


def test_a_descriptor_beyond_those_of_select_is_waited_for() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD, 1500)
    try:
        assert not threads.wait_readable(high, 0.0)
        os.eventfd_write(fd, 1)
        assert threads.wait_readable(high, None)
    finally:
        os.close(high)
        os.close(fd)


def test_rouse_wakes_a_reader_that_has_nothing_to_take(inbox: Inbox[int]) -> None:
    inbox.notify()
    assert readable(inbox)
    assert inbox.pending
    assert inbox.drain() == []
    assert not readable(inbox)
    inbox.notify()
    assert not inbox.wait(0.01)  # clears it: nothing is there
    assert not readable(inbox)


def test_close_gives_the_descriptor_back_and_later_puts_touch_no_other() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    reused = os.dup2(other, inbox.fd)
    try:
        inbox.put(1)
        inbox.notify()
        inbox.close()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(reused)
    finally:
        for fd in {other, reused}:
            os.close(fd)


# --- interleavings, each forced -------------------------------------------------------------------
# A writer notes that it will write the descriptor, then does; a reader reads it, strikes the note
# out, then takes the items. The other side is let in between two of these steps.


def nothing_is_stuck(inbox: Inbox[int], taken: list[int], want: list[int]) -> None:
    """What has not been taken yet is announced, and the descriptor comes to rest."""
    if taken != want:
        assert readable(inbox)
        taken += inbox.drain()
    assert taken == want
    if inbox.pending:  # all that a node asks
        inbox.drain()
    assert not readable(inbox)
    inbox.put(99)
    assert readable(inbox)
    assert inbox.drain() == [99]


LetIn = Callable[..., None]


@pytest.fixture
def let_in(monkeypatch: pytest.MonkeyPatch) -> LetIn:
    """let_in(name, meanwhile, after=False): the other side gets in before or after the next time
    that the descriptor is read ("clear") or written ("notify")."""

    def prepare(name: str, meanwhile: Callable[[], object], after: bool = False) -> None:
        real = getattr(threads, name)

        def interrupted(fd: int) -> Any:
            monkeypatch.setattr(threads, name, real)
            value = real(fd) if after else None
            meanwhile()
            return value if after else real(fd)

        monkeypatch.setattr(threads, name, interrupted)

    return prepare


@pytest.mark.parametrize("puts", [[2], [2, 3]])
@pytest.mark.parametrize("after_read", [False, True])
def test_a_writer_around_the_reader_s_read(
    inbox: Inbox[int], let_in: LetIn, after_read: bool, puts: list[int]
) -> None:
    inbox.put(1)
    let_in("clear", lambda: [inbox.put(item) for item in puts], after_read)
    nothing_is_stuck(inbox, inbox.drain(), [1, *puts])


@pytest.mark.parametrize("after_read", [False, True])
def test_a_writer_around_the_read_of_a_reader_that_waits(
    inbox: Inbox[int], let_in: LetIn, after_read: bool
) -> None:
    inbox.notify()
    let_in("clear", lambda: inbox.put(2), after_read)
    assert returned(lambda: inbox.wait(None))
    nothing_is_stuck(inbox, inbox.drain(), [2])


def test_a_wait_goes_on_when_the_bell_rang_for_nothing(
    inbox: Inbox[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it rang for another call has drained, say: it rings just before the reader sleeps, then
    an item comes."""
    clear = threads.clear
    writers = iter([inbox.notify, lambda: inbox.put(1)])

    def interrupted(fd: int) -> int:
        value = clear(fd)
        next(writers, lambda: None)()
        return value

    monkeypatch.setattr(threads, "clear", interrupted)
    assert inbox.wait(PATIENCE_S)
    monkeypatch.undo()
    nothing_is_stuck(inbox, inbox.drain(), [1])


@pytest.mark.parametrize("others", [[], [2], [2, 3]])
def test_a_reader_between_the_writer_s_note_and_its_write(
    inbox: Inbox[int], let_in: LetIn, others: list[int]
) -> None:
    """The reader takes the item before it is announced; the announcement that follows must not
    stay. Another writer finds the note."""
    taken: list[int] = []
    let_in("notify", lambda: (taken.extend(inbox.drain()), [inbox.put(item) for item in others]))
    inbox.put(1)
    nothing_is_stuck(inbox, taken, [1, *others])


def test_a_reader_that_waits_between_the_writer_s_note_and_its_write(
    inbox: Inbox[int], let_in: LetIn
) -> None:
    seen: list[bool] = []
    let_in("notify", lambda: seen.append(inbox.wait(0)))
    inbox.put(1)
    assert seen == [True]
    nothing_is_stuck(inbox, [], [1])


def test_two_writers_that_both_write(inbox: Inbox[int], let_in: LetIn) -> None:
    """Neither saw the other's note. The reader is let in after the first write; the second must not
    stay."""
    notes, taken = inbox._begun, []

    class Unseen(deque[None]):
        def __bool__(self) -> bool:
            return False

    inbox._begun = Unseen()
    inbox.put(1)

    def read() -> None:
        notes.extend(inbox._begun)
        inbox._begun = notes
        taken.extend(inbox.drain())

    let_in("notify", read)
    inbox.put(2)
    nothing_is_stuck(inbox, taken, [1, 2])


# --- and hammered ---------------------------------------------------------------------------------


@pytest.fixture
def jumpy() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize("how", ["drain", "wait"])
@pytest.mark.usefixtures("jumpy")
def test_many_writers_and_one_reader_that_sleeps_in_between(how: str) -> None:
    """The reader looks only when it is told to: one lost wake-up leaves items that nobody
    announces."""
    inbox: Inbox[tuple[int, int]] = Inbox()
    num_writers, num_items = 4, 10_000
    poller = select.poll()
    poller.register(inbox.fd, select.POLLIN)

    def sleep() -> bool:
        return inbox.wait(PATIENCE_S) if how == "wait" else bool(poller.poll(PATIENCE_S * 1000))

    def write(writer: int) -> None:
        for i in range(num_items):
            inbox.put((writer, i))

    taken: list[tuple[int, int]] = []
    wakes = 0
    writers = [threading.Thread(target=write, args=(w,)) for w in range(num_writers)]
    for thread in writers:
        thread.start()
    while len(taken) < num_writers * num_items:
        assert sleep() or not inbox.drain(), "items wait that nobody announced"
        wakes += 1
        taken += inbox.drain()
    for thread in writers:
        thread.join()
    for writer in range(num_writers):
        assert [i for w, i in taken if w == writer] == list(range(num_items))
    inbox.drain()
    assert not select.select([inbox.fd], [], [], 0)[0]
    assert wakes <= 2 * len(taken) + num_writers  # a wake-up is for something
    inbox.close()


MESH = Mesh(2, 2)
KINDS: dict[str, Callable[[], Any]] = {
    "DecodeNode": lambda: DecodeNode(make_pool()),
    "PrefillNode": lambda: PrefillNode(make_pool()),
    "DecodeTransfers": lambda: DecodeTransfers(make_pool()),
    "PrefillTransfers": lambda: PrefillTransfers(make_pool()),
    "DecodeGroup": lambda: DecodeGroup([make_pool()], DecodeConfig(), MESH),
    "PrefillGroup": lambda: PrefillGroup([make_pool()], PrefillConfig(), MESH),
}


def in_thread(name: str, call: Callable[[], object]) -> list[Exception]:
    """What the call raises in a thread of its own, which has ended then."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised


@pytest.fixture(params=KINDS)
def used(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Made in one thread that has not ended, used in this one."""
    made: list[Any] = []
    done = threading.Event()

    def make() -> None:
        made.append(KINDS[request.param]())
        done.wait()

    maker = threading.Thread(target=make, name="maker")
    maker.start()
    while not made:
        assert maker.is_alive()
        maker.join(0.01)
    [thing] = made
    with thing:
        thing.wait(0.0)
        yield thing
    done.set()
    maker.join()


def test_another_thread_is_refused_with_both_names(used: Any) -> None:
    kind, here = type(used).__name__, threading.current_thread().name
    for call in (lambda: used.wait(0.0), lambda: used.close()):
        [error] = in_thread("scraper", call)
        assert isinstance(error, CallerError)
        for word in (kind, "'scraper'", repr(here)):
            assert word in str(error)
    used.wait(0.0)  # it is neither closed nor anybody else's


def test_what_any_thread_may_ask_is_free(used: Any) -> None:
    free = sorted(type(used).any_thread)
    assert free
    assert not in_thread("scraper", lambda: [getattr(used, name)() for name in free])


def test_the_next_thread_owns_it_once_the_owner_has_ended() -> None:
    node = PrefillNode(make_pool())
    assert not in_thread("first", lambda: node.add(Request("r", [1], room=1, decode="d")))
    assert node.abort("r")
    assert [type(error) for error in in_thread("third", node.pop_failed)] == [CallerError]
    assert [req.rid for req in node.pop_failed()] == ["r"]
    node.close()


def test_without_the_variable_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with DecodeNode(make_pool()) as node:
        assert type(node) is DecodeNode
        node.stats()
        assert not in_thread("other", node.stats)
    monkeypatch.setenv(VARIABLE, "1")
    with DecodeNode(make_pool()) as node:
        assert type(node) is not DecodeNode
        assert isinstance(node, DecodeNode)
        assert isinstance(node, OneThread)
        assert type(node).__name__ == "DecodeNode"
