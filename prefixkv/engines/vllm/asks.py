"""Requests for a transfer, read from `kv_transfer_params`, and the digest that names a prompt on
both servers. All of it comes from a client or a router, so all of it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from prefixkv import Hints, prompt_digest
from prefixkv.engines.envelope import hints_of
from prefixkv.errors import RequestError
from prefixkv.spi import shortened, whole_number

_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAsk(Struct, frozen=True):
    """On decode: load from the prefill server at `prefill`. `nonce` is the secret of a room that
    prefill has drawn; null or "" where a router drew the room."""

    room: int
    prefill: _Name
    nonce: Annotated[str, Meta(max_length=64)] | None = None


class RoomSendAsk(Struct, frozen=True):
    """On prefill: send to the decode server named `decode`."""

    room: int
    decode: _Name


class DrawAsk(Struct, frozen=True):
    """On prefill: draw a room, and send to the decode server that opens it."""


Ask = LoadAsk | RoomSendAsk | DrawAsk


def ask_of(params: Any, is_producer: bool, is_consumer: bool) -> Ask | None:
    """Read what a request asks for in its `kv_transfer_params`; None: no transfer.

        {"do_remote_prefill": true, "room": 7, "prefill": "tcp://10.0.0.1:14579"}
        {"do_remote_prefill": true, "room": 7, "prefill": "tcp://10.0.0.1:14579", "nonce": "5f..."}
        {"do_remote_decode": true, "room": 7, "decode": "decode-0"}
        {"do_remote_decode": true}

    Raises RequestError for parameters that are malformed, contradict each other, or need a role
    that this server does not have.
    """
    # 1. No transfer. Null and missing flags are both common: routers fill in what they know.
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params is {repr(params)[:200]}, an object is needed")
    loads, sends = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if not loads and not sends:
        return None
    # 2. Contradictions, and roles that this server does not have.
    if loads and sends:
        raise RequestError("kv_transfer_params has do_remote_prefill and do_remote_decode")
    if not (is_consumer if loads else is_producer):
        flag, role = ("prefill", "kv_consumer") if loads else ("decode", "kv_producer")
        raise RequestError(f"kv_transfer_params has do_remote_{flag}; this server is no {role}")
    # 3. Prefill draws the room. Only if both are missing: half of a router's answer is an error.
    if sends and params.get("room") is None and params.get("decode") is None:
        return DrawAsk()  # routers of NixlConnector's kind add fields that are null
    # 4. A router has drawn the room: it must name the other server too.
    try:
        ask = convert(params, LoadAsk) if loads else convert(params, RoomSendAsk)
    except ValidationError as error:
        raise RequestError(f"kv_transfer_params: {error}") from None
    whole_number("room", ask.room, 0, 2**64)  # a bound beyond those of msgspec
    return ask


def hints_of_request(request: Any) -> Hints:
    """Return the hints in `kv_transfer_params` under "hints", where `prefixkv proxy` puts a
    client's, and those of vLLM's own envelope and `session_id`. Raises RequestError."""
    params, envelope = request.kv_transfer_params, request.kv_hints
    fields = params.get("hints") if isinstance(params, Mapping) else None
    if fields is not None and not isinstance(fields, Mapping):
        raise RequestError(f"hints is {repr(fields)[:200]}, an object is needed")
    return hints_of(envelope.actions if envelope is not None else (), request.session_id, fields)


def ends_in_media(request: Any) -> bool:
    """Return whether the last token of a prompt stands for a part of an image."""
    return any(
        one.mm_position.offset + one.mm_position.length >= request.num_prompt_tokens
        for one in request.mm_features
    )


def leave_out_last_token(request: Any, hash_size: int) -> None:
    """Take the last token of its prompt from a request that has computed nothing, and have it end
    with the first token that it generates. Where a layer keeps a state, that is then the state
    before the last token. `hash_size`: tokens of a block hash."""
    # A new list: requests in vLLM's own process may share the old one.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    # One that covers the last token would name a block whose last token is a generated one.
    del request.block_hashes[request.num_prompt_tokens // hash_size :]


def computes_all(request: Any) -> bool:
    """Return whether vLLM is to compute the whole prompt, for log-probabilities. It then ignores
    its prefix cache, and also a connector's answer, "not yet" included."""
    return bool(request.skip_reading_prefix_cache)


def digest_of(request: Any, nonce: str | None = None) -> bytes:
    """Return the digest of a prompt, in which both servers have to agree. Raises RequestError for a
    prompt of embeddings, or one that is still growing.

    It covers the tokens and all else that vLLM keys its own blocks by: LoRA adapter, cache salt,
    and the content and place of images. With a `nonce` it is that of a room that prefill has drawn:
    only a server that was given the nonce can prove it.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise RequestError("a prompt of embeddings cannot be transferred")
    if request.resumable:
        raise RequestError("a prompt that goes on cannot be transferred")
    namespace = namespace_of(request)
    # "offer" keeps the two kinds of digest apart: one of a router's room never opens an offer.
    tokens = np.asarray(request.prompt_token_ids, np.int32)
    return prompt_digest(tokens, ("offer", nonce, namespace) if nonce else namespace)


def namespace_of(request: Any) -> tuple[Any, ...] | None:
    """Return (adapter's name, salt, images), where an image is (hash, offset, length); None where
    the request has none of the three, which is the namespace of plain prompts."""
    lora = request.lora_request.lora_name if request.lora_request else None
    media = tuple(
        (shortened(str(one.identifier)), int(one.mm_position.offset), int(one.mm_position.length))
        for one in request.mm_features
    )
    # Salts and identifiers are the client's, of any length; `shortened` bounds what is kept.
    salt = shortened(request.cache_salt) if request.cache_salt else None
    return (lora, salt, media) if lora is not None or salt is not None or media else None
