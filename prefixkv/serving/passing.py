"""What a proxy passes on: parameters of requests, looked into no further than is needed, and
answers of servers, of which a client is told what is for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from starlette.responses import Response

from prefixkv.serving.failures import ApiError, failed, is_inner
from prefixkv.serving.http import decode_body
from prefixkv.serving.openai import refused

ANSWER_BYTES: Final = 64 << 20
"""Of an answer that is not streamed, and of an event of one that is."""

BATCH: Final = 128
"""Prompts of one request."""

_SHORT_BYTES: Final = 1024  # of a parameter that is looked into
_OTHER_BYTES: Final = 1 << 20  # of all parameters but the large ones, names included
_REFUSAL_BYTES: Final = 64 << 10  # of one that is passed on


class _Large(msgspec.Struct, frozen=True):
    """Parameters that may be large."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    suffix: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    functions: msgspec.Raw = msgspec.Raw(b"")
    response_format: msgspec.Raw = msgspec.Raw(b"")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    logit_bias: msgspec.Raw = msgspec.Raw(b"")


@dataclass(slots=True, eq=False)
class Answer:
    """What a server says: the head and the first piece are here, the rest is to come."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]
    stack: contextlib.AsyncExitStack

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def media_type(self) -> str:
        return str(self.response.headers.get("content-type", "application/json"))

    @property
    def packing(self) -> dict[str, str]:
        """The header of an answer that is packed, though that was not asked for."""
        name = self.response.headers.get("content-encoding", "identity")
        return {} if name == "identity" else {"content-encoding": name}

    def whole(self, content: bytes) -> Response:
        return Response(content, self.status, self.packing, self.media_type)

    async def close(self) -> None:
        await self.stack.aclose()


def parameters_of(body: bytes) -> dict[str, Any]:
    """A request's parameters; those of more than a kilobyte are JSON (`msgspec.Raw`). Raises
    ApiError 400."""
    large = msgspec.structs.asdict(decode_body(body, _Large))
    others = len(body) - sum(len(bytes(raw)) for raw in large.values())
    if others > _OTHER_BYTES:
        raise ApiError(400, f"the parameters have {others} bytes, at most {_OTHER_BYTES} are taken")
    found: dict[str, Any] = {}
    for name, raw in decode_body(body, dict[str, msgspec.Raw]).items():
        text = bytes(raw)
        is_prompt = name in ("messages", "prompt")
        found[name] = raw if is_prompt or len(text) > _SHORT_BYTES else decode_body(text, Any)
    return found


def prompts_of(prompt: msgspec.Raw) -> list[Any]:
    """The prompts of a request: a text, tokens, or several of either. Raises ApiError for too many
    lists of tokens."""
    text = bytes(prompt)
    first = text[1:65].lstrip()[:1] if text.startswith(b"[") else b""
    if first == b"[":  # no text is in it, so brackets are lists
        num = text.count(b"[") - 1
        if num > BATCH:
            raise refused("prompt", f"has {num} prompts, {BATCH} at most are taken")
        return list(decode_body(text, list[msgspec.Raw]))
    if first == b'"':
        with contextlib.suppress(ApiError):  # decode says what is wrong
            return list(decode_body(text, list[str]))
    return [prompt]


def data_of(prompt: Any) -> bytes:
    """A prompt as bytes such that the next turn's begin with this one's."""
    return bytes(prompt)[:-1] if isinstance(prompt, msgspec.Raw) else str(prompt).encode()


def refusal_of(answer: Answer, asked: bytes) -> Response:
    """What a client is told of a server's error: what it says itself, if that is of the request,
    and has no address, path or trace in it that the client did not send."""
    status, said = answer.status, answer.first
    detail = f"{answer.response.url} said {status}: {said[:1000]!r}"
    if status in (401, 403) or status >= 500:
        why = "the servers that were asked have failed"
        return failed(502 if status < 500 else status, why, detail, "worker_lost").response()
    is_json = not answer.packing and len(said) <= _REFUSAL_BYTES
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        words = msgspec.json.decode(said) if is_json else None
        plain = msgspec.json.encode(words).decode()  # without escapes that hide anything
        if isinstance(words, dict) and not is_inner(plain, asked.decode("utf-8", "replace")):
            return Response(said, status, media_type=answer.media_type)
    return failed(status, "the request is refused", detail, "refused").response()
