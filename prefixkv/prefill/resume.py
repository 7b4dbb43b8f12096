"""Where a request goes on behind what is cached of it: a scheduler has one `Resume`. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from prefixkv.cache.results import MatchResult
from prefixkv.config import UsablePrefix
from prefixkv.errors import RequestError, UserErrors
from prefixkv.prefill.request import PrefillRequest


class Resume:
    """A request goes on at the end of what is cached. A part that keeps more of requests than pages
    overrides this.

    `follows`: whether a request may wait for a prefix that another request computes. `is_whole`:
    whether all that is cached is of use, for routers. A request goes on at a multiple of
    `step_pages`.
    """

    follows, is_whole, step_pages = True, True, 1

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        """Return how many tokens of a match are of use, and what is there to go on from, which may
        have pages in the window groups (`windows`)."""
        return match.prefix_len, None

    def hold(self, req: PrefillRequest, found: Any) -> None:
        """The request is opened next, to go on from this."""

    def opened(self, req: PrefillRequest, dense_pages: int) -> None:
        """The request was opened; `dense_pages` of its path are cached."""

    def add_stop(self, req: PrefillRequest, tokens: int, done: int) -> None:
        """Another request waits for the first `tokens` of this one, which has `done` of them."""

    def passed(self, req: PrefillRequest, end: int) -> None:
        """KV of the request is there up to token `end`."""

    def take(self, req: PrefillRequest, end: int) -> int:
        """Return a slot for the state behind `end` tokens, -1 if none is free."""
        raise RequestError(f"request {req.rid!r} is {req.state.value}, it saves no state")

    def enter(self, req: PrefillRequest) -> int | None:
        """What the request has computed is in the tree. Return where others can go on, in tokens;
        None: at its end."""
        return None

    def dropped(self, req: PrefillRequest) -> None:
        """Lock and pages of the request end next."""

    def check_invariants(self, requests: Sequence[PrefillRequest]) -> None:
        """Raise InternalError if a law is broken."""


class NoPrefix(Resume):
    """A request begins anew: what it needs besides pages is not kept."""

    follows = is_whole = False

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        return 0, None


class EnginePrefix(Resume):
    """A request goes on where the engine says (`PrefillConfig.usable_prefix`)."""

    follows = False

    def __init__(self, usable_prefix: UsablePrefix, errors: UserErrors) -> None:
        self._usable_prefix, self._errors = usable_prefix, errors

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        # The engine's code: what it raises is reported by the scheduler, and the request is
        # computed whole.
        try:
            return max(0, operator.index(self._usable_prefix(req, match.prefix_len))), None
        except Exception as error:
            self._errors.caught(error)
            return 0, None
