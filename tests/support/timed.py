"""Schedulers without a node: each call is told the time, and the commands wait to be taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from prefixkv.cache.eviction.policy import Policy
from prefixkv.config import ControlConfig, DecodeConfig, ModelConfig, PrefillConfig
from prefixkv.decode import scheduler as decode
from prefixkv.decode.request import DecodeState
from prefixkv.pages.manager import PageManager
from prefixkv.prefill import scheduler as prefill
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.request import DeviceEvent

CONTROL = frozenset({
    "check_invariants", "check_own", "copy_ended", "end_all", "feeds", "hear", "holders",
    "prefill_away", "prefill_lost", "prefill_ready", "release_deferred", "room_bootstrapped",
    "room_drained", "room_ended", "room_overdue", "settle_deferred", "source_free",
    "take_commands", "take_copies",
})  # fmt: skip
"""Calls of the control plane and of audits: an engine makes none of them."""

_PARTS = frozenset(decode.DecodeParts.__dataclass_fields__)


class Patient(DecodeConfig):
    """Settings with any name and any times: by default nothing waits too long."""

    __slots__ = ("times",)

    def __init__(
        self, name: str, patience_s: float, waiting_timeout_s: float, **settings: Any
    ) -> None:
        super().__init__(**settings)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "times", (patience_s, waiting_timeout_s))

    @property
    def admission_patience_s(self) -> float:
        return float(self.times[0])

    @property
    def admission_wait_s(self) -> float:
        return float(self.times[1])


def _at(place: int, kind: type, name: str) -> Callable[..., Any]:
    """The call of this name with the time as argument number `place`."""

    def timed(self: Any, *args: Any, **named: Any) -> Any:
        self.now_s = args[place]
        call = getattr(kind, name)  # now: a mutant may be in its place
        return call(self, *args[:place], *args[place + 1 :], **named)

    return timed


class DecodeScheduler(decode.DecodeScheduler):
    def __init__(
        self, pages: PageManager, *, name: str = "", weights_version: str = "",
        patience_s: float = math.inf, waiting_timeout_s: float = math.inf,
        max_waiting: int = 1_000_000,
        host: tuple[int, str | Policy, bool] | None = None, **given: Any,
    ) -> None:  # fmt: skip
        parts = {each: given.pop(each) for each in _PARTS & given.keys()}
        parts = {each: part for each, part in parts.items() if part is not None}
        if host is not None:
            ready = None if host[2] else lambda: 0
            parts["host"] = decode.HostPages(host[0], host[1], ready)
        model = ModelConfig(weights_version=weights_version)
        config = Patient(name, patience_s, waiting_timeout_s, model=model, **given)
        super().__init__(pages, config, decode.DecodeParts(**parts))
        self.max_waiting = max_waiting

    add = _at(1, decode.DecodeScheduler, "add")
    pop_preallocated = _at(0, decode.DecodeScheduler, "pop_preallocated")
    pop_transferred = _at(0, decode.DecodeScheduler, "pop_transferred")
    pop_local = _at(0, decode.DecodeScheduler, "pop_local")
    computed = _at(2, decode.DecodeScheduler, "computed")
    save_state = _at(2, decode.DecodeScheduler, "save_state")
    save_states = _at(1, decode.DecodeScheduler, "save_states")
    append_many = _at(2, decode.DecodeScheduler, "append_many")
    reserve_many = _at(2, decode.DecodeScheduler, "reserve_many")
    finish = _at(1, decode.DecodeScheduler, "finish")
    retract = _at(1, decode.DecodeScheduler, "retract")
    fail = _at(2, decode.DecodeScheduler, "fail")

    def abort(  # type: ignore[override]
        self, rid: str, now_s: float, error: Exception | None = None,
        after: DeviceEvent | None = None,
    ) -> bool:  # fmt: skip
        self.now_s = now_s
        return self._cut_short_named(rid, DecodeState.ABORTED, error, after)

    def give_up_prefill(self, rid: str, error: Exception, now_s: float) -> bool:  # type: ignore[override]
        return self._give_up_prefill(rid, error, now_s)

    def refuse(self, request: Any, error: Any) -> None:
        super().refuse(request, str(error))

    def move_weights(
        self, weights_version: str, now_s: float, after: DeviceEvent | None = None
    ) -> None:
        self.now_s = now_s
        self.flush(weights_version, after)

    def host_ready(self, num_pages: int) -> None:
        assert self.host is not None
        self.host.ready(num_pages)


class PrefillScheduler(prefill.PrefillScheduler):
    def __init__(
        self, pages: PageManager, *, num_slots: int = 0, usable_prefix: UsablePrefix | None = None,
        max_aux_bytes: int = 64 << 10, weights_version: str = "", **given: Any,
    ) -> None:  # fmt: skip
        config = PrefillConfig(
            control=ControlConfig(max_aux_bytes=max_aux_bytes),
            model=ModelConfig(weights_version=weights_version), **given,
        )  # fmt: skip
        super().__init__(pages, config, num_slots, usable_prefix)

    add = _at(1, prefill.PrefillScheduler, "add")
    pop_bootstrapped = _at(0, prefill.PrefillScheduler, "pop_bootstrapped")
    send_chunk = _at(2, prefill.PrefillScheduler, "send_chunk")
    save_state = _at(2, prefill.PrefillScheduler, "save_state")
    pop_sent = _at(0, prefill.PrefillScheduler, "pop_sent")
    pop_failed = _at(0, prefill.PrefillScheduler, "pop_failed")
    fail = _at(2, prefill.PrefillScheduler, "fail")

    def abort(self, rid: str, now_s: float, error: Exception | None = None) -> bool:  # type: ignore[override]
        self.now_s = now_s
        return super().abort(rid)

    def move_weights(self, weights_version: str, now_s: float) -> None:
        self.now_s = now_s
        self.flush(weights_version)
