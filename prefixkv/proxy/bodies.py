"""Bodies as a proxy passes them on: parameters, decoded only as far as needed, and answers, from
which a client gets only what is meant for it.

vLLM reports the cached tokens of a prompt if it was started with `--enable-prompt-tokens-details`.
In an answer that is not streamed prefixkv's connector reports them too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import msgspec
from starlette.responses import Response

from prefixkv.serving.failures import ApiError, failed, is_inner, refused
from prefixkv.serving.http import decode_body

BATCH: Final = 128
"""Most prompts of one request."""

_PARAMETERS: Final = 1024
_SHORT_BYTES: Final = 1024  # largest parameter that is decoded
_REFUSAL_BYTES: Final = 64 << 10  # largest refusal that is passed on
_DATA: Final = b"data: "
PARAMS: Final = "kv_transfer_params"


def parameters_of(body: bytes) -> dict[str, Any]:
    """Prompts, and values longer than 1 KiB, stay JSON (`msgspec.Raw`). Raises ApiError 400."""
    members = decode_body(body, dict[str, msgspec.Raw])
    if len(members) > _PARAMETERS:
        raise ApiError(400, f"there are {len(members)} parameters, {_PARAMETERS} at most are taken")
    found: dict[str, Any] = {}
    for name, raw in members.items():
        keeps = name in ("messages", "prompt") or len(bytes(raw)) > _SHORT_BYTES
        # A copy: the body itself, with the blanks in it, does not live as long as the answer.
        found[name] = raw.copy() if keeps else decode_body(bytes(raw), Any)
    return found


def prompts_of(prompt: msgspec.Raw) -> list[Any]:
    """Return the prompts: one text or list of tokens, or several of either. Raises ApiError if
    there are more than `BATCH`."""
    text = bytes(prompt)
    first = text[1:65].lstrip()[:1] if text.startswith(b"[") else b""
    prompts: list[Any] = [prompt]
    if first == b"[":
        # No text is in it, so brackets are lists: counted first, since decoding them is the cost.
        if text.count(b"[") - 1 <= BATCH:
            return list(decode_body(text, list[msgspec.Raw]))
        prompts = [prompt] * (text.count(b"[") - 1)
    elif first == b'"':
        with contextlib.suppress(ApiError):  # decode says what is wrong
            prompts = list(decode_body(text, list[str]))
    if len(prompts) > BATCH:
        raise refused("prompt", f"has {len(prompts)} prompts, {BATCH} at most are taken")
    return prompts


def data_of(prompt: Any) -> bytes:
    """Return bytes for the router, with which the next turn of the same chat begins."""
    # JSON without its last character: the closing bracket or quote is what the next turn replaces.
    return bytes(prompt)[:-1] if isinstance(prompt, msgspec.Raw) else str(prompt).encode()


def refusal_of(url: str, status: int, answer: bytes, asked: bytes) -> Response:
    """Pass the server's own words on if they are about the request, and hold no address, path or
    trace that the client did not send."""
    detail = f"{url} said {status}: {answer[:1000]!r}"
    # A wrong key or a broken server is trouble between proxy and server.
    if status in (401, 403) or status >= 500:
        why = "the servers that were asked have failed"
        return failed(502 if status < 500 else status, why, detail, "worker_lost").response()
    words = decoded(answer) if len(answer) <= _REFUSAL_BYTES else None
    if words is not None:
        plain = msgspec.json.encode(words).decode()  # without escapes that hide anything
        if not is_inner(plain, asked.decode("utf-8", "replace")):
            return Response(answer, status, media_type="application/json")
    return failed(status, "the request is refused", detail, "refused").response()


def decoded(answer: bytes) -> dict[str, Any] | None:
    """Return an answer or event as a JSON object; None if it is none."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def cached_tokens(answer: dict[str, Any] | None) -> int | None:
    """Return how many of the prompt's tokens decode had cached; None if the answer does not say."""
    ours = _object(_object(answer, PARAMS), "prefixkv").get("cached_tokens")
    details = _object(_object(answer, "usage"), "prompt_tokens_details")
    found = details.get("cached_tokens") if ours is None else ours
    return found if type(found) is int else None


def _object(parsed: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """Return a member that is an object; empty if it is none: another server's words."""
    found = (parsed or {}).get(name)
    return found if isinstance(found, dict) else {}


def retold(answer: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Return an answer with the cached tokens in its usage, `cached` if given, and without what the
    connector adds for the proxy alone; and the tokens that it counts, by their names in the request
    log. An answer without usage is returned as it is."""
    parsed = decoded(answer)
    usage = _object(parsed, "usage")
    if parsed is None or not usage:
        return answer, {}
    known = cached_tokens(parsed) if cached is None else cached
    # The room and addresses in them are not a client's; an error report is.
    if PARAMS in parsed and "error" not in _object(_object(parsed, PARAMS), "prefixkv"):
        parsed[PARAMS] = None
    if known is not None:
        details = _object(usage, "prompt_tokens_details")
        usage["prompt_tokens_details"] = {**details, "cached_tokens": known}
    return msgspec.json.encode(parsed), _counts(usage, known)


def retold_events(events: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Do as `retold` with whole events. The last count holds: with `continuous_usage_stats` each is
    of the answer so far."""
    counts: dict[str, int] = {}
    # Cheap tests first: nearly all lines are passed on without decoding.
    if b'"prompt_tokens' not in events:
        return events, counts
    lines = events.split(b"\n")
    for number, line in enumerate(lines):
        if not line.startswith(_DATA) or b'"prompt_tokens' not in line:
            continue
        parsed = decoded(line[len(_DATA) :])
        usage = _object(parsed, "usage")
        details = _object(usage, "prompt_tokens_details")
        if cached is not None and details:
            details["cached_tokens"] = cached
            lines[number] = _DATA + msgspec.json.encode(parsed)
        counts |= _counts(usage, cached_tokens(parsed))
    return b"\n".join(lines), counts


def _counts(usage: dict[str, Any], cached: int | None) -> dict[str, int]:
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "output_tokens": usage.get("completion_tokens", 0),
    } | ({} if cached is None else {"decode_hit_tokens": cached})
    return counts if all(type(count) is int for count in counts.values()) else {}


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream into whole server-sent events. If it breaks off by an exception within an event,
    that rest is left out: an error event sent after it would be read as part of it."""
    rest = b""
    async for piece in pieces:
        events, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield events + end
    # A stream that ends in order may lack the last blank line.
    if rest:
        yield rest
