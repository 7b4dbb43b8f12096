"""Checkpoints as prefill's requests use them: each goes on from the deepest on what is cached."""

from __future__ import annotations

from prefixkv.cache.checkpoints import Checkpoint
from prefixkv.cache.results import MatchResult
from prefixkv.config import PrefillConfig
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.resume import Resume


class PrefillCheckpoints(RequestCheckpoints[PrefillRequest], Resume):
    is_whole = False

    def __init__(self, pages: PageManager, first_slot: int, config: PrefillConfig) -> None:
        super().__init__(pages, first_slot, config.checkpoint_tokens)

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Checkpoint | None]:
        found = self._points.find(match)
        return 0 if found is None else found.depth * self._page_size, found
