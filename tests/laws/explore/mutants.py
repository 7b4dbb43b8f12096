"""Protocols that are a little wrong: the explorer finds each, in the configuration that is named
with it."""

from typing import Any

from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.decode.rooms import ReceiverRooms
from prefixkv.control.lives import PeerClock
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.control.prefill.rooms import SenderRooms
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.sender_machine import SenderMachine
from tests.laws.explore.configs import config_of
from tests.laws.explore.search import explore
from tests.laws.explore.state import LawError
from tests.laws.mutants import Mutant


def _M(name: str, function: Any, old: str, new: str, config: str) -> Mutant:  # noqa: N802
    return Mutant(name, (function, old, new), shown_by=config)


_S, _R, _D, _P = SenderMachine, ReceiverMachine, DecodeControl, PrefillControl
MUTANTS = (
    _M(
        "an OutcomeAck's ticket is not looked at", _P._take,
        " and room.ticket == body.ticket", "", "again: lose, slow",
    ),
    _M(
        "a late promise is of the number's next use", _P._take_promise,
        "self._tombs.over((key, peer.id, ticket))", "None", "again: slow",
    ),
    _M(
        "a promise of a use that is over is forgotten as it is acknowledged late",
        SenderRooms.drop,
        "self._tombs.bury(use, _end(room), answered=reader.answered)", "pass",
        "again: slow, stall",
    ),
    _M(
        "Drained is said before the writes have ended", _S.drained,
        " and not self.in_flight", "", "abort",
    ),
    _M(
        "an outcome is said once", _S._tick_unanswered,
        "return self._outcomes() if", "return [] if", "lose",
    ),
    _M(
        "a promise is said once", _R._tick_open,
        "return [SendToRank(rank, self.promise) for rank in sorted(self._unacked)]", "return []",
        "lose",
    ),
    _M(
        "an abort is said once", _R._tick_draining,
        "actions += self._aborts()", "pass", "lose, abort",
    ),
    _M(
        "an abort frees the pages", _R._fail,
        "self.error = event.error", "self._undrained.clear()", "abort",
    ),
    _M(
        "repeated frames are taken", PeerClock.take,
        "frame.seq <= self.in_seq", "False", "again: repeat, abort",
    ),
    _M(
        "Drained of an earlier use is believed", _D._room_of,
        "room.ticket != body.ticket", "False", "again: abort 2, slow",
    ),
    _M(
        "a notification of an earlier use counts", _D._arrived,
        "room.ticket != tag.ticket", "False", "again, late notifications: abort",
    ),
    _M(
        "a failed write counts as drained", _P._write_failed,
        "failed.error, failed.drained)", "failed.error, True)", "fail",
    ),
    _M(
        "a renewed agent's kernels are not waited for", _D._take_drained,
        "drained.settle and", "False and", "fail",
    ),
    _M(
        "a fence drains at once", ReceiverRooms.settle,
        "not self._timing.fence_settle_s", "True", "restart",
    ),
    _M(
        "one rank's outcome is enough", _R._maybe_success,
        "not self._all_reported", "not self._outcomes", "two writers",
    ),
    _M(
        "source pages are free while they are read", _S.on,
        " and not self.in_flight", "", "abort",
    ),
    _M(
        "a fenced life is still heard", _D._on_handshake,
        "self._lives.check(frame.sender)", "pass", "repeat, restart",
    ),
    _M(
        "a reply that answers no Hello of ours is believed", _D._on_handshake,
        "body.known != link.known", "False", "repeat, restart",
    ),
    _M(
        "a promise to a former life is taken", _P._take,
        "body.life != self.me.incarnation", "False", "restart, slow",
    ),
    _M(
        "a peer that is heard is never asked again", _R._tick_open,
        "self._unacked = set(self.ranks - self._outcomes.keys())", "pass", "heard: lose 4, fail",
    ),
    _M(
        "what kernels hold of a room that is over is not waited for", _P._refuse_promise,
        "drained = not self._rooms.may_need_settle", "drained = True", "heard: lose 4, fail",
    ),
    _M(
        "prefill waits for a decode worker that is silent", _S._tick_open,
        "self._wait.goes_on(event.heard_s, now_s)", "True", "heard: restart",
    ),
    _M(
        "a promise without a request waits while decode is heard", _S._tick_open,
        "self.added and ", "", "heard: abort, stall",
    ),
    _M(
        "rooms of a peer that is gone go at once", SenderRooms.on,
        "is_gone and not room.in_flight", "is_gone", "restart",
    ),
)  # fmt: skip


def find(mutant: Mutant) -> str:
    """Return what breaks with a mutant in its configuration; "": nothing."""
    try:
        with mutant.alive():
            explore(config_of(mutant.shown_by))
    except LawError as error:
        return f"{error} ({len(error.trace)} moves)"
    return ""
