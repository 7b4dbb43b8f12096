"""Peers that may have died, so that the kernel has to be asked about their process.

A peer's handshake says which process it is (`ProcessLife`). That counts only on this machine, as
its connection shows, and where all handshakes of its identity agree. `Examine` asks whether the
process has ended; the only answer is `Fence(proved=True)`. Silence never makes a peer dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.control.effects import Examine
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife

EXAMINE_S: Final = 0.25
"""Time between two looks at a process."""
FENCED: Final = "was fenced"
FENCED_DEAD: Final = "was fenced, since it is proved dead"

LostPeers = dict[PeerId, tuple[str, int]]
"""By life: what is wrong with it, and how many pages (on decode) or rooms (on prefill) it holds."""


class DeathWatch:
    """The processes whose death may be asked of the kernel. Owned by a control object.

    `lost` returns the peers that are suspect or over at a time and still hold something of ours;
    `current` those that a link leads to now; `examine` takes what is to be looked at.
    """

    def __init__(
        self,
        timing: ControlConfig,
        lost: Callable[[float], Iterable[PeerId]],
        current: Callable[[], Iterable[PeerId]],
        examine: Callable[[Examine], None],
    ) -> None:
        self.due_s = math.inf  # when `tick` is wanted; infinity: nothing is to be asked
        self._timing = timing
        self._lost = lost
        self._current = current
        self._examine = examine
        # The process that each peer says it is. None: it named none, named two different ones, or
        # is fenced. None stays, so that a later handshake cannot point at a process again.
        self._lives: dict[PeerId, ProcessLife | None] = {}
        self._doubted: dict[PeerId, float] = {}  # until when each is looked at for that alone

    def met(self, peer: PeerId, life: ProcessLife | None, is_local: bool, now_s: float) -> None:
        """Record the process that an accepted handshake names. `is_local`: the connection does not
        leave this machine, elsewhere a process id means nothing."""
        if not (is_local and self._timing.prove_death):
            life = None
        # Before one is added, so that peers that come and go do not make the table grow.
        if peer not in self._lives:
            self._forget_others(now_s)
        # Two different claims under one identity: one of them is a lie, so neither may prove a
        # death. Otherwise a peer could name a process that ends soon, and have pages freed that it
        # still writes.
        if self._lives.setdefault(peer, life) != life:
            self._lives[peer] = None

    def doubt(self, peer: PeerId | None, now_s: float) -> None:
        """Watch a peer that is silent, unreachable, or replaced: its process is examined for
        `suspect_after_s`, and beyond that while `lost` reports it."""
        if peer is not None and self._lives.get(peer) is not None:
            self._doubted[peer] = now_s + self._timing.suspect_after_s
            self.due_s = min(self.due_s, now_s)

    def fenced(self, peer: PeerId) -> bool:
        self._doubted.pop(peer, None)
        known = self._lives.get(peer) is not None
        if known:
            self._lives[peer] = None
        return known

    def forget(self, peer: PeerId) -> None:
        """Drop what is known of a peer's process."""
        self._doubted.pop(peer, None)
        self._lives.pop(peer, None)

    def tick(self, now_s: float) -> None:
        """Have doubted and lost peers examined, if due, and set `due_s` for the next look."""
        if now_s < self.due_s:
            return
        self.due_s = math.inf
        for peer in self._forget_others(now_s):
            if life := self._lives.get(peer):
                self._examine(Examine(peer, life))
                self.due_s = now_s + EXAMINE_S

    def _forget_others(self, now_s: float) -> Iterable[PeerId]:
        """Drop the peers without a link with which nothing is wrong; return those to ask about."""
        self._doubted = {peer: end_s for peer, end_s in self._doubted.items() if now_s < end_s}
        asked = dict.fromkeys((*self._doubted, *self._lost(now_s)))
        kept = {*asked, *self._current()}
        self._lives = {peer: life for peer, life in self._lives.items() if peer in kept}
        return asked


def merged_lost_peers(ranks: Iterable[LostPeers]) -> LostPeers:
    """Merge the lost peers of all ranks. Pages are the maximum and not the sum: all ranks hold the
    same page ids."""
    found: LostPeers = {}
    for lost in ranks:
        for peer, (what, pages) in lost.items():
            found[peer] = what, max(pages, found.get(peer, (what, 0))[1])
    return found
