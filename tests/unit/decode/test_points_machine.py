"""Decode's checkpoints: against a naive model, and copies that are broken in one place, each of
which it has to find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from prefixkv.cache.checkpoints import Checkpoint, Checkpoints
from prefixkv.decode.ending import FlightEnds
from prefixkv.decode.prealloc_queue import DecodePreallocQueue
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from tests.laws.decode_points_machine import (
    BOTH,
    FEW_PAGES,
    KINDS,
    STATES,
    WINDOWS,
    run,
)


def test_checkpoints_are_what_the_model_says() -> None:
    seen: Counter[str] = Counter()
    for seed, kind in enumerate(KINDS):
        seen.update(run(seed, **kind))
    assert min(seen.values()) > 7, seen


RUNNING, LEAVE_FLIGHT = DecodeCheckpoints.running, FlightEnds.leave
TAKE = DecodeCheckpoints._take


def _enter_all(self: DecodeCheckpoints, req: DecodeRequest) -> None:
    """Those of before a flush too, and of pages that are not kept."""
    saved, req.saved = req.saved, []
    for depth, slot in saved:
        self._save(req, depth, slot)


def _depth_stays(self: DecodeCheckpoints, reqs: Iterable[DecodeRequest]) -> list[tuple[int, int]]:
    reqs = list(reqs)
    before = [list(req.saved) for req in reqs]
    copies = RUNNING(self, reqs)
    for req, had in zip(reqs, before, strict=True):
        if had and req.saved:
            req.saved[-1] = had[-1][0], req.saved[-1][1]
    return copies


def _find_all(self: DecodeCheckpoints, req: DecodeRequest, match: Any) -> Checkpoint | None:
    return None if match is None else self._points.find(match)


def _find_less(self: DecodeCheckpoints, req: DecodeRequest, match: Any) -> Checkpoint | None:
    shorter = self._pages.match(req.key.prefix(max(0, len(req.key) - 5)))
    return None if match is None or shorter is None else self._points.find(shorter)


def _hold(self: DecodeCheckpoints, req: DecodeRequest, found: Checkpoint | None) -> None:
    req.checkpoint = found


def _end(self: DecodeCheckpoints, req: DecodeRequest) -> None:
    self._unlock(req)
    req.saved, req.stops, req.checkpoint, req.goes_on_at = [], [], None, 0


def _leave_flight(self: FlightEnds, flight: Any, error: Exception) -> None:
    points, self._points = self._points, None
    try:
        LEAVE_FLIGHT(self, flight, error)
    finally:
        self._points = points


_save = Checkpoints.save


def _save_without_parent(
    points: Checkpoints, page: int, depth: int, slot: int, parent: object = None
) -> None:
    _save(points, page, depth, slot)


def _use(self: Checkpoints, checkpoint: Checkpoint) -> None:
    checkpoint.uses += 1
    self._superseded.discard(checkpoint)


def _sent_further(self: DecodeCheckpoints, req: DecodeRequest) -> None:
    """What was sent is taken for the state of the page before."""
    req.prefix_len, req.checkpoint_slot = req.sent_len, req.state_slot
    self._add_stop(req, req.prefix_len - self._pages.page_size, 0)
    self.take_if_stop(req, req.prefix_len)


def _without_windows(self: DecodeCheckpoints, req: Any, end: int, pages: int, *_: Any) -> int:
    return TAKE(self, req, end, pages, False)


BROKEN: dict[str, tuple[type, str, Any, dict[str, Any]]] = {
    "what is cached no more is entered": (DecodeCheckpoints, "enter", _enter_all, STATES),
    "a slot has a later state than it says": (DecodeCheckpoints, "running", _depth_stays, STATES),
    "what it came with is overwritten": (
        DecodeCheckpoints, "_enter_sent", lambda self, req: None, STATES,
    ),
    "nothing is left to sample from": (DecodeCheckpoints, "find", _find_all, STATES),
    "not the deepest is found": (DecodeCheckpoints, "find", _find_less, STATES),
    "what it goes on from is not locked": (DecodeCheckpoints, "hold", _hold, STATES),
    "what ends keeps its slots": (DecodeCheckpoints, "end", _end, STATES),
    "a flight that goes on for others keeps slots": (
        FlightEnds, "leave", _leave_flight, WINDOWS,
    ),
    "a use is not noted": (Checkpoints, "use", _use, STATES),
    "superseded ones are like others": (
        Checkpoints, "save", _save_without_parent, STATES,
    ),
    "all is sent": (
        DecodePreallocQueue, "_sent_len", lambda self, req, shared: req.fill_len, STATES,
    ),
    "what was sent is of another depth": (
        DecodeCheckpoints, "go_on_from_sent", _sent_further, STATES,
    ),
    "a checkpoint has no window": (DecodeCheckpoints, "_take", _without_windows, BOTH),
    "a window that has moved on is kept": (
        DecodeCheckpoints, "_can_share", lambda self, req, depth, end_pages: True, FEW_PAGES,
    ),
    "it is saved though it is not to be cached": (
        DecodeCheckpoints, "_may_save", lambda self, req: self._pages.caching, STATES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *place, kind = BROKEN[name]
    monkeypatch.setattr(*place)
    with pytest.raises(Exception):  # noqa: B017  # whatever breaks first
        _run_seeds(kind)


def _run_seeds(kind: dict[str, Any]) -> None:
    for seed in range(11, 31):
        run(seed, **kind)
