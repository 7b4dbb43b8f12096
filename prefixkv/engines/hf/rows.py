"""A row of a forward: new tokens of one sequence, and where its KV and its state are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from prefixkv.spi import GroupPages, Pages

NO_SLOT: Final = -1
"""Source of a sequence that begins: its state is zero."""


class Row(NamedTuple):
    """New tokens of one sequence; the KV of those before `start` is in its pages.

    `pages` are its page ids, for at least `end` tokens; `window` its pages in the window group,
    from the first token that the first new one sees. `wanted` says which of the new tokens need
    logits. With recurrent layers `source` is the slot that has the state behind `start` tokens, and
    `slot` gets the state behind `end`; it may be the source. `saves` are the slots that get its
    state besides, by number of tokens: above `start`, at most `end`.
    """

    tokens: Any  # integers, at least one
    start: int
    pages: Pages
    window: GroupPages | None = None
    wanted: Sequence[int] = (-1,)
    source: int = NO_SLOT
    slot: int = NO_SLOT
    saves: Mapping[int, int] = MappingProxyType({})

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
