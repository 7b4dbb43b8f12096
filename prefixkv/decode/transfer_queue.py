"""Requests whose KV is on its way, and what to do when a room has ended."""

from __future__ import annotations

from collections import deque

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import InternalError
from prefixkv.protocol.state import RoomKey
from prefixkv.request_pages import PageBooks


class DecodeTransferQueue:
    """Owned by the scheduler's thread."""

    def __init__(self, books: PageBooks) -> None:
        self._books = books
        self._in_transfer: dict[RoomKey, DecodeRequest] = {}
        self._complete: deque[DecodeRequest] = deque()

    def add(self, req: DecodeRequest) -> None:
        """A request was admitted; its room is open."""
        key = req.room_key
        if key in self._in_transfer:
            raise InternalError(f"{key} is in transfer twice")
        self._in_transfer[key] = req

    def get(self, key: RoomKey) -> DecodeRequest | None:
        return self._in_transfer.get(key)

    def succeed(self, key: RoomKey, aux: bytes) -> DecodeRequest | None:
        """The room's pages are all written. Unknown (it was aborted meanwhile): None."""
        req = self._in_transfer.pop(key, None)
        if req is not None:
            req.aux = aux
            self._complete.append(req)
        return req

    def complete_without_transfer(self, req: DecodeRequest) -> None:
        """All of the request's KV was found in the tree."""
        self._complete.append(req)

    def remove(self, req: DecodeRequest) -> bool:
        """Take a request out that fails or is aborted. True if its room was still open."""
        if self._in_transfer.get(req.room_key) is req:
            del self._in_transfer[req.room_key]
            return True
        self._complete.remove(req)
        return False

    @property
    def num_open(self) -> int:
        """Requests whose pages are still being written."""
        return len(self._in_transfer)

    @property
    def any_complete(self) -> bool:
        """Whether `pop_transferred` has something."""
        return bool(self._complete)

    def __len__(self) -> int:
        return len(self._in_transfer) + len(self._complete)

    def requests(self) -> list[DecodeRequest]:
        return [*self._in_transfer.values(), *self._complete]

    def pop_transferred(self, now_s: float) -> list[DecodeRequest]:
        """Commit what has arrived: its whole pages become cached prefix that the request holds by a lock."""
        committed = []
        while self._complete:
            req = self._complete.popleft()
            assert req.pages_held is not None
            if req.request.cacheable:
                self._books.cache_unfinished(req.pages_held, req.key, now_s, priority=req.request.priority)
            req.become(DecodeState.TRANSFERRED)
            committed.append(req)
        return committed
