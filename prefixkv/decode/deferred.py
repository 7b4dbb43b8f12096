"""Ended requests' pages, which the device may still read or write: kept until its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixkv.cache.releases import Releases
from prefixkv.cache.results import PrefixLock
from prefixkv.decode.host_tier import HostTier
from prefixkv.decode.request import CUT_SHORT, DecodeRequest, DecodeState
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.requests import AllOf, BrokenEvent, still_pending
from prefixkv.request import DeviceEvent


class _DeferredEnd(NamedTuple):
    """A request to be released once the device is done. An abort may come first."""

    req: DecodeRequest
    continues: bool | None
    keep_tokens: int | None  # of its key: what follows is not cached


class Deferred:
    """Ended requests with a release that waits for the device. Owned by a `DecodeScheduler`.

    `queue_again` queues a request that was retracted, when its pages are released. `host` writes
    what is cached then to host memory. `points` gets the state of one that goes to the cache.
    """

    def __init__(
        self,
        pages: PageManager,
        queue_again: Callable[[DecodeRequest], None],
        host: HostTier[PrefixLock] | None = None,
        points: DecodeCheckpoints | None = None,
    ) -> None:
        self._pages = pages
        self._points = points
        self._queue_again = queue_again
        self._host = host
        self._waiting: list[tuple[DeviceEvent, _DeferredEnd]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[DecodeRequest]:
        """Return the requests whose release is deferred. Any thread may call it."""
        # Copied first, in one step: the scheduler's thread may append meanwhile.
        return [ended.req for _, ended in self._waiting.copy()]

    def holders(self) -> list[tuple[str, RequestPages]]:
        """Return the id and the pages of each. Any thread may call it."""
        held = [(req.rid, req.pages_held) for req in self.requests()]
        return [(rid, pages) for rid, pages in held if pages is not None]

    def coming_pages(self, releases: Releases) -> int:
        """Count the pages that are available once the device, or a host copy, is done. O(of these).
        `releases` collects the locks that end with them."""
        held = [
            ended.req.pages_held
            for event, ended in self._waiting
            if not isinstance(event, BrokenEvent)
        ]
        coming = 0
        if self._host is not None:
            coming = self._host.held_pages + sum(map(releases.end, self._host.pins))
        return coming + sum(
            pages.num_own + releases.end(pages.lock) for pages in held if pages is not None
        )

    def stuck_pages(self, releases: Releases) -> int:
        """Count the pages that a broken device event keeps: nothing proves that they come back."""
        stuck = [
            ended.req.pages_held for event, ended in self._waiting if isinstance(event, BrokenEvent)
        ]
        return sum(pages.num_own + releases.end(pages.lock) for pages in stuck if pages is not None)

    def release_after(
        self,
        after: DeviceEvent | None,
        req: DecodeRequest,
        continues: bool | None,
        now_s: float,
        keep_tokens: int | None = None,
    ) -> None:
        """Defer the release of an ended request until `after` is done; None: release it at once.

        The device may not have written all that was computed of one that was cut short: its own
        event has to be done too. Where that has raised, a later one counts.
        """
        if req.state in CUT_SHORT and req.unwritten is not None:
            unwritten = still_pending(req.unwritten, self._pages.errors)
            if after is None or unwritten is None:
                after = after or unwritten
            elif not isinstance(unwritten, BrokenEvent):
                after = AllOf(after, unwritten)
        ended = _DeferredEnd(req, continues, keep_tokens)
        if after is not None:
            self._waiting.append((after, ended))
        else:
            self._release(ended, now_s)

    def release(self, now_s: float) -> None:
        """Release what the device is done with. O(deferred requests)."""
        if not self._waiting:
            return
        # A fresh list, since `_release` may queue a request again, and `still_pending` runs the
        # user's code.
        waiting, self._waiting = self._waiting, []
        for event, ended in waiting:
            if (left := still_pending(event, self._pages.errors)) is None:
                self._release(ended, now_s)
            else:
                self._waiting.append((left, ended))

    def _release(self, ended: _DeferredEnd, now_s: float) -> None:
        """Hand on the pages as the request's end asks for: to the cache, or free; queue a retracted
        one again."""
        req, continues, keep_tokens = ended
        # 1. A request that finished, or was retracted, leaves its whole pages to the cache; one
        # that was aborted or has failed, also since it was retracted, leaves nothing (law 10).
        if req.pages_held is not None:
            points = self._points
            if req.state not in CUT_SHORT and req.request.cacheable:
                self._pages.cache_finished(
                    req.pages_held,
                    req.key,
                    now_s,
                    priority=req.request.priority,
                    continues=continues,
                    keep_tokens=keep_tokens,
                    on_cached=None if points is None else lambda: points.leave(req),
                )
                # Behind the device's work, so that no copy reads what is still to be written.
                if self._host is not None:
                    key = req.key if keep_tokens is None else req.key.prefix(keep_tokens)
                    self._host.leave(key, now_s, continues)
            else:
                if points is not None:
                    points.end(req)
                self._pages.drop(req.pages_held)
            req.pages_held = req.unwritten = None
        # 2. Only now may a retracted request queue again: it must hold nothing, and the next match
        # finds what has just been cached. One aborted meanwhile is over.
        if req.state is DecodeState.RETRACTED:
            self._queue_again(req)
