"""A record per request that has ended: logger `prefixkv.requests`, level INFO, a JSON object.

    {"side": "decode", "rid": "r1", "room": 7, ..., "hit_tokens": 6144, "arrived_at": 1763740000.1,
     "admitted_s": 0.0021, "transferred_s": 0.0314, ..., "ended_s": 2.5}

Times are seconds since the arrival. `room` and `generation` join decode's record to prefill's.
`decode/journal.py` and `prefill/request.py` say what each field is. The log record has it as
`request`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from prefixkv.protocol.ids import PeerId

LOGGER = logging.getLogger("prefixkv.requests")


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
