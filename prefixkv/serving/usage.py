"""`usage` of answers that a proxy passes on: how many of a prompt's tokens decode had.

vLLM says so where it was started with `--enable-prompt-tokens-details`. In an answer that is not
streamed prefixkv's connector says it too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import msgspec

from prefixkv.serving.streams import TooMuchError

_EVENT_BYTES: Final = 16 << 20
_DATA: Final = b"data: "


def cached_tokens(answer: bytes) -> int | None:
    """Of a prompt, the tokens that were cached on decode; None where the answer does not say."""
    said = _decoded(answer)
    return None if said is None else _cached(said)


def of_answer(answer: bytes, cached: int | None) -> bytes:
    """An answer whose usage says what was cached: `cached`, or what the connector says. What the
    connector says for the proxy alone is left out. As it is where it has no usage."""
    said = _decoded(answer)
    if said is None or not isinstance(said.get("usage"), dict):
        return answer
    known = _cached(said) if cached is None else cached
    params = said.get("kv_transfer_params")
    if isinstance(params, dict) and "error" not in (params.get("prefixkv") or {}):
        said["kv_transfer_params"] = None
    if known is not None:
        _set(said["usage"], known)
    return msgspec.json.encode(said)


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same stream in whole events. Of one that breaks off within an event the rest is left out:
    what is said behind it would be a part of that event. Raises TooMuchError for one that does not
    end."""
    rest = b""
    async for piece in pieces:
        events, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield events + end
        if len(rest) > _EVENT_BYTES:
            raise TooMuchError(f"an event of more than {_EVENT_BYTES} bytes")
    if rest:
        yield rest


async def of_stream(events: AsyncIterator[bytes], cached: int) -> AsyncGenerator[bytes, None]:
    """The same events (`whole_events`), those that have details of usage with `cached` in them."""
    async for event in events:
        yield b"\n".join(_of_line(line, cached) for line in event.split(b"\n"))


def _of_line(line: bytes, cached: int) -> bytes:
    if not line.startswith(_DATA) or b"prompt_tokens_details" not in line:
        return line
    said = _decoded(line[len(_DATA) :])
    if said is None or not isinstance((said.get("usage") or {}).get("prompt_tokens_details"), dict):
        return line
    _set(said["usage"], cached)
    return _DATA + msgspec.json.encode(said)


def _set(usage: dict[str, Any], cached: int) -> None:
    details = usage.get("prompt_tokens_details") or {}
    usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}


def _cached(said: dict[str, Any]) -> int | None:
    """The connector's word first: it is there whatever the server was started with."""
    for found in (
        ((said.get("kv_transfer_params") or {}).get("prefixkv") or {}).get("cached_tokens"),
        ((said.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens"),
    ):
        if isinstance(found, int):
            return found
    return None


def _decoded(answer: bytes) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return said if isinstance(said, dict) else None
