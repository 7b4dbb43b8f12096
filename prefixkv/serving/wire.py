"""Messages between a front, a decode worker and a prefill worker, as JSON over HTTP.

| to | method and path | body | answer |
| --- | --- | --- | --- |
| any worker | GET /info | | a `WorkerInfo`; 503 while it drains |
| any worker | GET /events | | frames: cache events, see `feed` |
| any worker | POST /audit | | 204 if every invariant of its node holds; slow |
| any worker | GET /lost | | a `LostPeer` for each lost peer that it holds something for |
| any worker | POST /fence | a `FenceRequest` | 202 |
| decode | POST /announce | an `Announcement` | 202, also of a session that is unknown there |
| decode | POST /generate | an `Ask` | lines: `TokenEvent`s; an empty line is a sign of life |
| prefill | POST /jobs | a `PrefillJob`, whose `namespace` is a salt | 202 |

Closing a connection ends what was asked on it. Errors have OpenAI's form.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from prefixkv import Namespace
from prefixkv.engines.hf.requests import AnswerToken, Generate, Name

LIFE_SIGN_S: Final = 2.0
"""Longest pause of a stream: it then sends an empty line or frame."""

SILENCE_S: Final = 30.0
"""Time without a byte after which a stream counts as lost."""


# Descriptions: what a worker says of itself.
class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as others need to know it.

    `url` is for requests, `status_url` for health and metrics. `endpoint` is the address of a
    prefill worker's node. `model` is the model's name for people, `identity` what its KV depends
    on. `context` is the most tokens of a request, prompt and answer together. `life` is its node's
    incarnation in hexadecimal, another one each time the worker starts. `alone`: a decode worker
    that also answers without a prefill worker.
    """

    role: Literal["prefill", "decode"]
    name: str
    url: str
    status_url: str
    endpoint: str
    model: str
    identity: str
    page_size: int
    num_pages: int
    context: int
    vocab_size: int
    life: str
    pid: int
    alone: bool = False


# Requests: the engine's own structs.
class Ask(Generate, frozen=True):
    """With the URL of the prefill worker at `prefill`; without both, the decode worker computes the
    prompt itself, if it is one that is `alone`. `namespace` is a salt: requests with different
    salts share no KV."""

    prefill_url: Name = ""


class Announcement(msgspec.Struct, frozen=True):
    """The next turn of a session comes soon. `namespace` is a salt."""

    session: Name
    namespace: Name = ""


class TokenEvent(AnswerToken, frozen=True, omit_defaults=True):
    """An `Output` of the engine; `error` begins with its class."""

    error: str = ""


# Lives that are over.
class FenceRequest(msgspec.Struct, frozen=True):
    """This life of a worker is certainly dead, so what is held for it may be used again."""

    name: str
    life: str


class LostPeer(FenceRequest, frozen=True):
    """A peer that is suspect or dead (`lost_peers` of a node). `held` counts the pages of a decode
    worker that it may still write, or the rooms of a prefill worker that it is in."""

    why: str
    held: int


def salt_digest(salt: str) -> str:
    """Return 32 characters that stand for a client's salt in messages between front and workers.
    They are kept as long as KV of that salt is; the salt itself may be long, and is the client's
    secret.

    >>> len(salt_digest("tenant 1")), salt_digest("tenant 1") == salt_digest("tenant 2")
    (32, False)
    """
    return blake2b(salt.encode(), digest_size=16).hexdigest()


def namespace_of(salt: Any) -> Namespace | None:
    return Namespace(salt=salt) if salt else None


def part_rid(rid: str, number: int) -> str:
    """Return the id under which a part of a front's request goes over the wire: one of its prompts,
    and of that one attempt.

    >>> part_rid("9f3a-1", 0), part_rid(part_rid("9f3a-1", 2), 0)
    ('9f3a-1#0', '9f3a-1#2#0')
    """
    return f"{rid}#{number}"


def front_rid(rid: str) -> str:
    """Return the front's id of a request on the wire, out of its id on a worker's node; an id that
    no front has made is returned as it is.

    >>> front_rid("9f3a-1#0/2"), front_rid("decode-0/9f3a-1#2#0/2.1"), front_rid("mine")
    ('9f3a-1', '9f3a-1', 'mine')
    """
    # A decode node names requests "RID/sample", and its jobs "worker/RID/sample.generation".
    asked, _, _ = rid.rpartition("#")
    if not asked:
        return rid
    asked = asked.rpartition("/")[2]
    request, _, prompt = asked.rpartition("#")
    # A client's own id may have a "#" too, but never a number alone behind its last one.
    return request if request and prompt.isdecimal() else asked
