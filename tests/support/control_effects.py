"""What a control object does about an input, where it may not raise."""

from __future__ import annotations

from typing import Any

from prefixkv.control.effects import Raised


def effects_of(control: Any, what: Any, now_s: float) -> list[Any]:
    """Return the effects. Raises what taking the input has raised."""
    effects: list[Any] = control.on(what, now_s)
    for effect in effects:
        if isinstance(effect, Raised):
            raise effect.error
    return effects
