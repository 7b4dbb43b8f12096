"""Page ids as they come in: any sequence of integers, made int32, the width in which they
travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixkv.errors import PageStateError

Pages = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.integer] | Sequence[int]
# The same ids where they index an array: numpy converts any narrower index first, at seven times
# the cost.
Index = npt.NDArray[np.intp]

_INT32 = np.dtype(np.int32)
_LIMITS = np.iinfo(np.int32)


def as_pages(pages: PageIds) -> Pages:
    """`pages` as int32 [n]: the array itself if it is one, else a copy. Says nothing of the pool's
    bounds.

    Raises: PageStateError for another shape, for what is no integer, and for what an int32 cannot
    hold (a cast would wrap it round to some other page).
    """
    array = np.asarray(pages)
    if array.ndim != 1:
        raise PageStateError(f"page ids have {array.ndim} dimensions, must have 1")
    if array.dtype == _INT32:
        return array
    if len(array) == 0:  # an empty list is an array of floats
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise PageStateError(f"page ids are {array.dtype}, must be integers")
    wide = array[(array < _LIMITS.min) | (array > _LIMITS.max)]
    if len(wide):
        raise PageStateError(f"page {wide[0]} does not fit an int32")
    return array.astype(np.int32)
