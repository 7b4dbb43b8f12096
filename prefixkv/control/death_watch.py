"""Which peers may have died, so that the kernel has to be asked.

A peer says in its handshake which process it is (`ProcessLife`). That is evidence against itself
alone: it counts where the peer is on this machine, as its connection shows, and only where every
handshake under its identity has said the same. While something is wrong with the peer, Examine asks
again and again whether that process has ended. `Fence(proved=True)` is the answer, once it is
proved; there is no other answer, and no time after which a peer counts as dead.
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
"""From one look at a process to the next."""
FENCED: Final = "was fenced"
FENCED_DEAD: Final = "was fenced, since it is proved dead"


class Deaths:
    """Owned by a control object.

    Args:
        lost: the peers that are suspect or over and still hold something of ours, at a time.
        current: the peers that links are to.
    """

    def __init__(
        self,
        timing: ControlConfig,
        lost: Callable[[float], Iterable[PeerId]],
        current: Callable[[], Iterable[PeerId]],
    ) -> None:
        self.due_s = math.inf  # when `tick` is wanted
        self._timing = timing
        self._lost = lost
        self._current = current
        # None: it has said nothing, or two things, or is fenced.
        self._lives: dict[PeerId, ProcessLife | None] = {}
        self._doubted: dict[PeerId, float] = {}  # until when

    def met(self, peer: PeerId, life: ProcessLife | None, is_local: bool, now_s: float) -> None:
        """What a handshake that was accepted says of the peer. `is_local`: its connection does not
        leave this machine."""
        if not (is_local and self._timing.prove_death):
            life = None
        if peer not in self._lives:
            self._forget_others(now_s)
        if self._lives.setdefault(peer, life) != life:
            self._lives[peer] = None

    def doubt(self, peer: PeerId | None, now_s: float) -> None:
        """Something is wrong with it: it is silent, cannot be reached, or another is in its place.
        It is looked at now, for as long as a peer may be silent, and then while it is lost."""
        if peer is not None and self._lives.get(peer) is not None:
            self._doubted[peer] = now_s + self._timing.suspect_after_s
            self.due_s = min(self.due_s, now_s)

    def fenced(self, peer: PeerId) -> bool:
        """There is nothing to find out of it any more; False if there was nothing before."""
        self._doubted.pop(peer, None)
        known = self._lives.get(peer) is not None
        if known:
            self._lives[peer] = None
        return known

    def forget(self, peer: PeerId) -> None:
        """No link is to it, and it holds nothing."""
        self._doubted.pop(peer, None)
        self._lives.pop(peer, None)

    def tick(self, now_s: float) -> list[Examine]:
        """What is to be looked at now."""
        if now_s < self.due_s:
            return []
        asked = self._forget_others(now_s)
        out = [Examine(peer, life) for peer in asked if (life := self._lives.get(peer))]
        self.due_s = now_s + EXAMINE_S if out else math.inf
        return out

    def _forget_others(self, now_s: float) -> Iterable[PeerId]:
        """Forget what is of no use any more; returns the peers with which something is wrong."""
        self._doubted = {peer: end_s for peer, end_s in self._doubted.items() if now_s < end_s}
        asked = dict.fromkeys((*self._doubted, *self._lost(now_s)))
        kept = {*asked, *self._current()}
        self._lives = {peer: life for peer, life in self._lives.items() if peer in kept}
        return asked
