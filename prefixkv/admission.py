"""The order in which requests that wait for pages are tried: a policy ranks them.

Under every policy requests that were admitted before come first, and a request that has waited for
`patience_s` is overtaken by nothing. A policy sees a request and an estimate, never the queue: it
cannot break that. Write one by deriving from `AdmissionPolicy`; `register_admission` names it.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeAlias

from prefixkv.errors import CallerError, shown
from prefixkv.settings import Registry

Rank: TypeAlias = float | tuple[float, ...]
"""The least is tried first, and equal ones by arrival. A number is a tuple of one."""


def rank_as_tuple(rank: Any) -> tuple[float, ...]:
    """Check what an admission policy has returned, and make it plain numbers: comparing those
    raises nothing.

    >>> rank_as_tuple(3), rank_as_tuple((1, 2.5))
    ((3,), (1, 2.5))
    """
    numbers = rank if type(rank) is tuple else (rank,)
    for number in numbers:
        if not (type(number) in (int, float) or isinstance(number, Real)) or number != number:
            raise CallerError(f"the admission policy ranks a request {shown(rank)}")
    return tuple([one if type(one) in (int, float) else float(one) for one in numbers])


class AdmissionPolicy:
    """First come, first served, and the base of all admission policies."""

    name = "fifo"

    overtakes = False
    """True if others are tried behind one that does not fit. Only then are requests matched to
    estimate `new_pages`."""

    def rank(self, req: Any, new_pages: int) -> Rank:
        """Return the rank of a waiting `DecodeRequest`; called at first, and after each new match.

        `new_pages`: pages that prefill would have to send, an estimate: the tree may change until
        the request is admitted.
        """
        # All ranks are equal, so the order is that of arrival.
        return 0


_POLICIES: Registry[AdmissionPolicy] = Registry("admission", AdmissionPolicy)
register_admission, admission_names = _POLICIES.add, _POLICIES.names
make_admission, explain_admission = _POLICIES.make, _POLICIES.explain

register_admission(AdmissionPolicy)


@register_admission
class FewestNewPages(AdmissionPolicy):
    """Try the request that needs the fewest new pages first, and let it overtake."""

    # A request that needs few new pages has most of its prompt in the cache, or a short prompt: it
    # is served soonest, and takes least from the others. `patience_s` bounds how long it may
    # overtake them.
    name = "hit_aware"
    overtakes = True

    def rank(self, req: Any, new_pages: int) -> Rank:
        return new_pages


@register_admission
class HighestPriority(AdmissionPolicy):
    """Follow `Request.priority`, the highest first; only those of higher priority overtake."""

    name = "priority"

    def rank(self, req: Any, new_pages: int) -> Rank:
        priority: int = req.request.priority
        return -priority
