"""In which order requests that wait for pages are tried: a policy ranks them, the queue does the
rest.

Under every policy requests that were admitted before come first, and a request that has waited for
`patience_s` is overtaken by nothing. A policy sees a request and an estimate, never the queue: it
cannot break that. Write one by deriving from `AdmissionPolicy`; `register_admission` names it.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, cast

from prefixkv.config import Admission
from prefixkv.decode.request import DecodeRequest
from prefixkv.registry import Registry

DEFAULT_ADMISSION = "hit_aware"

Rank: TypeAlias = Any
"""Whatever compares with `<`: the least is tried first, of equal ones the one that came first."""


class AdmissionPolicy:
    """First come, first served, and the base of all policies."""

    name = "fifo"

    overtakes = False
    """Whether others are tried behind one that does not fit. Only then are requests matched to
    estimate `new_pages`."""

    def rank(self, req: DecodeRequest, new_pages: int) -> Rank:
        """Where a request stands. Called when it comes, and whenever it has been matched anew.

        `new_pages`: how many pages prefill would have to send. That is an estimate: the tree may
        have changed by the time the request is admitted.
        """
        return 0


_POLICIES: Registry[AdmissionPolicy] = Registry("admission", AdmissionPolicy)

P = TypeVar("P", bound=type[AdmissionPolicy])


def register_admission(policy: P) -> P:
    """Make a policy class known by its `name`; a decorator. A later one of the same name replaces
    it."""
    _POLICIES.add(policy)
    return policy


def admission_names() -> list[str]:
    return _POLICIES.names()


def make_admission(policy: str | Admission) -> Admission:
    """A policy object by name, or the object itself. Raises ConfigError for an unknown name."""
    return _POLICIES.make(cast("str | AdmissionPolicy", policy))


register_admission(AdmissionPolicy)


@register_admission
class FewestNewPages(AdmissionPolicy):
    """Of those that fit, the one that needs the fewest new pages."""

    name = "hit_aware"
    overtakes = True

    def rank(self, req: DecodeRequest, new_pages: int) -> Rank:
        return new_pages


@register_admission
class HighestPriority(AdmissionPolicy):
    """By `Request.priority`, the highest first. A request that does not fit is overtaken by those
    of higher priority only."""

    name = "priority"

    def rank(self, req: DecodeRequest, new_pages: int) -> Rank:
        return -req.request.priority
