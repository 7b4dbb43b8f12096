"""Bodies as a proxy passes them on: parameters, decoded only as far as needed, and answers, from
which a client gets only what is meant for it.

vLLM reports the cached tokens of a prompt if it was started with `--enable-prompt-tokens-details`.
In an answer that is not streamed prefixkv's connector reports them too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import msgspec
from starlette.responses import Response

from prefixkv.serving.failures import ApiError, failed, is_inner, refused
from prefixkv.serving.hints import SessionFields
from prefixkv.serving.http import decode_body

BATCH: Final = 128
"""Most prompts of one request."""

PARAMS: Final = "kv_transfer_params"
_PARAMETERS: Final = 1024
_DATA: Final = b"data: "


class Steering(SessionFields, kw_only=True):
    """The parameters that a proxy looks at itself."""

    stream: bool | None = None
    n: int | None = None
    # For traces.
    model: Any = None
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    # By which vLLM computes a prompt on decode: see `computes_alone`.
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"null")
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = 0

    def computes_alone(self, is_chat: bool) -> bool:
        """Return whether vLLM computes this prompt on decode, whatever its cache holds. Beams are
        separate requests without our parameters, and log-probabilities of a prompt need all of it
        computed; a chat with `echo` computes them unless `top_logprobs` is null."""
        number = self.top_logprobs if is_chat else self.logprobs
        return bool(
            self.use_beam_search
            or self.prompt_logprobs is not None
            or (self.echo and number is not None)
            or bytes(self.prompt_embeds) != b"null"
        )


def parameters_of(body: bytes) -> tuple[dict[str, Any], Steering]:
    """Return all members as JSON, and those that steer the proxy. Raises ApiError 400."""
    members = decode_body(body, dict[str, msgspec.Raw])
    if len(members) > _PARAMETERS:
        raise ApiError(400, f"there are {len(members)} parameters, {_PARAMETERS} at most are taken")
    # Copies: the body itself, with the blanks in it, does not live as long as the answer.
    return {name: raw.copy() for name, raw in members.items()}, decode_body(body, Steering)


def prompts_of(prompt: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the prompts: one text or list of tokens, or several of either. Raises ApiError if
    there are more than `BATCH`."""
    text, prompts = bytes(prompt), [prompt]
    first = text[1:65].lstrip()[:1] if text.startswith(b"[") else b""
    # In lists of tokens each bracket is a prompt: counted first, since decoding them is the cost.
    num = text.count(b"[") - 1 if first == b"[" else 1
    if first in (b"[", b'"') and num <= BATCH:
        prompts = decode_body(text, list[msgspec.Raw])
        num = len(prompts)
    if num > BATCH:
        raise refused("prompt", f"has {num} prompts, {BATCH} at most are taken")
    return prompts


class _RefusedError(ApiError):
    """What a server said of a request, in its own words."""

    def __init__(self, status: int, answer: bytes) -> None:
        super().__init__(status, "the request is refused")
        self._answer = answer

    def response(self) -> Response:
        return Response(self._answer, self.status, media_type="application/json")


def refusal_of(url: str, status: int, answer: bytes, asked: bytes) -> ApiError:
    """Make the error of a server's own words, if they are about the request, and hold no address,
    path or trace that the client did not send."""
    detail = f"{url} said {status}: {answer[:1000]!r}"
    # A wrong key or a broken server is trouble between proxy and server.
    if status in (401, 403) or status >= 500:
        why = "the servers that were asked have failed"
        return failed(502 if status < 500 else status, why, detail, "worker_lost")
    if words := _decoded(answer):
        plain = msgspec.json.encode(words).decode()  # without escapes that hide anything
        if not is_inner(plain, asked.decode("utf-8", "replace")):
            return _RefusedError(status, answer)
    return failed(status, "the request is refused", detail, "refused")


def _decoded(answer: bytes) -> dict[str, Any]:
    """Return an answer or event as a JSON object; empty if it is none."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _object(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object; empty if it is none: another server's words."""
    found = parsed.get(name)
    return found if isinstance(found, dict) else {}


def retold(answer: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Return an answer or event with the cached tokens in its usage, `cached` if given, and without
    what the connector adds for the proxy alone; and the tokens that it counts, by their names in
    the request log. An answer without usage is returned as it is."""
    parsed = _decoded(answer)
    usage, ours = _object(parsed, "usage"), _object(_object(parsed, PARAMS), "prefixkv")
    if not usage:
        return answer, {}
    details = _object(usage, "prompt_tokens_details")
    known = (cached, ours.get("cached_tokens"), details.get("cached_tokens"))
    cached = next((one for one in known if type(one) is int), None)
    # The room and addresses in them are not a client's; an error report is.
    if PARAMS in parsed and "error" not in ours:
        parsed[PARAMS] = None
    counts = {"prompt_tokens": usage.get("prompt_tokens"),
              "output_tokens": usage.get("completion_tokens", 0)}  # fmt: skip
    if cached is not None:
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        counts["decode_hit_tokens"] = cached
    is_counted = all(type(count) is int for count in counts.values())
    return msgspec.json.encode(parsed), counts if is_counted else {}


def retold_events(events: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Do as `retold` with whole events. The last count holds: with `continuous_usage_stats` each is
    of the answer so far."""
    lines, counts = events.split(b"\n"), dict[str, int]()
    for number, line in enumerate(lines):
        # Nearly all lines are passed on without decoding.
        if line.startswith(_DATA) and b'"prompt_tokens' in line:
            told, counted = retold(line[len(_DATA) :], cached)
            lines[number] = _DATA + told
            counts |= counted
    return b"\n".join(lines), counts


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
