"""Requests that have ended while the device may still read or write their pages: released once its
event says that it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixkv.cache.releases import Releases
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.requests import BrokenEvent, still_pending
from prefixkv.request import DeviceEvent


class _Ended(NamedTuple):
    """A request whose pages are released, once the device is done. It may be aborted meanwhile."""

    req: DecodeRequest
    state: DecodeState  # why: `finish`, `retract` or an abort
    continues: bool | None


class Deferred:
    """Owned by a `DecodeScheduler`. `again` queues a request that was retracted, when its pages are
    released."""

    def __init__(self, books: PageManager, again: Callable[[DecodeRequest], None]) -> None:
        self._books = books
        self._again = again
        self._waiting: list[tuple[DeviceEvent, _Ended]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[DecodeRequest]:
        """Whose pages are released later. Any thread may ask."""
        return [ended.req for _, ended in self._waiting.copy()]

    def holders(self) -> list[tuple[str, RequestPages]]:
        """Their ids and pages. Any thread may ask."""
        held = [(req.rid, req.pages_held) for req in self.requests()]
        return [(rid, pages) for rid, pages in held if pages is not None]

    def coming_pages(self, releases: Releases) -> int:
        """Pages that are available again once the device is done. `releases` takes down the locks
        that end with them. O(of these requests)."""
        held = [
            ended.req.pages_held
            for event, ended in self._waiting
            if not isinstance(event, BrokenEvent)
        ]
        return sum(pages.num_own + releases.end(pages.lock) for pages in held if pages is not None)

    def stuck_pages(self, releases: Releases) -> int:
        """Pages of requests whose event has raised: nothing says that they ever come back."""
        stuck = [
            ended.req.pages_held for event, ended in self._waiting if isinstance(event, BrokenEvent)
        ]
        return sum(pages.num_own + releases.end(pages.lock) for pages in stuck if pages is not None)

    def end(
        self, after: DeviceEvent | None, req: DecodeRequest, continues: bool | None, now_s: float
    ) -> None:
        """The request has ended, as its state says. None: the device is done with it already."""
        ended = _Ended(req, req.state, continues)
        if after is not None:
            self._waiting.append((after, ended))
        else:
            self._release(ended, now_s)

    def release(self, now_s: float) -> None:
        """Release what waited for the device, where it is done."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for event, ended in waiting:
            if (left := still_pending(event, self._books.errors)) is None:
                self._release(ended, now_s)
            else:
                self._waiting.append((left, ended))

    def _release(self, ended: _Ended, now_s: float) -> None:
        """Hand the pages on, as the end asks for."""
        req, state, continues = ended
        if req.pages_held is not None:
            if state in (DecodeState.FINISHED, DecodeState.RETRACTED) and req.request.cacheable:
                self._books.cache_finished(
                    req.pages_held,
                    req.key,
                    now_s,
                    priority=req.request.priority,
                    continues=continues,
                )
            else:
                self._books.drop(req.pages_held)
            req.pages_held = None
        if req.state is DecodeState.RETRACTED:
            self._again(req)


def not_done(after: DeviceEvent | None) -> DeviceEvent | None:
    """The event if there is something to wait for. Asked before anything changes, since `query` may
    raise."""
    return None if after is None or after.query() else after
