"""What clients say of their sessions, in the fields and the header that they send it in."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from prefixkv import Hints
from prefixkv.serving.failures import refused
from prefixkv.spi import MAX_SESSION_CHARS

HEADER: Final = "X-Session-Id"
"""A session's name where the body has none; vLLM reads it too."""

_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]


class SessionFields(msgspec.Struct, kw_only=True):
    """The fields of a body that are about its session. `kv_hints` has the fields of `Hints`; those
    that it does not know, of later versions, are ignored. `session_id` is vLLM's and SGLang's, the
    last two are OpenAI's."""

    kv_hints: Hints | None = None
    session_id: _Session | None = None
    prompt_cache_key: _Session | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def hints(self, request: Request) -> Hints:
        """Return all that is said, the most precise word first. Raises ApiError 400.

        "24h" stands for the longest class, and counts only where `kv_hints` says no more: nothing
        is kept for 24 hours. "in_memory" asks for what is done anyway.
        """
        found, header = self.kv_hints or Hints(), request.headers.get(HEADER, "")
        if found.ends and found.returns_after is not None:
            raise refused("kv_hints.returns_after", "has to be null where kv_hints.ends is true")
        if len(header) > MAX_SESSION_CHARS:
            raise refused(HEADER, f"has {len(header)} characters, at most {MAX_SESSION_CHARS}")
        session = found.session or self.session_id or header or self.prompt_cache_key or ""
        returns_after = found.returns_after
        if self.prompt_cache_retention == "24h" and found.continues is None:
            returns_after = 600
        return msgspec.structs.replace(found, session=session, returns_after=returns_after)


class AnnouncedTurn(msgspec.Struct, forbid_unknown_fields=True):
    """A body of /v1/sessions/NAME: the next turn of the session comes soon."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
