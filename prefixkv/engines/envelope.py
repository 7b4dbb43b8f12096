"""Hints in the versioned envelope that vLLM and SGLang hand to the scheduler with a request.

Its actions are open: each has a type, a version and a payload, and an engine ignores those that it
does not know. Read are `prefixkv-hints`, whose payload has the fields of `Hints`, and of the
orchestrators' drafts `kv.retain` (the longest `duration` of its directives, in seconds) and
`kv.deref` (the session has ended).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from prefixkv import Hints
from prefixkv.errors import RequestError

_NEXT_TURN: Final = {"ends": False, "returns_after": None}


class _Directive(msgspec.Struct):
    duration: float | None = None


class _Retain(msgspec.Struct):
    directives: list[_Directive] = []


def hints_of(
    actions: Iterable[Any] = (), session: str | None = None, fields: Mapping[str, Any] | None = None
) -> Hints:
    """Return the hints of a request: `fields` of `Hints` that came beside the envelope, over those
    of its `actions`, of which later ones count, and its `session`. Raises RequestError."""
    found: dict[str, Any] = {"session": session or ""}
    try:
        for one in (*map(_fields_of, actions), fields or {}):
            # Of the next turn the last word counts alone: the two fields exclude each other.
            found |= {} if one.keys().isdisjoint(_NEXT_TURN) else _NEXT_TURN
            found |= one
        return msgspec.convert(found, Hints)
    except msgspec.ValidationError as error:
        raise RequestError(f"hints: {str(error).replace('`$.', '`')}") from None


def _fields_of(action: Any) -> dict[str, Any]:
    kind, payload = action.action_type, action.payload or {}
    if action.action_version.partition(".")[0] != "1":
        return {}
    if kind == "prefixkv-hints":
        return msgspec.convert(payload, dict[str, Any])
    if kind == "kv.deref":
        return {"ends": True}
    if kind == "kv.retain":
        directives = msgspec.convert(payload, _Retain).directives
        longest = max((one.duration or 0.0 for one in directives), default=0.0)
        if longest > 0:
            after = next((one for one in (30, 120) if longest <= one), 600)
            return {"returns_after": after}
    return {}
