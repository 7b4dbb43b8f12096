"""Pages of two sizes, seen as pages of the smaller one.

Where the page sizes of two pools differ by a whole factor, both are counted in *unit pages* of the
smaller
size: unit j of page p of a pool whose pages hold `fold` units is p * fold + j. With equal sizes a
unit page is a page.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError, PageStateError
from prefixkv.paging import page_floor

Pages = npt.NDArray[np.int32]

MAX_INDEX: Final = 2**31 - 1


def shared_prefix(num_tokens: int, page_size: int, peer_page_size: int) -> int:
    """The largest prefix not above `num_tokens` that is whole pages on both sides: what decode may
    promise.

    >>> shared_prefix(200, page_size=16, peer_page_size=64)
    192
    """
    return page_floor(num_tokens, max(page_size, peer_page_size))


def unit_pages(pages: Pages, fold: int, start: int, stop: int) -> Pages:
    """Units `start` to `stop` of the pages of a request, counted from the first unit of `pages[0]`.

    >>> unit_pages(np.array([7, 3], np.int32), fold=4, start=2, stop=6).tolist()
    [30, 31, 12, 13]

    Raises: PageStateError where `pages` has no such units, ConfigError where one would not fit into
    an int32.
    """
    if not 0 <= start <= stop <= len(pages) * fold:
        raise PageStateError(f"units {start} to {stop} of {len(pages)} pages of {fold}")
    if fold == 1:
        return pages[start:stop]
    check_unit_range(int(pages.max(initial=0)) + 1, fold)
    units = np.arange(start, stop, dtype=np.int32)
    return pages[units // fold] * np.int32(fold) + units % np.int32(fold)


def check_unit_range(num_pages: int, fold: int) -> None:
    """Raises ConfigError when a pool has more unit pages than an int32 can name."""
    if num_pages * fold - 1 > MAX_INDEX:
        raise ConfigError(
            f"{num_pages} pages of {fold} units are {num_pages * fold} units, an int32 names "
            f"{MAX_INDEX + 1}"
        )
