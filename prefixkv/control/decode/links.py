"""Decode's links to prefill ranks: an address, what answered there last, and when it was heard.

A request names the address of a prefill worker's rank 0, its *leader*, which says how many ranks
there are and where. A room waits at the leader's link until all ranks that are to learn of its
pages have been greeted and answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from prefixkv.control import handshake
from prefixkv.control.effects import (
    Connect,
    Disconnect,
    Reached,
    Unreached,
)
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import LifeWatch, PeerClock
from prefixkv.errors import FormerLifeError, PeerLostError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import (
    AnyBody,
    Fenced,
    Frame,
    Heartbeat,
    Hello,
    HelloRefused,
    HelloReply,
    HelloWanted,
)
from prefixkv.protocol.timers import Backoff
from prefixkv.transport.base import CHECKS

_MOST_ANSWERED: Final = 256
"""Addresses of which it is remembered what answered there last, for the message of a later loss."""


@dataclass(slots=True, eq=False)
class Link:
    """One prefill rank's address.

    `peer` is the process that answered there last; `ready` is True once its handshake is accepted,
    and False while it has to be repeated. `rank_addresses` has the addresses, by rank, that a room
    of this leader is promised to; `leaders` are the addresses of the links that have this one among
    theirs. `nonce` is that of the last HelloWanted. `is_local`: the address is on this machine.
    `plan` says how the ranks of this leader stage what they write to us, once `planned`.
    `checks` says how what this rank writes to us is compared, None where it is not.
    `waiting`: the rooms of this leader that are to be promised, in the order of admission.
    """

    address: str
    live: PeerClock
    hello: Backoff
    gone_s: float = math.inf  # since when there is no connection
    gone_why: str = ""
    gone_guess: str = ""
    peer: PeerId | None = None
    ready: bool = False
    reply: HelloReply | None = None
    rank_addresses: dict[int, str] = field(default_factory=dict)
    plan: Any = None  # the relay's
    planned: bool = False
    checks: Any = None  # of `CHECKS`
    leaders: set[str] = field(default_factory=set)
    nonce: int = 0
    is_local: bool = False
    waiting: deque[Any] = field(default_factory=deque)

    @property
    def known(self) -> int:
        """Incarnation that answered last, 0 if none has. Our Hello says it, and only a reply that
        repeats it may replace that incarnation."""
        return 0 if self.peer is None else self.peer.incarnation


class Links(dict[str, Link]):
    """One decode rank's links, by address. Owned by a `DecodeControl`. What is to be done is said,
    in order."""

    def __init__(
        self,
        hello: Hello,
        inbox: ControlInbox[Any, Any],
        born_s: float | None = None,
    ) -> None:
        self._born_s = born_s
        self.news = inbox.news
        self._say = inbox.say
        self._send = inbox.send
        self.watch = LifeWatch(inbox.timing, inbox.lost_peers, self._current, inbox.say)
        self._hello = hello
        self.offers_checksums = bool(hello.checksums)
        self._timing = inbox.timing
        self._timers = inbox.timers
        self._answered: dict[str, tuple[PeerId, float]] = {}  # by address, until when
        self.changed: set[str] = set()  # leaders that may be ready now, or may not be any more

    def note_change(self, link: Link) -> None:
        """Note that the leaders of this link may have become ready, or may be ready no more. They
        plan again: another process may answer there, or say something else."""
        self.changed.add(link.address)
        self.changed |= link.leaders
        for leader in self.leaders(link):
            leader.planned = False

    def all(self) -> list[Link]:
        """Return a copy of the list."""
        return list(self.values())  # in one step: the scheduler's thread calls `peers`

    def peers(self, now_s: float) -> dict[str, tuple[PeerId | None, str]]:
        """Return, by address, which process answers, and "ready", "suspect" or "connecting"."""
        return {link.address: (link.peer, self._state(link, now_s)) for link in self.all()}

    def _state(self, link: Link, now_s: float) -> str:
        if not link.ready:
            return "connecting"
        return "suspect" if link.live.suspect(self._timing, now_s) else "ready"

    def trouble(self, link: Link, peer: PeerId, now_s: float) -> str:
        """Return what is wrong with a process that this link leads or led to, "" if nothing is."""
        if link.peer != peer:
            return "was replaced"
        return "suspect" if link.live.suspect(self._timing, now_s) else ""

    # --- what is said -----------------------------------------------------------------------------

    def open(self, address: str, now_s: float) -> Link:
        """Return the link to an address; where there is none, connect and say Hello."""
        if (link := self.get(address)) is None:
            link = self[address] = Link(
                address, PeerClock(now_s, now_s), Backoff(self._timing.resend_s)
            )
            self._say(Connect(address))
            self.greet(link, now_s)
        return link

    def greet(self, link: Link, now_s: float) -> None:
        """Say Hello, and repeat it until it is answered."""
        # The backoff starts first: its first repeat is what the timer is set for.
        link.hello.start(now_s)
        self._say_hello(link, now_s)
        self._timers.wake(link.address, link.hello.due_s)

    def _say_hello(self, link: Link, now_s: float) -> None:
        """With what has changed since the last one: nonce, incarnation, age."""
        # As it is now, and not as it was when the worker was made: the other side subtracts it from
        # its own clock.
        age_ms = None if self._born_s is None else max(0, int(1000 * (now_s - self._born_s)))
        said = {"nonce": link.nonce, "known": link.known, "age_ms": age_ms}
        hello = msgspec.structs.replace(self._hello, **said)
        self.send(link, hello, now_s)

    def send(self, link: Link, body: AnyBody, now_s: float) -> None:
        link.live.sent_s = now_s
        self._send(link.address, body)

    def heard_of(self, what: Reached | Unreached, now_s: float) -> None:
        link = self.get(what.address)
        if link is None:
            return
        if isinstance(what, Reached):
            link.gone_s = math.inf
        else:
            # The first failure counts: attempts go on, and each is reported.
            link.gone_s = min(link.gone_s, now_s)
            link.gone_why, link.gone_guess = what.why, what.guess
            self.watch.doubt(link.peer, now_s)
            self._timers.wake(link.address, link.gone_s + self._timing.connect_timeout_s)

    def gone(
        self, link: Link, how_ended: Callable[[PeerId], str], now_s: float
    ) -> PeerLostError | None:
        """Return an error if there has been no connection for `connect_timeout_s`, else None. It
        says what is known of the process that answered before; `how_ended` is "" for one that may
        still live."""
        if now_s < link.gone_s + self._timing.connect_timeout_s:
            return None
        if link.peer is not None:
            self._note_answered(link)
        peer, why = None, link.gone_why
        if (before := self._answered.get(link.address)) is not None:
            peer, heard_s = before
            how = f", and {how}" if (how := how_ended(peer)) else ""
            why += f"; {peer} answered there until {now_s - heard_s:.1f} s ago{how}"
        elif link.gone_guess:
            why += f": {link.gone_guess}"
        return PeerLostError(f"prefill worker {link.address}: {why}", peer)

    def _note_answered(self, link: Link) -> None:
        assert link.peer is not None
        self._answered.pop(link.address, None)
        self._answered[link.address] = link.peer, link.live.heard_s
        # Addresses come and go with restarts; those of the longest ago are forgotten.
        while len(self._answered) > _MOST_ANSWERED:
            del self._answered[next(iter(self._answered))]

    def tick(self, address: str, has_rooms: Callable[[Link], bool], now_s: float) -> None:
        """Repeat a Hello, say a Heartbeat, or close a link that is silent and has no rooms."""
        link = self.get(address)
        if link is None:
            return
        # A link with rooms is kept however long it is silent: its word may still drain their pages.
        if link.live.forgettable(self._timing, now_s) and not has_rooms(link):
            self.news.say("forgotten", link.peer or link.address, "was silent for long")
            self.close(link, now_s)
            return
        if link.peer is not None and link.ready:
            is_silent = link.live.suspect(self._timing, now_s)
            # Every look repeats the question; only a change is acted upon.
            if self.news.silent(link.peer, is_silent):
                self.note_change(link)
                if is_silent:
                    self.watch.doubt(link.peer, now_s)
        if not link.ready and link.hello.take(now_s):
            self._say_hello(link, now_s)
        elif link.ready and now_s >= link.live.heartbeat_due_s(self._timing):
            self.send(link, Heartbeat(), now_s)
        # A rank that has not answered our Hello gets it again, and no heartbeats. The time at which
        # the address counts as lost is a wake-up of its own, until it has passed.
        next_s = link.live.heartbeat_due_s(self._timing) if link.ready else link.hello.due_s
        gone_s = link.gone_s + self._timing.connect_timeout_s
        self._timers.wake(link.address, min(next_s, gone_s) if gone_s > now_s else next_s)

    def refuse(
        self,
        link: Link,
        life: PeerId,
        reply: HelloReply | HelloWanted | None,
        error: Exception,
        now_s: float,
    ) -> None:
        """Tell a process that we do not work with it, unless it has refused us itself."""
        if isinstance(reply, HelloReply) and reply.refused:
            return
        is_over = isinstance(error, FormerLifeError)
        if is_over:
            self.news.say("refused", life, f"still speaks at {link.address}: {error}")
        refusal = HelloRefused(life.incarnation, str(error)[:1000], is_over)
        self.send(link, refusal, now_s)

    def farewell(self) -> None:
        """Send a Fenced over every link whose rank answered: this process leaves."""
        for link in self.values():
            if link.peer is not None:
                self._send(link.address, Fenced())

    # --- handshake --------------------------------------------------------------------------------

    def accept(self, link: Link, frame: Frame, reply: HelloReply, now_s: float) -> None:
        """Make the rank that answered with a HelloReply the link's. Raises HandshakeError or
        ConfigError, with the link unchanged, if the two cannot work together."""
        # Both checks before anything is changed.
        handshake.check_reply(self._hello, reply)
        link.checks = CHECKS[0].plan(self._hello, reply) if reply.checksum else None
        is_leader = reply.rank == 0
        link.rank_addresses = (
            handshake.addresses_told(self._hello, link.address, reply) if is_leader else {}
        )
        link.peer = frame.sender
        link.ready = True
        link.reply = reply
        self.note_change(link)
        self.watch.met(frame.sender, reply.life, link.is_local, now_s)
        # The Hello is answered, so it is not repeated; heartbeats take over the timer.
        link.hello.due_s = math.inf
        self._timers.wake(link.address, link.live.heartbeat_due_s(self._timing))

    def on_hello_wanted(self, link: Link, nonce: int, now_s: float) -> None:
        """Say Hello to a rank that does not know us, unless one with this nonce is on its way."""
        # A Hello with this nonce is being repeated already: one more for each HelloWanted would
        # only multiply frames. Nonce 0: the rank could not read the frame that it answers.
        if not link.ready and link.hello.due_s != math.inf and nonce in (0, link.nonce):
            return
        link.nonce = nonce or link.nonce
        link.ready = False
        self.note_change(link)
        self.greet(link, now_s)

    def replace_peer(self, link: Link, newer: PeerId | None, now_s: float) -> PeerId | None:
        if link.peer is not None:
            self._note_answered(link)
        former, link.peer, link.ready = link.peer, newer, False
        self.note_change(link)
        if former is not None:
            self.news.forget(former)
            self.watch.doubt(former, now_s)
        return former

    def _current(self) -> list[PeerId]:
        return [link.peer for link in self.values() if link.peer is not None]

    def ready(self, leader: Link, now_s: float) -> dict[int, Link] | None:
        """Return, by rank, the links to the ranks that rooms of this leader are promised to, None
        while one is not known or does not answer; opened if need be. Raises HandshakeError if a
        rank is not what the leader said, or only some of the ranks stage."""
        links: dict[int, Link] = {}
        for rank, address in leader.rank_addresses.items():
            links[rank] = self.open(address, now_s)
            links[rank].leaders.add(leader.address)
        assert leader.reply is not None
        # Once per set of replies, since rooms ask each time: see `note_change`. Checked even while
        # others are missing, so that a wrong rank is refused at once.
        replies = {rank: link.reply for rank, link in links.items() if link.ready and link.reply}
        if not leader.planned:
            for rank, link in {0: leader, **links}.items():
                if link.ready and link.reply is not None:
                    handshake.check_rank(link.address, link.reply, rank, leader.reply)
        if any(not link.ready or link.live.suspect(self._timing, now_s) for link in links.values()):
            return None
        if not leader.planned:
            leader.plan = handshake.relay_plan(self._hello, leader.reply, replies)
            leader.planned = True
        return links

    def max_tokens(self, leader: Link) -> int:
        """Return the smallest capacity that a worker's ranks say, 0 if none says one."""
        links = [leader, *(self[address] for address in leader.rank_addresses.values())]
        said = [link.reply.max_tokens for link in links if link.reply is not None]
        return min(filter(None, said), default=0)

    def leaders(self, link: Link) -> Iterator[Link]:
        # Sorted, so that a run from a seed replays exactly.
        for address in (link.address, *sorted(link.leaders)):
            if (leader := self.get(address)) is not None:
                yield leader

    # --- ends -------------------------------------------------------------------------------------

    def suspend(self, link: Link, now_s: float) -> None:
        """Give a rank no new rooms until it has answered another Hello. The link stays open: its
        word on the old rooms is still needed to drain them."""
        if link.ready:
            link.ready = False
            self.note_change(link)
            link.hello.start(now_s)
            self._timers.wake(link.address, link.hello.due_s)

    def close(self, link: Link, now_s: float) -> None:
        """Forget the address. Undrained rooms of an earlier peer keep the `Link` object; only a
        fence can drain them then."""
        # It was closed before, and the address may have another link by now.
        if self.get(link.address) is not link:
            return
        del self[link.address]
        self.replace_peer(link, None, now_s)
        self._timers.forget(link.address)
        self._say(Disconnect(link.address))
