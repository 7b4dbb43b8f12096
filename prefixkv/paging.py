"""Page arithmetic, page ids and unit pages. Tokens become pages here and nowhere else.

Where the page sizes of two pools differ by a whole factor, both are counted in *unit pages* of the
smaller size: with `fold` units per page, unit j of page p is p * fold + j. With equal sizes a unit
page is a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError, PageStateError

Pages = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.integer] | Sequence[int]
# The same ids where they index an array: numpy converts any narrower index first, at seven times
# the cost.
Index = npt.NDArray[np.intp]
Where = Index | slice
"""Pages as an index of an array with one entry per page: ascending, none twice. A slice if they lie
side by side, which numpy takes in a fifth of the time."""

MAX_INDEX: Final = 2**31 - 1  # ids of pages, slots and blocks are int32

_INT32 = np.dtype(np.int32)

# --- arithmetic -----------------------------------------------------------------------------------


def page_floor(num_tokens: int, page_size: int) -> int:
    """Return the largest whole-page token count not above `num_tokens`.

    >>> page_floor(130, page_size=64)
    128
    """
    return num_tokens - num_tokens % page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return how many pages hold `num_tokens`, a partial last page included.

    >>> pages_for(130, page_size=64)
    3
    """
    return -(-num_tokens // page_size)


# --- ids ------------------------------------------------------------------------------------------


def as_pages(pages: PageIds) -> Pages:
    """Return page ids as int32 [n]: the array itself if it is one, else a copy.

    It checks no bounds. Raises PageStateError for another shape, no integers, or a value beyond
    int32, which a cast would wrap round to some other page.
    """
    array: npt.NDArray[Any] = pages if isinstance(pages, np.ndarray) else _as_array(pages)
    if array.ndim != 1:
        raise PageStateError(f"page ids have {array.ndim} dimensions, must have 1")
    if array.dtype == _INT32:
        return array
    if len(array) == 0:  # an empty list is an array of floats
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise PageStateError(f"page ids are {array.dtype}, must be integers")
    wide = array[(array < -MAX_INDEX - 1) | (array > MAX_INDEX)]
    if len(wide):
        raise PageStateError(f"page {wide[0]} does not fit an int32")
    return array.astype(np.int32)


def _as_array(pages: Any) -> npt.NDArray[Any]:
    """Raises PageStateError for what numpy makes no array of."""
    # A tensor of torch, by what it can do: it may lie on a GPU.
    if (detach := getattr(pages, "detach", None)) is not None:
        pages = detach().cpu()
    try:
        return np.asarray(pages)
    except (TypeError, ValueError, OverflowError) as error:
        raise PageStateError(f"page ids are no array of integers: {error}") from None


def checked_pages(
    pages: npt.NDArray[np.integer], num_pages: int, side: str, what: str = "page"
) -> Pages:
    """Return page ids as int32, each of them in [0, num_pages).

    Every id passes here before it becomes an address. Raises PageStateError, which names the side,
    what is counted, and the id or the shape.
    """
    if (
        not isinstance(pages, np.ndarray)
        or pages.ndim != 1
        or pages.dtype.kind not in "iu"
        or not len(pages)
    ):
        raise PageStateError(
            f"{side} {what}s: a one-dimensional array of at least one integer is needed"
        )
    check_in_pool(pages, num_pages, f"{side} {what}")
    return pages.astype(np.int32, copy=False)


def check_in_pool(pages: npt.NDArray[np.integer], num_pages: int, what: str = "page") -> None:
    """Raise PageStateError, naming the first page id that is not in [0, num_pages)."""
    if len(pages) and (pages.min() < 0 or pages.max() >= num_pages):
        outside = pages[(pages < 0) | (pages >= num_pages)]
        raise PageStateError(f"{what} {outside[0]} is not in [0, {num_pages})")


# --- a batch, as attention kernels take it --------------------------------------------------------


def page_table(rows: Sequence[Pages], width: int | None = None, pad: int = 0) -> Pages:
    """Return the page table ("block table" in vLLM) of a batch, padded. O(its size).

    Args:
        rows: for each request its page ids in order, as `req.pages` has them.
        width: columns; longer rows are cut off there. None: as many as the longest row has.
        pad: page id behind the end of a shorter row: a page that may be read, and counts for
            nothing.

    Returns int32 [len(rows), width].

    >>> page_table([np.array([7, 3], np.int32), np.array([5], np.int32)]).tolist()
    [[7, 3], [5, 0]]
    """
    if width is None:
        width = max(map(len, rows), default=0)
    table = np.full((len(rows), width), pad, np.int32)
    for target, row in zip(table, rows, strict=True):
        part = row[:width]
        target[: len(part)] = part
    return table


def slot_mapping(
    rows: Sequence[Pages], starts: Sequence[int], ends: Sequence[int], page_size: int
) -> npt.NDArray[np.int64]:
    """Return the slots for the KV of new tokens, one request after the other.

    Token i of a request is in slot `pages[i // page_size] * page_size + i % page_size` of its pool.
    `rows`: for each request its page ids in order. `starts`, `ends`: for each request the first new
    token, and the one behind the last. Returns int64 [sum of ends - starts], slots in [0, num_pages
    * page_size). Raises PageStateError: a range that its pages do not hold.

    >>> slot_mapping([np.array([7, 3], np.int32)], [2], [5], page_size=4).tolist()
    [30, 31, 12]
    """
    parts = [np.empty(0, np.int64)]
    for row, start, end in zip(rows, starts, ends, strict=True):
        if not 0 <= start <= end <= len(row) * page_size:
            raise PageStateError(
                f"tokens {start} to {end} of {len(row)} pages of {page_size} tokens"
            )
        first = start // page_size
        # All slots of the pages concerned, then cut to the tokens.
        pages = row[first : pages_for(end, page_size)].astype(np.int64)
        slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        parts.append(slots[start - first * page_size : end - first * page_size])
    return np.concatenate(parts)


# --- unit pages -----------------------------------------------------------------------------------


def unit_pages(pages: Pages, fold: int, start: int, stop: int) -> Pages:
    """Return a request's unit pages `start` to `stop`, counted from the first unit of `pages[0]`.

    >>> unit_pages(np.array([7, 3], np.int32), fold=4, start=2, stop=6).tolist()
    [30, 31, 12, 13]

    Raises PageStateError: `pages` has no such units. ConfigError: one would not fit into an int32.
    """
    if not 0 <= start <= stop <= len(pages) * fold:
        raise PageStateError(f"units {start} to {stop} of {len(pages)} pages of {fold}")
    if fold == 1:
        return pages[start:stop]
    # Before the multiplication, which would wrap round to another page.
    check_unit_range(int(pages.max(initial=0)) + 1, fold)
    units = np.arange(start, stop, dtype=np.int32)
    return pages[units // fold] * np.int32(fold) + units % np.int32(fold)


def check_unit_range(num_pages: int, fold: int) -> None:
    """Raise ConfigError if a pool has more unit pages than an int32 can name."""
    if num_pages * fold - 1 > MAX_INDEX:
        raise ConfigError(
            f"{num_pages} pages of {fold} units are {num_pages * fold} units, an int32 names "
            f"{MAX_INDEX + 1}"
        )
