"""What either side knows of its peers' processes: when each was heard and which of its frames are
new, which lives are over, whose death the kernel may be asked about; and what changes, for the log.

Lives are random numbers without an order. Under one name the later accepted handshake wins, and
frames of the life before are refused. A handshake has to repeat a `nonce` that was made after the
life before was known, so a late frame of a dead process cannot replace a live one. `PER_NAME` lives
of each of `MAX_NAMES` names are kept, the last heard of longest. A forgotten life comes back only
by a handshake, so only if it lives.

A peer's handshake says which process it is (`ProcessLife`). That counts only on this machine, as
its connection shows, and where all handshakes of its identity agree. `Examine` asks whether the
process has ended; the only answer is `Fence(proved=True)`. Silence never makes a peer dead.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.effects import Examine
from prefixkv.errors import FormerLifeError, ProtocolError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Frame, ProcessLife

KEPT: Final = 1000
PER_NAME = 64
MAX_NAMES = 4096
LEFT: Final = "has left"
_NONE: Final[Mapping[int, str]] = MappingProxyType({})
EXAMINE_S: Final = 0.25
"""Time between two looks at a process."""
FENCED: Final = "was fenced"
FENCED_DEAD: Final = "was fenced, since it is proved dead"

LostPeers = dict[PeerId, tuple[str, int]]
"""By life: what is wrong with it, and how many pages (on decode) or rooms (on prefill) it holds."""


# --- the clock of a connection --------------------------------------------------------------------


@dataclass(slots=True)
class PeerClock:
    """When the other end was heard, and spoken to. Silence makes it suspect, never dead."""

    heard_s: float
    sent_s: float
    in_seq: int = 0

    def take(self, frame: Frame, now_s: float) -> None:
        """Count a frame in. Raise ProtocolError if its number is not above all before: repeated or
        reordered."""
        # Numbers of one life only grow, also over several connections. So a frame that was recorded
        # and sent again, or was overtaken on another connection, is refused.
        if frame.seq <= self.in_seq:
            raise ProtocolError(f"frame {frame.seq} after {self.in_seq}")
        self.in_seq = frame.seq
        self.heard_s = now_s

    def suspect(self, timing: ControlConfig, now_s: float) -> bool:
        """Return whether it has been silent for longer than `suspect_after_s`."""
        return now_s - self.heard_s > timing.suspect_after_s

    def heartbeat_due_s(self, timing: ControlConfig) -> float:
        """Return when the next Heartbeat is due. Timers use this very sum, so that no wake-up comes
        a rounding error too early."""
        return self.sent_s + timing.heartbeat_s

    def forgettable(self, timing: ControlConfig, now_s: float) -> bool:
        """Return whether it has been silent for longer than `forget_after_s`."""
        return now_s - self.heard_s > timing.forget_after_s


# --- changes, in sentences for the log ------------------------------------------------------------


class PeerChange(msgspec.Struct, frozen=True):
    """One change of a peer.

    `kind` is "met", "refused", "silent", "heard", "over" (replaced or fenced), "left" (it was
    closed), "lost" (nothing answers), "forgotten", "quarantined", "shut out" (by its keys) or
    "unchecked" (one side alone has checksums on).
    `peer` is an address, or a key, where it is not known which process has it.
    """

    kind: str
    peer: PeerId | str
    why: str = ""


class PeerChanges:
    """Changes that are not written yet, at most `KEPT`: the oldest is dropped. Of a control
    object."""

    def __init__(self) -> None:
        # Bounded, since peers cause the entries and nothing may take them for a while.
        self.kept: deque[PeerChange] = deque(maxlen=KEPT)
        # Peers last reported as silent, so that only a change is reported.
        self._silent: set[PeerId] = set()

    def say(self, kind: str, peer: PeerId | str, why: str = "") -> None:
        self.kept.append(PeerChange(kind, peer, why))

    def silent(self, peer: PeerId, is_silent: bool) -> bool:
        """Record a change to silent, or to heard again; return whether it is one. May be called on
        every look."""
        if is_silent is (peer in self._silent):
            return False
        if is_silent:
            self._silent.add(peer)
            self.say("silent", peer, "is suspect: it gets no new rooms")
        else:
            self._silent.discard(peer)
            self.say("heard", peer, "is heard again")
        return True

    def forget(self, peer: PeerId) -> None:
        """Drop whether this peer, known no more, was silent."""
        self._silent.discard(peer)

    def take(self) -> list[PeerChange]:
        """Return and remove all changes, in order."""
        taken = []
        # One by one, so that an entry added meanwhile by another thread is neither lost nor
        # doubled.
        while self.kept:
            taken.append(self.kept.popleft())
        return taken


# --- lives that are over --------------------------------------------------------------------------


class IncarnationHistory:
    """Lives that are over, by name. Owned by a control object; any thread may call `how`."""

    def __init__(self, news: PeerChanges | None = None) -> None:
        self.news = news or PeerChanges()
        # By name, then by life: how it ended. In both the one heard of longest ago comes first.
        self._over: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()
        # By name: the life that was forgotten for its silence. It is not over.
        self._silent: OrderedDict[str, PeerId] = OrderedDict()

    def end(self, life: PeerId, how: str) -> None:
        """Record that a life is over; `how` completes a sentence about it: "was fenced", `LEFT`."""
        lives = self._over.setdefault(life.name, OrderedDict())
        # The first end stands: a later word must not turn "was fenced" into something weaker.
        if life.incarnation not in lives:
            lives[life.incarnation] = how
            self.news.say("left" if how == LEFT else "over", life, how)
        self.news.forget(life)
        self._heard(life)
        if len(lives) > PER_NAME:
            lives.popitem(last=False)
        if len(self._over) > MAX_NAMES:
            self._over.popitem(last=False)

    def supersede(self, life: PeerId, by: PeerId) -> None:
        self.end(life, f"was superseded by life {by.incarnation:x}")

    def has_former(self, name: str) -> bool:
        return name in self._over

    def check(self, life: PeerId) -> None:
        """Raise FormerLifeError if this life is over."""
        if how := self.how(life):
            # It still speaks, so keep it among those remembered longest.
            self._heard(life)
            raise FormerLifeError(f"{life} {how}", life)

    def how(self, life: PeerId) -> str:
        """Return how a life ended, "" if it is not over. Any thread may ask."""
        return self._over.get(life.name, _NONE).get(life.incarnation, "")

    def _heard(self, life: PeerId) -> None:
        self._over.move_to_end(life.name)
        self._over[life.name].move_to_end(life.incarnation)

    # --- lives that were forgotten for their silence ----------------------------------------------

    def silent(self, life: PeerId) -> None:
        """Remember a life, forgotten for its silence: it may come back if no other does."""
        self._silent[life.name] = life
        self._silent.move_to_end(life.name)
        if len(self._silent) > MAX_NAMES:
            self._silent.popitem(last=False)

    def begin(self, life: PeerId) -> None:
        """Record that a life was accepted; a silent one that it replaces is over now."""
        before = self._silent.pop(life.name, life)
        if before != life:
            self.supersede(before, life)

    def last_silent(self, name: str) -> PeerId | None:
        """Return the last life of this name that was forgotten for its silence, if any."""
        return self._silent.get(name)


def nonce(me: PeerId, them: PeerId, known: PeerId | None) -> int:
    """Return the number that a Hello of `them` has to repeat to make `known` a former life.

    Derived from the three lives, so nothing is stored for strangers. It changes with `known`, so an
    answer from before the present life came is of no use. Never 0, which says "none".
    """
    words = f"{me.incarnation} {them.incarnation} {known.incarnation if known else None}"
    return int.from_bytes(blake2b(words.encode(), digest_size=8).digest()) or 1


# --- peers that may have died ---------------------------------------------------------------------


class LifeWatch:
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
        life = life if is_local else None
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
        if known := self._lives.get(peer) is not None:
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
