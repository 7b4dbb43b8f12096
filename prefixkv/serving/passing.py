"""Parameters of proxied requests, decoded only as far as needed, and answers of servers, from which
a client gets only what is meant for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from starlette.responses import Response

from prefixkv.serving.failures import ApiError, failed, is_inner
from prefixkv.serving.http import decode_body, refused

ANSWER_BYTES: Final = 64 << 20
"""Most bytes of an answer that is not streamed, and of one event of a stream."""

BATCH: Final = 128
"""Most prompts of one request."""

_SHORT_BYTES: Final = 1024  # largest parameter that is decoded
_OTHER_BYTES: Final = 1 << 20  # of all parameters but those of `_LARGE`, names included
_REFUSAL_BYTES: Final = 64 << 10  # largest refusal that is passed on


_LARGE: Final = msgspec.defstruct("_Large", [
    (name, msgspec.Raw, msgspec.field(default=msgspec.Raw(b"")))
    for name in ("messages", "prompt", "prompt_embeds", "suffix", "tools", "functions",
                 "response_format", "structured_outputs", "documents", "logit_bias")
])  # fmt: skip


@dataclass(slots=True, eq=False)
class ServerAnswer:
    """Its head and first piece have arrived, the rest is still to be read."""

    # `stack` holds the connection; `close` gives it back, also where `rest` was not read.
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
        """Content-encoding of an answer that is compressed, though the proxy did not ask for it."""
        name = self.response.headers.get("content-encoding", "identity")
        return {} if name == "identity" else {"content-encoding": name}

    def whole(self, content: bytes) -> Response:
        return Response(content, self.status, self.packing, self.media_type)

    async def close(self) -> None:
        """What was not read is dropped."""
        await self.stack.aclose()


def parameters_of(body: bytes) -> dict[str, Any]:
    """Prompts, and values longer than 1 KiB, stay JSON (`msgspec.Raw`). Raises ApiError 400."""
    large = msgspec.structs.asdict(decode_body(body, _LARGE))
    # Bound the small parameters in sum before any is decoded: as Python objects a few bytes of JSON
    # take many times their size.
    others = len(body) - sum(len(bytes(raw)) for raw in large.values())
    if others > _OTHER_BYTES:
        raise ApiError(400, f"the parameters have {others} bytes, at most {_OTHER_BYTES} are taken")
    found: dict[str, Any] = {}
    for name, raw in decode_body(body, dict[str, msgspec.Raw]).items():
        text = bytes(raw)
        is_prompt = name in ("messages", "prompt")
        # A copy: the body itself, with the blanks in it, does not live as long as the answer.
        keeps = is_prompt or len(text) > _SHORT_BYTES
        found[name] = raw.copy() if keeps else decode_body(text, Any)
    return found


def prompts_of(prompt: msgspec.Raw) -> list[Any]:
    """Return the prompts: one text or list of tokens, or several of either. Raises ApiError if
    there are more than `BATCH` lists of tokens."""
    text = bytes(prompt)
    # The first character of the list tells the cases apart, without decoding it:
    # 1. "[": lists of tokens; counted by brackets first, since decoding them is the cost;
    # 2. a quote: texts;
    # 3. anything else, a single text or one list of tokens: one prompt.
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
    """Return bytes for the router, with which the next turn of the same chat begins."""
    # JSON without its last character: the closing bracket or quote is what the next turn replaces.
    return bytes(prompt)[:-1] if isinstance(prompt, msgspec.Raw) else str(prompt).encode()


def refusal_of(answer: ServerAnswer, asked: bytes) -> Response:
    """Pass the server's own words on if they are about the request, and hold no address, path or
    trace that the client did not send."""
    status, body = answer.status, answer.first
    detail = f"{answer.response.url} said {status}: {body[:1000]!r}"
    # A wrong key or a broken server is trouble between proxy and server: the client hears a number,
    # and the log has the rest.
    if status in (401, 403) or status >= 500:
        why = "the servers that were asked have failed"
        return failed(502 if status < 500 else status, why, detail, "worker_lost").response()
    # Only a JSON object is checked word by word; all else gets a general text.
    is_json = not answer.packing and len(body) <= _REFUSAL_BYTES
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        words = msgspec.json.decode(body) if is_json else None
        plain = msgspec.json.encode(words).decode()  # without escapes that hide anything
        if isinstance(words, dict) and not is_inner(plain, asked.decode("utf-8", "replace")):
            return Response(body, status, media_type=answer.media_type)
    return failed(status, "the request is refused", detail, "refused").response()
