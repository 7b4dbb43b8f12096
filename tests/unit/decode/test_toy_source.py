"""A source in one file: it reads the KV of whole pages from a file, behind what is cached."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig, DecodeConfig, HostConfig
from prefixkv.decode.flights import Flight, Need, Segment, Source
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.rooms import Workers
from prefixkv.decode.scheduler import DecodeParts, DecodeScheduler
from prefixkv.errors import ConfigError, TransferError
from prefixkv.protocol.events import HostCopyDone
from tests.unit.decode.desk import PAGE_SIZE, Desk, OpenRoom, RefuseRoom

KV = np.zeros((16, PAGE_SIZE), np.int32)  # the pool: of each token a number


class FileSource(Source):
    """One prompt's tokens, then their KV, as int32. A request goes on behind its whole pages."""

    name, brings_pages_only = "read", True
    path: Path

    def __init__(self, ledger: Ledger, config: DecodeConfig, parts: DecodeParts) -> None:
        self._ledger = ledger

    def reach(self, need: Need) -> Segment | None:
        has = np.fromfile(self.path, np.int32).reshape(2, -1)[0]
        wanted = np.frombuffer(need.key.data, np.int32)
        most = min(len(has), len(wanted))
        same = int(np.append(has[:most] == wanted[:most], False).argmin())
        end = same // PAGE_SIZE * PAGE_SIZE
        return Segment(self, need.start, end) if end > need.start else None

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        kv = np.fromfile(self.path, np.int32).reshape(2, -1)[1, segment.start : segment.end]
        table = self._ledger.pages.table
        pages = table.pages(flight.pages.row)[flight.start_pages : flight.end_pages]
        KV[pages] = kv.reshape(-1, PAGE_SIZE)
        self._ledger.flights.arrived(flight)


class Scheduler(DecodeScheduler):
    source_makers = [*DecodeScheduler.source_makers, FileSource]


def test_a_request_has_from_the_file_what_the_tree_lacks(tmp_path: Path) -> None:
    FileSource.path = tmp_path / "kv"
    tokens = list(range(100, 122))
    np.array([tokens[:18], [7 * token for token in tokens[:18]]], np.int32).tofile(FileSource.path)
    desk = Desk(kind=Scheduler, spare_rows=1)
    before = desk.start("a", tokens[:4])
    desk.finish(before)

    req = desk.add("b", tokens)
    assert desk.admit() == ["b"]
    assert req.prefix_len == 16  # so prefill sends the last six alone
    desk.succeed(req.room_key)
    assert desk.transferred() == ["b"]
    assert KV[req.pages[1:4]].ravel().tolist() == [7 * token for token in tokens[4:16]]
    desk.finish(req)
    desk.commands()


def test_without_a_spare_row_prefill_sends_all(tmp_path: Path) -> None:
    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    desk = Desk(kind=Scheduler)
    req = desk.add("b", list(range(16)))
    assert desk.admit() == ["b"]
    assert req.prefix_len == 0


def test_a_request_fails_whose_source_raises_as_it_begins(tmp_path: Path) -> None:
    """Nothing would ever bring the rest of its pages, and prefill waits for a promise."""

    class Gone(FileSource):
        def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
            raise OSError("the file is gone")

    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    kind = type("Scheduler", (DecodeScheduler,), {"source_makers": [Gone]})
    desk = Desk(kind=kind, spare_rows=1)
    req = desk.add("b", list(range(18)))
    other = desk.add("c", 8)
    assert desk.admit() == ["c"]
    assert desk.pop_failed() == [req]
    assert isinstance(req.error, TransferError)
    assert "the file is gone" in str(req.error)
    refused, opened = desk.commands()
    assert isinstance(refused, RefuseRoom)
    assert isinstance(opened, OpenRoom)
    desk.drain(refused.key)
    desk.succeed(other.room_key)
    assert desk.transferred() == ["c"]


def test_a_source_that_raises_is_asked_no_more_and_prefill_sends_all(tmp_path: Path) -> None:
    class Broken(FileSource):
        looks = 0

        def reach(self, need: Need) -> Segment | None:
            type(self).looks += 1
            raise OSError("the disk is gone")

    desk = Desk(
        kind=type("Scheduler", (DecodeScheduler,), {"source_makers": [Broken]}), spare_rows=1
    )
    reqs = [desk.add("b", list(range(16))), desk.add("c", 8)]
    with pytest.raises(OSError, match="the disk is gone") as raised:
        desk.admit()
    assert "source 'read'" in raised.value.__notes__[0]
    assert sorted(desk.admit()) == ["b", "c"]
    for req in reqs:
        desk.arrive(req)
        desk.finish(req)
    desk.commands()
    desk.at_rest()
    assert Broken.looks == 1


def check_prefill_sends(desk: Desk, req: DecodeRequest, why: str) -> None:
    """The next pass says what the source did wrong, and the one behind it asks prefill for all."""
    with pytest.raises(Exception, match=why) as raised:
        desk.admit()
    assert "source 'read'" in raised.value.__notes__[0]
    assert desk.admit() == [req.rid]
    desk.arrive(req)
    desk.finish(req)
    desk.commands()
    desk.at_rest()


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize(
    "said", [(0, 24), (0, 0), (4, 0), (0, 3), (8, 12), (-4, -1), (-4, 20), (0, None), "ab", True]
)
def test_a_source_that_says_what_no_source_can_is_asked_no_more(said: Any, is_load: bool) -> None:
    """Outside what is needed, or not all of it: of a load whole pages, of others all."""

    class Wild(FileSource):
        brings_pages_only = is_load

        def reach(self, need: Need) -> Segment | None:
            return Segment(self, *said) if type(said) is tuple else said

    kind = type("Scheduler", (DecodeScheduler,), {"source_makers": [Wild]})
    desk = Desk(kind=kind, spare_rows=1)
    req = desk.add("b", list(range(22)))
    check_prefill_sends(desk, req, "of 0 to 22|attribute|operand|<")


