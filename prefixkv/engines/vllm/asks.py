"""What the `kv_transfer_params` of a request ask for, and what names its prompt on both servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixkv import prompt_digest
from prefixkv.spi import RequestError, shortened, whole_number

MAX_NAME_CHARS = 256


MAX_NONCE_CHARS = 64


@dataclass(frozen=True, slots=True)
class LoadAsk:
    """Decode: the KV comes from the prefill server at the address `prefill`. `nonce` is the secret
    of a room that prefill has drawn; "": the room was drawn by a router."""

    room: int
    prefill: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class SendAsk:
    """Prefill: the KV goes to the decode server of the name `decode`."""

    room: int
    decode: str


@dataclass(frozen=True, slots=True)
class OfferAsk:
    """Prefill: draw a room, and send the KV to the decode server that opens it."""


Ask = LoadAsk | SendAsk | OfferAsk


def ask_of(params: Any, is_producer: bool, is_consumer: bool) -> Ask | None:
    """What a request asks for; None: nothing.

        {"do_remote_prefill": true, "room": 7, "prefill": "tcp://10.0.0.1:14579"}
        {"do_remote_prefill": true, "room": 7, "prefill": "tcp://10.0.0.1:14579", "nonce": "5f..."}
        {"do_remote_decode": true, "room": 7, "decode": "decode-0"}
        {"do_remote_decode": true}

    Raises RequestError for what cannot be meant, or not here.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params is {repr(params)[:200]}, an object is needed")
    loads, sends = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if not loads and not sends:
        return None
    if loads and sends:
        raise RequestError("kv_transfer_params has do_remote_prefill and do_remote_decode")
    what, key = ("do_remote_prefill", "prefill") if loads else ("do_remote_decode", "decode")
    if not (is_consumer if loads else is_producer):
        role = "kv_consumer" if loads else "kv_producer"
        raise RequestError(f"kv_transfer_params has {what}; this server is no {role}")
    if sends and params.get("room") is None and params.get("decode") is None:
        return OfferAsk()  # routers of NixlConnector's kind add fields that are null
    if params.get("room") is None:
        raise RequestError("kv_transfer_params has no room")
    room, where = _room(params["room"]), _name(key, params.get(key))
    return LoadAsk(room, where, _nonce(params.get("nonce"))) if loads else SendAsk(room, where)


def _room(room: Any) -> int:
    return whole_number("room", room, 0, 2**64)


def _name(key: str, where: Any) -> str:
    if not isinstance(where, str) or not 1 <= len(where) <= MAX_NAME_CHARS:
        raise RequestError(
            f"{key} in kv_transfer_params is {repr(where)[:200]}, a string of 1 to "
            f"{MAX_NAME_CHARS} characters is needed"
        )
    return where


def _nonce(nonce: Any) -> str:
    if nonce is None:
        return ""
    if not isinstance(nonce, str) or len(nonce) > MAX_NONCE_CHARS:
        raise RequestError(
            f"nonce in kv_transfer_params is {str(nonce)[:200]!r}, a string of at most "
            f"{MAX_NONCE_CHARS} characters is needed"
        )
    return nonce


def computes_all(request: Any) -> bool:
    """Whether vLLM computes the whole prompt whatever its cache has, and whatever a connector says
    of it, "not yet" included: for log-probabilities of the prompt."""
    return bool(request.skip_reading_prefix_cache)


def digest_of(request: Any, nonce: str = "") -> bytes:
    """What both servers have to agree on: the prompt's tokens, and all else that vLLM keys its own
    blocks by: LoRA adapter, cache salt, and the content and place of images. With a `nonce` the
    digest is that of a room that prefill has drawn: only who knows the nonce can prove it.

    Raises RequestError for a prompt that cannot be named so.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise RequestError("a prompt of embeddings cannot be transferred")
    if request.resumable:
        raise RequestError("a prompt that goes on cannot be transferred")
    namespace = namespace_of(request)
    tokens = np.asarray(request.prompt_token_ids, np.int32)
    return prompt_digest(tokens, ("offer", nonce, namespace) if nonce else namespace)


def namespace_of(request: Any) -> tuple[Any, ...] | None:
    """LoRA adapter by name, salt, and (hash, offset, length) of each image."""
    lora = request.lora_request.lora_name if request.lora_request else None
    media = tuple(
        (shortened(str(one.identifier)), int(one.mm_position.offset), int(one.mm_position.length))
        for one in request.mm_features
    )
    salt = shortened(request.cache_salt) if request.cache_salt else None
    return (lora, salt, media) if lora is not None or salt is not None or media else None
