"""Checkpoints: states of a model from which computing can go on behind a cached prefix.

A recurrent layer has no page for a token. It has a single state, after some number of tokens. A
*checkpoint* is such a state, saved in a slot at the end of a page and found by that page's id: an
id in the tree names one path and one depth, whatever nodes split or merge. So the tree knows
nothing of checkpoints. Layers with a window have pages before a checkpoint; overlapping checkpoints
share them.

Where no slot is free, the checkpoint least worth keeping goes. *Superseded* checkpoints go first:
their request has saved a deeper one, and needs the old one only where the session branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np

from prefixkv.cache.events import SaveEvicted, SaveMade
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.results import MatchResult, Saves
from prefixkv.errors import check_laws
from prefixkv.paging import PageIds, Pages

NO_SLOT: Final = -1

Windows = tuple[Pages, ...]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A saved state, at the end of page `page` of the pool, which is the `depth`-th of its path."""

    page: int
    depth: int
    slot: int
    locks: int = 0
    uses: int = 0
    tick: int = 0  # of its last use
    windows: Windows = ()  # its pages in each window group
    is_gone: bool = False  # its page has left the tree; its slot is kept while it is locked


class Checkpoints(Saves):
    """The checkpoints of one radix cache, and their slots 0 to `num_slots` - 1. One owner.

    `keeper`: the window groups, which count the pages that checkpoints keep (`TailGroups`).

    The laws, which `check_invariants` checks:

        H9   a checkpoint ends on a page in the tree, at its depth; it goes with that page
        H12  it has a slot of its own, filled at its depth; computing goes on there and at no other
        H13  a locked checkpoint ends on a locked path, and is not evicted
    """

    def __init__(self, cache: RadixCache, pool_pages: int, num_slots: int, keeper: Any) -> None:
        self._cache = cache
        self._keeper = keeper
        self.num_slots = num_slots
        self._at: dict[int, Checkpoint] = {}  # by page, in the order of their last use
        self._superseded: set[Checkpoint] = set()
        self._has = np.zeros(pool_pages, np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[int, Windows] = {}  # by slot: pages that are pinned for it
        self._kept: dict[int, Checkpoint] = {}  # gone, but locked: by slot
        self._tick = 0
        cache.more_changes = lambda: [SaveMade(page) for page in self._at]

    def __len__(self) -> int:
        return len(self._at)

    # --- looking ----------------------------------------------------------------------------------

    def find(self, match: MatchResult) -> Checkpoint | None:
        """Return the deepest checkpoint on a matched path. O(nodes walked)."""
        node, depth = self._cache.locate(match)
        depth = min(depth, match.depth)
        while node is not None and node.parent is not None:
            start = node.parent.end
            if depth > start:
                ids = np.frombuffer(node.pages, np.int32, depth - start)
                # Bytes are searched from the right in a fraction of the time of numpy's own calls.
                at = self._has[ids].tobytes().rfind(b"\1")
                if at >= 0:
                    return self._at[int(ids[at])]
            node, depth = node.parent, min(depth, start)
        return None

    # --- slots ------------------------------------------------------------------------------------

    def take(self) -> int:
        """Return a slot to save a state in, evicting a checkpoint if none is free; NO_SLOT if all
        are taken or locked."""
        if not self._free and not self._evict_one():
            return NO_SLOT
        slot = self._free.pop()
        self._taken[slot] = ()
        return slot

    def attach(self, slot: int, windows: Windows) -> None:
        """Keep these pinned pages of the window groups with a slot of `take`."""
        self._taken[slot] = windows

    def make_room(self, needs: Sequence[int]) -> None:
        while self._keeper.lacks(needs) and self._evict_one():
            pass

    def give_back(self, slot: int) -> None:
        windows = self._taken.pop(slot)
        self._free.append(slot)
        self._keeper.add_counts(windows, -1, -1)

    def save(self, page: int, depth: int, slot: int, parent: Checkpoint | None = None) -> None:
        """Enter a checkpoint: `slot`, of `take`, has the state of `page`, the `depth`-th of a path.

        `parent`: the checkpoint that the request went on from. If `page` has a checkpoint already,
        that one counts as used, and `slot` is free again.
        """
        found = self._at.get(page)
        if found is not None:
            self.give_back(slot)
            self.use(found)
            return
        windows = self._taken.pop(slot)
        self._keeper.add_counts(windows, 0, -1)
        made = Checkpoint(page, depth, slot, windows=windows)
        self._at[page] = made
        self._has[page] = True
        self._cache.note_change(SaveMade(page))
        self._touch(made)
        if parent is not None and not parent.is_gone and parent.uses <= 1:
            self._superseded.add(parent)

    # --- holding ----------------------------------------------------------------------------------

    def use(self, checkpoint: Checkpoint) -> None:
        checkpoint.uses += 1
        self._superseded.discard(checkpoint)
        self._touch(checkpoint)

    def lock(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, whose path the caller has locked, until `unlock`."""
        checkpoint.locks += 1
        if checkpoint.locks == 1:
            self._keeper.add_counts(checkpoint.windows, 0, 1)

    def unlock(self, checkpoint: Checkpoint) -> None:
        """End a lock, before the caller's lock of the path ends."""
        checkpoint.locks -= 1
        if checkpoint.locks:
            return
        self._keeper.add_counts(checkpoint.windows, 0, -1)
        if checkpoint.is_gone:
            del self._kept[checkpoint.slot]
            self._release(checkpoint)

    # --- taking back ------------------------------------------------------------------------------

    def dropped(self, pages: PageIds) -> None:
        """Drop the checkpoints that end on these pages, which have left the tree. O(pages)."""
        if not self._at:
            return
        ids = np.asarray(pages, np.intp)
        for page in ids[self._has[ids]].tolist():
            self._remove(self._at[page])

    def reset(self) -> None:
        """Drop all: the tree was emptied. Slots of locked ones are free when their locks end."""
        for checkpoint in list(self._at.values()):
            self._remove(checkpoint)

    def _evict_one(self) -> bool:
        """Return False if all are locked."""
        superseded = (one for one in self._superseded if not one.locks)
        others = (one for one in self._at.values() if not one.locks)
        checkpoint = min(superseded, key=attrgetter("tick"), default=None) or next(others, None)
        if checkpoint is None:
            return False
        self._remove(checkpoint)
        # What else removes one is the end of its page, which the tree has noted itself.
        self._cache.note_change(SaveEvicted(checkpoint.page))
        self.evicted += 1
        return True

    def _remove(self, checkpoint: Checkpoint) -> None:
        """The slot is free, unless the checkpoint is locked."""
        del self._at[checkpoint.page]
        self._has[checkpoint.page] = False
        self._superseded.discard(checkpoint)
        checkpoint.is_gone = True
        if checkpoint.locks:
            self._kept[checkpoint.slot] = checkpoint
        else:
            self._release(checkpoint)

    def _release(self, checkpoint: Checkpoint) -> None:
        self._free.append(checkpoint.slot)
        self._keeper.add_counts(checkpoint.windows, -1, 0)

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._tick += 1
        checkpoint.tick = self._tick
        if not checkpoint.is_gone:
            self._at[checkpoint.page] = self._at.pop(checkpoint.page)

    # --- laws -------------------------------------------------------------------------------------

    @property
    def num_locks(self) -> int:
        return sum(one.locks for one in [*self._at.values(), *self._kept.values()])

    @property
    def taken(self) -> list[int]:
        """Slots of `take` without a saved checkpoint, ascending; for audits."""
        return sorted(self._taken)

    @property
    def free_slots(self) -> list[int]:
        return self._free.copy()

    def kept(self, number: int) -> list[tuple[Pages, bool]]:
        entered = [*self._at.values(), *self._kept.values()]
        found = [(one.windows[number], one.locks > 0) for one in entered if one.windows]
        return found + [(windows[number], True) for windows in self._taken.values() if windows]

    def check_invariants(self) -> None:
        in_tree: dict[int, int] = {}
        locked: set[int] = set()
        for node in self._cache.nodes():
            for at, page in enumerate(np.frombuffer(node.pages, np.int32).tolist()):
                in_tree[page] = node.start + at + 1
                if node.lock_ref:
                    locked.add(page)
        all_of = [*self._at.values(), *self._kept.values()]
        slots = [one.slot for one in all_of] + self._free + list(self._taken)
        ticks = [one.tick for one in self._at.values()]
        laws = {
            "H9: a checkpoint ends on a page in the tree, at its depth": all(
                in_tree.get(page) == one.depth and one.page == page and not one.is_gone
                for page, one in self._at.items()
            ),
            "H12: each slot is free, taken, or of one checkpoint": sorted(slots)
            == list(range(self.num_slots)),
            "H13: a locked checkpoint ends on a locked path": all(
                not one.locks or one.page in locked for one in self._at.values()
            ),
            "what is gone is kept while it is locked": all(
                one.is_gone and one.locks > 0 and one.slot == slot
                for slot, one in self._kept.items()
            ),
            "pages know their checkpoints": np.flatnonzero(self._has).tolist() == sorted(self._at),
            "they stand in the order of their last use": ticks == sorted(ticks),
            "what is superseded is here": self._superseded <= {*self._at.values()},
            "no checkpoint was unlocked too often": all(one.locks >= 0 for one in all_of),
        }
        check_laws(laws, f"{len(self)} checkpoints", f"{len(self._free)} slots free")