@pytest.mark.parametrize(("is_load", "start"), [(True, 0), (True, 6), (False, 2), (False, 6)])
def test_a_source_begins_where_a_page_does_and_a_load_behind_what_is_there(
    tmp_path: Path, is_load: bool, start: int
) -> None:
    """Else tokens of a page that the request takes have no KV."""

    class Wild(FileSource):
        brings_pages_only = is_load

        def reach(self, need: Need) -> Segment | None:
            return Segment(self, start, 20) if need.start == 8 else None

        def is_best(self, need: Need, segment: Segment) -> bool:
            return True

        def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
            self._ledger.flights.arrived(flight)

    desk = Desk(kind=type("Scheduler", (DecodeScheduler,), {"source_makers": [Wild]}), spare_rows=1)
    desk.finish(desk.start("a", list(range(8))))
    req = desk.add("b", list(range(20)))
    check_prefill_sends(desk, req, "of 8 to 20")


@pytest.mark.parametrize("asked", [{"host_memory": HostConfig()}, {"compute": ComputeConfig()}])
def test_what_no_source_answers_for_is_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeScheduler, "source_makers", [])
    with pytest.raises(ConfigError, match="this installation has no part for it"):
        Desk(8, **asked)


class WholeSource(FileSource):
    """It brings a prompt of whole pages to its end."""

    name, brings_pages_only = "whole", False

    def reach(self, need: Need) -> Segment | None:
        segment = super().reach(need)
        return segment if segment is not None and segment.end == need.end else None

    def is_best(self, need: Need, segment: Segment) -> bool:
        return not need.can_ask


@pytest.mark.parametrize("when", ["before it comes", "while it waits", "on its way", "and is back"])
def test_a_source_that_brings_all_stands_in_for_a_worker_that_is_away(
    tmp_path: Path, when: str
) -> None:
    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    kind = type("Scheduler", (DecodeScheduler,), {"source_makers": [WholeSource]})
    desk = Desk(kind=kind, workers=Workers(gated=True))
    if when == "before it comes":
        desk.up()
        desk.down()
    req, more = desk.add("a", list(range(16))), desk.add("b", list(range(20, 40)))
    if when != "before it comes":
        desk.up()
        if when == "on its way":
            assert desk.admit() == ["a", "b"]
        desk.down()
    if when == "on its way":
        assert desk.admit() == []  # its room may still succeed, and nothing says to fail over
        desk.fail(req.room_key, drained=True)
    if when == "and is back":
        desk.up()
        assert desk.admit() == ["a", "b"]
        desk.arrive(req)
    else:
        assert desk.admit() == ["a"]
        assert desk.transferred() == ["a"]
        assert KV[req.pages].ravel().tolist() == list(range(16))
    desk.finish(req)
    desk.abort(more)
    desk.carry_out_aborts()
    desk.at_rest()


def test_a_request_that_no_source_has_and_no_worker_gets_says_so(tmp_path: Path) -> None:
    class Alone(WholeSource):
        fails_over = True

    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    desk = Desk(kind=type("Scheduler", (DecodeScheduler,), {"source_makers": [Alone]}))
    req = desk.add("b", 16, prefill="")
    assert desk.admit() == []
    assert desk.pop_failed() == [req]
    assert str(req.error) == (
        "request 'b' lacks 16 tokens, no source has them all, and it names none"
    )
    there = desk.add("c", list(range(16)), prefill="")
    assert desk.admit() == ["c"]
    assert desk.transferred() == ["c"]
    desk.finish(there)
    desk.at_rest()


def test_nothing_is_committed_while_its_source_says_that_the_device_may_still_write_it(
    tmp_path: Path,
) -> None:
    class Slow(WholeSource):
        is_done = False

        def may_commit(self, flight: Flight) -> bool:
            return self.is_done

    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    kind = type("Scheduler", (DecodeScheduler,), {"source_makers": [Slow]})
    desk = Desk(kind=kind, workers=Workers(gated=True))
    desk.up()
    desk.down()
    req = desk.add("a", list(range(16)))
    assert desk.admit() == ["a"]
    assert desk.transferred() == []
    Slow.is_done = True
    assert desk.transferred() == ["a"]
    desk.finish(req)
    desk.carry_out_aborts()
    desk.at_rest()


@pytest.mark.parametrize("is_down", [True, False])
def test_a_request_fails_whose_source_hears_that_it_cannot_bring_it(
    tmp_path: Path, is_down: bool
) -> None:
    class Late(WholeSource):
        flight: Flight

        def is_best(self, need: Need, segment: Segment) -> bool:
            return True

        def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
            type(self).flight = flight

        def hear(self, event: HostCopyDone, now_s: float) -> Flight:
            return self.flight

    FileSource.path = tmp_path / "kv"
    np.array([range(16), range(16)], np.int32).tofile(FileSource.path)
    kind = type("Scheduler", (DecodeScheduler,), {"source_makers": [Late]})
    desk = Desk(kind=kind, workers=Workers(gated=True), max_retries=1)
    desk.up()
    if is_down:
        desk.down()
    req = desk.add("a", list(range(16)))
    assert desk.admit() == ["a"]
    desk.scheduler.hear(HostCopyDone(1, OSError("the file is gone"), 0, 0.0), desk.now_s)
    desk.scheduler.check_invariants()
    assert desk.pop_failed() == [req]
    assert "the file is gone" in str(req.error)
    desk.carry_out_aborts()
    desk.at_rest()
