"""`usage` of answers that a proxy passes on: how many of a prompt's tokens decode had cached.

vLLM reports it if it was started with `--enable-prompt-tokens-details`. In an answer that is not
streamed prefixkv's connector reports it too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import msgspec

from prefixkv.serving.streams import TooMuchError

_EVENT_BYTES: Final = 16 << 20
_DATA: Final = b"data: "
_COUNTED: Final = b'"prompt_tokens"'


def cached_tokens(answer: bytes) -> int | None:
    """Return how many of the prompt's tokens decode had cached; None if the answer does not say."""
    parsed = _decoded(answer)
    return None if parsed is None else _cached(parsed)


def of_answer(answer: bytes, cached: int | None) -> bytes:
    """Return an answer with the cached tokens in its usage: `cached` if given, else what the
    connector reports. Parameters that the connector adds for the proxy alone are removed. An answer
    without usage is returned as it is."""
    parsed = _decoded(answer)
    if parsed is None or not isinstance(parsed.get("usage"), dict):
        return answer
    known = _cached(parsed) if cached is None else cached
    params = parsed.get("kv_transfer_params")
    # The room and addresses in them are not a client's; an error report is.
    if isinstance(params, dict) and "error" not in (params.get("prefixkv") or {}):
        parsed["kv_transfer_params"] = None
    if known is not None:
        _set(parsed["usage"], known)
    return msgspec.json.encode(parsed)


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream into whole server-sent events. If it breaks off by an exception within an event,
    that rest is left out: an error event sent after it would be read as part of it. Raises
    TooMuchError for an event longer than `_EVENT_BYTES`."""
    rest = b""
    async for piece in pieces:
        events, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield events + end
        if len(rest) > _EVENT_BYTES:
            raise TooMuchError(f"an event of more than {_EVENT_BYTES} bytes")
    # A stream that ends in order may lack the last blank line: its rest is passed on.
    if rest:
        yield rest


async def of_stream(events: AsyncIterator[bytes], cached: int) -> AsyncGenerator[bytes, None]:
    """Yield whole events, with `cached` in each that has details of usage."""
    async for event in events:
        yield b"\n".join(_of_line(line, cached) for line in event.split(b"\n"))


def _of_line(line: bytes, cached: int) -> bytes:
    # Cheap test first: all lines but one or two of a stream are passed on without decoding.
    if not line.startswith(_DATA) or b"prompt_tokens_details" not in line:
        return line
    parsed = _decoded(line[len(_DATA) :]) or {}
    if not isinstance(_part(parsed, "usage").get("prompt_tokens_details"), dict):
        return line
    _set(parsed["usage"], cached)
    return _DATA + msgspec.json.encode(parsed)


def _set(usage: dict[str, Any], cached: int) -> None:
    """Keep the usage's other details."""
    details = usage.get("prompt_tokens_details") or {}
    usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}


def _cached(parsed: dict[str, Any]) -> int | None:
    """The connector's report comes first: it comes whatever options the server was started with."""
    for found in (
        _part(_part(parsed, "kv_transfer_params"), "prefixkv").get("cached_tokens"),
        _part(_part(parsed, "usage"), "prompt_tokens_details").get("cached_tokens"),
    ):
        if isinstance(found, int):
            return found
    return None


def _part(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a field that is an object; empty if it is none: another server's words."""
    found = parsed.get(name)
    return found if isinstance(found, dict) else {}


def _decoded(answer: bytes, kind: Any = dict[str, Any]) -> Any:
    """Return an answer or event as a JSON object; None if it is none."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class _WithUsage(msgspec.Struct):
    """All else is skipped, and not built: an answer may have 64 MiB."""

    usage: dict[str, Any] | None = None


def counts_of(answer: bytes) -> dict[str, int]:
    """Return the tokens that an answer, or an event, reports, by their names in the request log."""
    report = _decoded(answer, _WithUsage)
    if report is None or not (usage := report.usage):
        return {}
    counts = {
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens", 0),
    }
    if (cached := _cached({"usage": usage})) is not None:
        counts["decode_hit_tokens"] = cached
    return counts if all(type(count) is int for count in counts.values()) else {}


def counts_of_events(events: bytes) -> dict[str, int]:
    """The last report holds: with `continuous_usage_stats` each is of the answer so far."""
    counts: dict[str, int] = {}
    # Cheap tests first, as in `_of_line`.
    if _COUNTED in events:
        for line in events.split(b"\n"):
            if line.startswith(_DATA) and _COUNTED in line:
                counts |= counts_of(line[len(_DATA) :])
    return counts
