"""Nodes are used from one thread, and say so where PREFIXKV_DEBUG is 1, as it is in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixkv import DecodeConfig, DecodeNode, Mesh, PrefillConfig, PrefillNode, Request
from prefixkv.errors import CallerError
from prefixkv.spi import DecodeGroup, PrefillGroup
from prefixkv.threads import VARIABLE, OneThread
from prefixkv.transfer import DecodeTransfers, PrefillTransfers
from tests.support.node_pair import make_pool

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
