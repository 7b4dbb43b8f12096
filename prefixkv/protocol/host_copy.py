"""Orders of decode's host tier, copies of pages between host and device, and their ends."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from prefixkv.paging import Pages


class HostCopy(NamedTuple):
    """An order to copy pages between host memory and the device's pool.

    Until its `HostCopyDone` has come, nothing writes the pages that it reads, and nothing reads or
    writes those that it fills. A load names each of its device pages once, a write each of its host
    pages.
    """

    number: int  # of the order; none that is under way has the same
    is_load: bool  # host to device; else it is a write, device to host
    host_pages: Pages  # int32 [n], n >= 1
    device_pages: Pages  # int32 [n]; host_pages[i] and device_pages[i] are the ends of page i


class HostCopyDone(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="copied"):
    """The end of an order: nothing of it touches memory any more. Comes once. After an error some
    destination pages may have been written, and their bytes mean nothing."""

    number: int
    error: Exception | None  # the first one; None if all pages were copied
    num_bytes: int  # that were copied, of the pieces without an error
    seconds: float  # from the begin of the order's first piece on; 0 if none began
