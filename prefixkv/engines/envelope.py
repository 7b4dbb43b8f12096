"""Hints in the versioned envelope that vLLM and SGLang hand to the scheduler with a request.

Its actions are open: each has a type, a version and a payload, and an engine ignores those that it
does not know. Read are `prefixkv-hints`, whose payload has the fields of `Hints`, and of the
orchestrators' drafts `kv.retain` (the longest `duration` of its directives, in seconds) and
`kv.deref` (the session has ended).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from prefixkv import Hints
from prefixkv.errors import RequestError


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
        for action in actions:
            found |= _fields_of(action.action_type, action.action_version, action.payload or {})
        return msgspec.convert(found | dict(fields or {}), Hints)
    except msgspec.ValidationError as error:
        raise RequestError(f"hints: {str(error).replace('`$.', '`')}") from None


def _fields_of(kind: str, version: str, payload: Any) -> dict[str, Any]:
    if version.partition(".")[0] != "1":
        return {}
    if kind == "prefixkv-hints":
        return dict(msgspec.convert(payload, dict[str, Any]))
    if kind == "kv.deref":
        return {"ends": True, "returns_after": None}
    if kind == "kv.retain":
        directives = msgspec.convert(payload, _Retain).directives
        longest = max((one.duration or 0.0 for one in directives), default=0.0)
        if longest > 0:
            after = next((one for one in (30, 120) if longest <= one), 600)
            return {"ends": False, "returns_after": after}
    return {}
