"""The log of requests and that of peers.

Logger `prefixkv.requests` has a record per request that has ended, level INFO, a JSON object:

    {"side": "decode", "rid": "r1", "room": 7, ..., "hit_tokens": 6144, "arrived_at": 1763740000.1,
     "admitted_s": 0.0021, "transferred_s": 0.0314, ..., "ended_s": 2.5}

Times are seconds since the arrival. `room` and `generation` join decode's record to prefill's.
`decode/journal.py` and `prefill/request.py` say what each field is. The log record has it as
`request`.

Logger `prefixkv.peers` has what becomes of peers. What becomes of one again and again, of a refused
one in whatever life, is one line per minute.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from prefixkv.control.lives import PeerChange
from prefixkv.protocol.ids import PeerId

LOGGER = logging.getLogger("prefixkv.requests")
REPEAT_S: Final = 60.0
_MAX_KEYS: Final = 4096
_CALM: Final = {"met", "heard", "left", "forgotten"}

_log = logging.getLogger("prefixkv.peers")


class RequestLog:
    """The `on_ended` of a journal. Costs little while the logger is off, and nothing listens.

    Each of `listeners` gets every record, and when its request arrived, by `time.monotonic`.
    """

    def __init__(self, me: PeerId, timeline: Callable[[Any], dict[str, Any]]) -> None:
        self._me = me
        self._timeline = timeline
        self.listeners: list[Callable[[dict[str, Any], float], object]] = []

    def __call__(self, req: Any, now_s: float) -> None:
        # Before anything is computed: this runs on the scheduler's thread, for each request.
        is_logged = LOGGER.isEnabledFor(logging.INFO)
        if not is_logged and not self.listeners:
            return
        record = {
            "node": self._me.name,
            "incarnation": self._me.incarnation,
            **self._timeline(req),
            # Requests have the monotonic clock; an operator wants the time of day.
            "arrived_at": round(time.time() - (now_s - req.arrived_s), 6),
        }
        # Listeners first: a handler of the logger that raises is one of the user's.
        for listener in self.listeners:
            listener(record, req.arrived_s)
        if is_logged:
            LOGGER.info("%s", json.dumps(record), extra={"request": record})


class PeerLog:
    """Writes changes of peers. Owned by a control thread; `name` is the worker's.

    An exception of a log handler comes out of `write`; the lines behind it are lost.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # By kind and peer: when a line was written last, and how many were left out since. The
        # oldest comes first; bounded, since peers choose their names.
        self._written: OrderedDict[tuple[str, PeerId | str], tuple[float, int]] = OrderedDict()

    def write(self, news: list[PeerChange], now_s: float) -> None:
        """Write the lines that are due; may raise what a log handler raises."""
        for one in news:
            # Repeats are counted, not written.
            if (more := self._more(one, now_s)) is not None:
                level = logging.INFO if one.kind in _CALM else logging.WARNING
                again = f" ({more} more since the last line)" if more else ""
                _log.log(level, "%s: %s: %s %s%s", self._name, one.kind, one.peer, one.why, again)

    def _more(self, one: PeerChange, now_s: float) -> int | None:
        """Return how many such changes were left out since the last line; None: this one too."""
        # A refused peer is known by its name alone: each restart is another life.
        peer = one.peer
        if one.kind == "refused" and isinstance(peer, PeerId):
            peer = peer.name
        key = one.kind, peer
        last_s, more = self._written.get(key, (now_s - REPEAT_S, 0))
        if now_s < last_s + REPEAT_S:
            self._written[key] = last_s, more + 1
            return None
        self._written[key] = now_s, 0
        self._written.move_to_end(key)
        if len(self._written) > _MAX_KEYS:
            self._written.popitem(last=False)
        return more
