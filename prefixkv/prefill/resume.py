"""Where a request goes on behind what is cached of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from prefixkv.cache.results import MatchResult
from prefixkv.config import UsablePrefix
from prefixkv.errors import RequestError, UserErrors
from prefixkv.prefill.request import PrefillRequest


class Resume:
    """At the end of what is cached. A part that keeps more of requests than pages overrides this.

    `follows`: whether a request may wait for a prefix that another computes. `is_whole`: whether
    all that is cached is of use, for routers. It goes on at a multiple of `step_pages`.
    """

    follows, is_whole, step_pages = True, True, 1

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        """Return how many tokens of a match are of use, and what is there to go on from, which may
        have pages in the window groups (`windows`)."""
        return match.prefix_len, None

    def hold(self, req: PrefillRequest, found: Any) -> None:
        """The request is opened next, to go on from this."""

    def opened(self, req: PrefillRequest, dense_pages: int) -> None:
        """It was opened; `dense_pages` of its path are cached."""

    def add_stop(self, req: PrefillRequest, tokens: int, done: int) -> None:
        """Another one waits for its first `tokens`, of which it has `done`."""

    def passed(self, req: PrefillRequest, end: int) -> None:
        """Its KV is there up to token `end`."""

    def take(self, req: PrefillRequest, end: int) -> int:
        raise RequestError(f"request {req.rid!r} is {req.state.value}, it saves no state")

    def enter(self, req: PrefillRequest) -> int | None:
        """What it has computed is in the tree. Return where others can go on, in tokens; None: at
        its end."""
        return None

    def dropped(self, req: PrefillRequest) -> None:
        """Its lock and its pages end next."""

    def check_invariants(self, requests: Sequence[PrefillRequest]) -> None:
        """Raise InternalError if a law is broken."""


class NoPrefix(Resume):
    """Nowhere: what else a request needs is not kept."""

    follows = is_whole = False

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        return 0, None


class EnginePrefix(Resume):
    """Where the engine says (`PrefillConfig.usable_prefix`)."""

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
