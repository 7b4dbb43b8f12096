"""What host memory's tier asks of the pages on the device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import UserErrors
from prefixkv.paging import Pages


class DevicePath(Protocol):
    """The pages that the device has of a key, from the first on: `depth` of them."""

    @property
    def depth(self) -> int: ...

    @property
    def pages(self) -> Pages: ...

    @property
    def unprotected_pages(self) -> int:
        """Pages of the path that count as available until it is pinned."""
        ...


class DeviceLock(Protocol):
    """A pin of a path on the device: while it is `held`, nothing takes one of its `pages`."""

    held: bool

    @property
    def pages(self) -> Pages: ...


LockT = TypeVar("LockT", bound=DeviceLock)


class DevicePages(Protocol[LockT]):
    """The device's pages as the host tier sees them: a `PageManager`'s, or an engine's blocks.

    `epoch` counts the flushes: what was copied before one is of no use behind it.
    """

    page_size: int
    errors: UserErrors
    epoch: int

    @property
    def available_pages(self) -> int: ...

    @property
    def may_load(self) -> bool: ...

    def find(self, key: RadixKey) -> DevicePath: ...

    def pin_key(self, key: RadixKey, now_s: float) -> LockT: ...

    def unpin(self, lock: LockT) -> None: ...

    def release(self, owner: Hashable) -> int:
        """Release the pages that `owner`, a load that has ended, holds; return how many."""
        ...

    def holds_all(self, owner: Hashable, pages: Pages) -> bool: ...
