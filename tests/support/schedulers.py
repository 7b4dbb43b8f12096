"""Schedulers without a node, made of settings by their names."""

from typing import Any, TypeVar

import prefixkv.assembly  # noqa: F401 - its parts, also where no conftest is loaded
from prefixkv.config import ControlConfig, DecodeConfig, ModelConfig, PrefillConfig
from prefixkv.decode.scheduler import DecodeParts, DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedScheduler
from prefixkv.prefill.scheduler import PrefillScheduler

AGES_S = 1e9
_MODEL = ModelConfig(weights_version="")
Kind = TypeVar("Kind", bound=PagedScheduler[Any, Any])


def timed_by(clock: Any, kind: type[Kind]) -> type[Kind]:
    """These schedulers, whose time is always the clock's `now_s`."""
    return type(kind.__name__, (kind,), {"now_s": property(lambda _: clock.now_s)})


def decode_scheduler(
    pages: PageManager, kind: type[DecodeScheduler] = DecodeScheduler, **given: Any
) -> DecodeScheduler:
    """Of parts and settings; by default nothing waits too long. `sources` is the rule of own
    compute, `host` pages of host memory."""
    parts = {name: given.pop(name) for name in DecodeParts.__dataclass_fields__ if name in given}
    rule, host = given.pop("sources", None), given.pop("host", None)
    if rule is not None:
        given["compute"] = rule.config
    parts["organs"] = {"rule": rule, "host_memory": host}
    patience = {"patience_s": AGES_S, "control": ControlConfig(longest_wait_s=AGES_S)}
    return kind(pages, DecodeConfig(**{"model": _MODEL} | patience | given), DecodeParts(**parts))


def host_of(scheduler: DecodeScheduler) -> Any:
    """Its tier of host memory, or None."""
    source = scheduler.sources.get("loaded")
    return None if source is None else source.tier


def prefill_scheduler(
    pages: PageManager, kind: type[PrefillScheduler] = PrefillScheduler, **given: Any
) -> PrefillScheduler:
    more = {name: given.pop(name) for name in ("num_slots", "usable_prefix") if name in given}
    return kind(pages, PrefillConfig(**{"model": _MODEL} | given), **more)
