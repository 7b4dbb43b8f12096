"""What a front, a decode worker and a prefill worker say to each other, as JSON over HTTP.

| to | method and path | body | answer |
| --- | --- | --- | --- |
| any worker | GET /info | | a `WorkerInfo` |
| any worker | GET /events | | frames: cache events, see `feed` |
| any worker | POST /audit | | 204 where every law of its node holds; slow |
| any worker | GET /lost | | a `Lost` for each lost peer that it holds something for |
| any worker | POST /fence | a `Fence` | 202 |
| decode | POST /generate | an `Ask` | lines: `Said`s; an empty line says that it lives |
| prefill | POST /jobs | a `Job` | 202 |
| prefill | POST /abort | an `Abort` | 202 |

The end of a connection ends what was asked on it. An error is in OpenAI's form.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final, Literal

import msgspec

from prefixkv import Namespace

LIFE_SIGN_S: Final = 2.0
"""A stream that has nothing to say says an empty line so often."""

SILENCE_S: Final = 30.0
"""One that has not said anything for so long is over."""


Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""What a worker keeps of a request as it is, for as long as that lives, or KV of it."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as others need to know it.

    `url` is where it is asked, `status_url` where its health and metrics are. `endpoint` is a
    prefill worker's node. `model` is the model's name for people, `identity` what its KV depends
    on. `context` is the most tokens of a request here, prompt and answer; `life` is its node's
    incarnation in hexadecimal, another one each time that the worker starts.
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


class How(msgspec.Struct, frozen=True):
    """A `Sampling` of the engine."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    stop: tuple[Name, ...] = ()


class Ask(msgspec.Struct, frozen=True):
    """A `Generate`, and where its prefill worker is: its node's address, and its URL. Requests of
    different `salt` share nothing."""

    rid: Name
    tokens: list[int]
    prefill: Name
    prefill_url: Name
    max_new_tokens: int = 16
    num_samples: int = 1
    sampling: How = How()
    salt: Name = ""
    priority: int = 0
    deadline_s: float | None = None


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """An `Output`."""

    sample: int = 0
    position: int = 0
    token: int | None = None
    text: str = ""
    finish: Literal["stop", "length", "abort", "error"] | None = None
    error: str = ""
    hit_tokens: int = 0
    prefill_hit_tokens: int = 0
    shared_tokens: int = 0


class Job(msgspec.Struct, frozen=True):
    """A `PrefillJob`. The last four are its `Choice`."""

    rid: Name
    tokens: list[int]
    prefill: Name
    decode: Name
    room: int
    generation: int
    salt: Name
    cacheable: bool
    is_known: bool
    sampling: How
    seed: int
    sample: int
    position: int


class Abort(msgspec.Struct, frozen=True):
    """Jobs that are not wanted any more."""

    rids: list[str]


class Lost(msgspec.Struct, frozen=True):
    """A peer that is suspect or over (`lost_peers` of a node): `held` pages of a decode worker that
    it may still write, or rooms of a prefill worker that it is in."""

    name: str
    life: str
    why: str
    held: int


class Fence(msgspec.Struct, frozen=True):
    """That life of a worker is dead, for certain: what is held for it may be used again."""

    name: str
    life: str


def key_of(salt: str) -> str:
    """What stands for a client's salt in a service: 32 characters, however long that is. It is kept
    for as long as KV of it is.

    >>> len(key_of("tenant 1")), key_of("tenant 1") == key_of("tenant 2")
    (32, False)
    """
    return blake2b(salt.encode(), digest_size=16).hexdigest()


def namespace_of(salt: str) -> Namespace | None:
    """A request's namespace, of its salt."""
    return Namespace(salt=salt) if salt else None
