"""Tokens packed as little-endian int32 bytes, so that comparing two runs of tokens is one memcmp.

A key is built once, where a prompt enters, and extended as tokens are generated; nothing converted
before is converted again. It knows no page size: the tree that looks it up cuts it to whole pages.
Here are also the index of what begins at a page (`Starts`), and the namespaces that keys live in.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.errors import (
    RequestError,
    TokenError,
    check_laws,
    shown,
    shown_namespace,
    shown_secret,
    travels,
)

T = TypeVar("T")
Start: TypeAlias = tuple[Hashable, int, bytes]
"""A namespace, the number of a page, and the packed tokens of that page."""

TOKEN_BYTES = 4
TOKEN_LIMIT = 2**31
"""Tokens are integers in [0, TOKEN_LIMIT)."""

_LE_INT32 = np.dtype("<i4")

TokensLike: TypeAlias = "RadixKey | Sequence[int] | npt.NDArray[Any] | Any"
"""A RadixKey, a sequence of ints, or a 1-D array of integers (numpy, `array.array` or torch)."""


class _TokenList(msgspec.Struct, array_like=True, gc=False):
    """A type of its own: msgspec takes longer to look a generic one up than to check it."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=TOKEN_LIMIT)]]


class RadixKey:
    """The tokens of one request, packed, and the namespace they live in.

    Equal tokens in two namespaces (LoRA adapters, tenants, cache salts, images) are different keys.
    `tokens`: 1-D; ints, or an integer array. Copied. `namespace`: anything hashable; None is the
    common one. Raises TokenError unless all are integers in [0, TOKEN_LIMIT).

    >>> key = RadixKey([1, 2, 3])
    >>> key.append(4)
    >>> len(key), key.data[-4:]
    (4, b'\\x04\\x00\\x00\\x00')
    """

    __slots__ = ("_data", "_tail", "namespace")

    namespace: Hashable

    def __init__(self, tokens: TokensLike = (), namespace: Hashable = None) -> None:
        # The key is `_data` followed by `_tail`. Joining them costs a copy, so it waits until
        # somebody asks for `data`: a request appends token by token between two looks at its key.
        self._data = pack(tokens)
        if type(tokens) is RadixKey and namespace is None:
            namespace = tokens.namespace
        self._tail = bytearray()
        self.namespace = namespace

    @property
    def data(self) -> bytes:
        """The packed tokens. The first access after an append costs a copy, but no conversion."""
        if self._tail:
            self._data += self._tail
            self._tail.clear()
        return self._data

    def append(self, token: int) -> None:
        """Add one token; amortised O(1). Raises TokenError for anything else, and adds nothing."""
        self._tail += _checked_int(token).to_bytes(TOKEN_BYTES, "little")

    def extend(self, tokens: TokensLike) -> None:
        """Add tokens; amortised O(them). Adds none, and raises TokenError, if one is invalid."""
        self.extend_packed(pack(tokens))

    def extend_checked(self, tokens: Sequence[int]) -> None:
        """Add tokens that the caller has checked to be ints in [0, TOKEN_LIMIT)."""
        self._tail += struct.pack(f"<{len(tokens)}i", *tokens)

    @staticmethod
    def of_packed(data: bytes, namespace: Hashable = None) -> RadixKey:
        """Build a key from packed tokens, checked to be in [0, TOKEN_LIMIT). No copy."""
        key = RadixKey.__new__(RadixKey)
        key.namespace, key._tail = namespace, bytearray()
        key._data = data
        return key

    def extend_packed(self, more: bytes) -> None:
        """Add packed tokens that the caller has checked, as for `of_packed`."""
        self._tail += more

    def prefix(self, num_tokens: int) -> RadixKey:
        """Return the key of the first `num_tokens`; this object if those are all. O(num_tokens).

        >>> RadixKey([1, 2, 3], "lora").prefix(2)
        RadixKey(2 tokens, namespace='lora')
        """
        if type(num_tokens) is not int:
            num_tokens = _as_int(num_tokens)
        if num_tokens < 0:
            raise TokenError(f"a prefix of {shown(num_tokens)} tokens")
        data = self.data
        if num_tokens * TOKEN_BYTES >= len(data):
            return self
        # Past `__init__`, which would pack again.
        return RadixKey.of_packed(data[: num_tokens * TOKEN_BYTES], self.namespace)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return an int32 array that the caller may change."""
        return np.frombuffer(bytearray(self.data), _LE_INT32)

    def __len__(self) -> int:
        return (len(self._data) + len(self._tail)) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"RadixKey({len(self)} tokens, namespace={shown_namespace(self.namespace)})"


def pack(tokens: TokensLike) -> bytes:
    """Pack tokens as little-endian int32 bytes. O(tokens); one memcpy for an int32 array. A wider
    one takes two passes.

    Raises TokenError: not one-dimensional, floats, bools, or values out of [0, TOKEN_LIMIT).
    """
    if type(tokens) is RadixKey:
        return tokens.data
    # From the cheapest to the most expensive: packed already; arrays, which are checked and
    # converted as a whole; any other iterable, token by token. A string is a sequence too, but not
    # of tokens.
    if isinstance(tokens, (np.ndarray, array)):
        return _pack_array(np.asarray(tokens))
    # A torch tensor is known by what it can do: torch is not imported for this.
    if (detach := getattr(tokens, "detach", None)) is not None:
        try:
            return _pack_array(detach().cpu().numpy())
        except (TypeError, NotImplementedError) as error:  # numpy has no such dtype; no data
            raise TokenError(
                f"a {type(tokens).__name__} is no sequence of tokens: {error}"
            ) from None
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise TokenError(f"a {type(tokens).__name__} is no sequence of tokens")
    return _pack_sequence(list(tokens))


def token_list(tokens: TokensLike) -> list[int]:
    """Return tokens as a new list of ints.

    A list, and an array or tensor that makes one of itself, is checked as it stands: packing takes
    longer unless there are thousands. Raises TokenError unless all are integers in [0,
    TOKEN_LIMIT).

    >>> token_list(np.array([7, 8]))
    [7, 8]
    """
    listed = tokens
    if type(tokens) is not list and (as_list := getattr(tokens, "tolist", None)) is not None:
        listed = as_list()
    if type(listed) is list:
        try:
            return msgspec.convert((listed,), _TokenList).tokens
        # numpy's integers in a list, which are tokens, or what is none: packing tells, and names
        # the place.
        except msgspec.ValidationError:
            pass
    return np.frombuffer(pack(tokens), _LE_INT32).tolist()  # type: ignore[no-any-return]


def common_pages(
    data: bytes, other: bytes | bytearray, equal: int, end: int, page_bytes: int, at: int = 0
) -> int:
    """Return how many whole pages two packed runs of tokens have in common, from `equal` to `end`.

    The first `equal` pages are known to be the same; pages from `end` on are not compared. Binary
    search by memcmp, and no probe compares again what was equal before. `at`: the byte of `data`
    with which `other` begins.

    >>> common_pages(b"aabbccdd", b"aabbccxx", equal=1, end=4, page_bytes=2)
    3
    """
    view = memoryview(other)  # a slice of it costs no copy
    # The frequent answer first.
    if data.startswith(view[equal * page_bytes : end * page_bytes], at + equal * page_bytes):
        return end
    # Invariant: equal up to `equal`, different somewhere before `end`.
    while end - equal > 1:
        middle = (equal + end) // 2
        if data.startswith(view[equal * page_bytes : middle * page_bytes], at + equal * page_bytes):
            equal = middle
        else:
            end = middle
    return equal


class Starts(Generic[T]):
    """What begins at a page of a path, found by the tokens of that page.

    O(what begins with the same page), and a memcmp each: the pages before may differ.
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._found: dict[Start, dict[T, RadixKey]] = {}
        self._starts: dict[T, Start] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, one: object) -> bool:
        return one in self._starts

    def __iter__(self) -> Iterator[T]:
        return iter(self._starts)

    def _start(self, key: RadixKey, page: int) -> Start:
        at = page * self._page_bytes
        return key.namespace, page, key.data[at : at + self._page_bytes]

    def add(self, one: T, key: RadixKey, page: int) -> None:
        """Enter what begins at this whole page of `key`, and is not here."""
        start = self._starts[one] = self._start(key, page)
        self._found.setdefault(start, {})[one] = key

    def discard(self, one: T) -> None:
        """Take out what begins somewhere. Unknown: no-op."""
        if (start := self._starts.pop(one, None)) is not None:
            found = self._found[start]
            del found[one]
            if not found:
                del self._found[start]

    def at(self, key: RadixKey, page: int) -> Iterator[T]:
        """Iterate over what begins at this page of `key`, and has the same pages up to its end."""
        for one, other in self._found.get(self._start(key, page), {}).items():
            if key.data.startswith(memoryview(other.data)[: (page + 1) * self._page_bytes]):
                yield one

    def check_invariants(self, keys: Mapping[T, RadixKey]) -> None:
        """Check that all begin at a page of these keys. Raises InternalError."""
        found = {one: start for start, ones in self._found.items() for one in ones}
        laws = {
            "what is found begins there": found == self._starts
            and all(
                one in keys and self._start(keys[one], start[1]) == start
                for one, start in found.items()
            ),
        }
        check_laws(laws, found, keys)


def _pack_array(values: npt.NDArray[Any]) -> bytes:
    if values.ndim != 1:
        raise TokenError(f"tokens have shape {values.shape}, one dimension is needed")
    if values.dtype == _LE_INT32:
        if len(values) and values.min() < 0:
            place = int(np.argmax(values < 0))
            raise TokenError(f"token {values[place]} at {place} is not in [0, {TOKEN_LIMIT})")
        return values.tobytes()
    if values.dtype.kind not in "iu":
        raise TokenError(f"tokens are {values.dtype}, integers are needed")
    # The bits of all of them: negative if one is, and none above bit 30 if all are tokens.
    if not 0 <= int(np.bitwise_or.reduce(values)) < TOKEN_LIMIT:
        place = int(np.argmax((values < 0) | (values >= TOKEN_LIMIT)))
        raise TokenError(f"token {values[place]} at {place} is not in [0, {TOKEN_LIMIT})")
    return values.astype(_LE_INT32).tobytes()


def _pack_sequence(values: list[Any]) -> bytes:
    try:
        packed = struct.pack(f"<{len(values)}i", *values)
    # One is no int, or too large. Packing again value by value finds which, and accepts what
    # converts to an int (numpy scalars).
    except struct.error:
        packed = struct.pack(f"<{len(values)}i", *map(_checked_int, values, range(len(values))))
    _pack_array(np.frombuffer(packed, _LE_INT32))  # none is negative
    # A bool packs as 0 or 1, so only those places can hide one; looking at all of them would cost
    # as much as packing.
    for place in np.flatnonzero(np.frombuffer(packed, _LE_INT32).view(np.uint32) <= 1):
        if isinstance(values[place], (bool, np.bool_)):
            raise TokenError(f"token {values[place]} at {place} is a bool")
    return packed


def _checked_int(value: Any, place: int | None = None) -> int:
    token = value if type(value) is int else _as_int(value)
    if not 0 <= token < TOKEN_LIMIT:
        at = "" if place is None else f" at {place}"
        raise TokenError(f"token {shown(token)}{at} is not in [0, {TOKEN_LIMIT})")
    return token


def _as_int(value: Any) -> int:
    """Raises TokenError for bools and whatever does not convert without loss."""
    if isinstance(value, (bool, np.bool_)):
        raise TokenError(f"{shown(value)} is a bool, not a token")
    try:
        return operator.index(value)
    except TypeError:
        raise TokenError(f"{shown(value)} is not an integer token") from None


MAX_NAMESPACE_BYTES: Final = 64 << 10
"""Limit for all texts of one namespace together: it is kept for as long as KV of it is."""
MAX_NAMESPACE_DEPTH: Final = 64

_SHORT_CHARS: Final = 256


def shortened(text: str) -> str:
    """Return a client's text as a namespace keeps it: its digest if it is long, or UTF-8 cannot
    encode it.

    >>> shortened("tenant"), len(shortened("x" * 8_000_000))
    ('tenant', 72)
    """
    # Clients may send unpaired surrogates, which no event carries.
    if len(text) <= _SHORT_CHARS and travels(text):
        return text
    return "blake2b:" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def check_size(namespace: Hashable) -> None:
    """Raise RequestError for more than `MAX_NAMESPACE_BYTES` of texts or bytes, or more than
    `MAX_NAMESPACE_DEPTH` tuples in each other: Python hashes them without a limit to its stack."""
    size, depth, level = 0, 0, [namespace]
    while level:
        if (size := size + sum(map(_size, level))) > MAX_NAMESPACE_BYTES:
            raise RequestError(
                f"namespace has {size} characters, at most {MAX_NAMESPACE_BYTES} are taken: a "
                "digest does as well"
            )
        if (depth := depth + 1) > MAX_NAMESPACE_DEPTH:
            raise RequestError(f"namespace has tuples {depth} deep, {MAX_NAMESPACE_DEPTH} at most")
        level = [part for one in level if isinstance(one, tuple) for part in tuple.__iter__(one)]


def _size(part: object) -> int:
    if isinstance(part, str | bytes | tuple):
        return len(part)
    return (part.bit_length() // 8) if isinstance(part, int) else 0


def _is_name(text: object) -> bool:
    """Of the exact type: a subclass may compare and hash as it likes, and this is a lasting key."""
    return type(text) is str and bool(text) and travels(text)


class Image(NamedTuple):
    """An image, or other input beside text: its unique name, and the tokens that stand for it."""

    identifier: str
    start: int
    length: int


class _NamespaceFields(NamedTuple):
    lora: str | None
    salt: str | None
    images: tuple[Image, ...]


class Namespace(_NamespaceFields):
    """A namespace of named parts: adapter, salt and images.

    Requests with equal tokens but different namespaces share no KV. The tree treats it like any
    other hashable; cache events can express it in the formats of other engines
    (`prefixkv.kv_events`).

    Args:
        lora: name of the adapter.
        salt: any text that separates clients, such as a tenant's name. A secret: `repr` has a
            digest of it.
        images: (identifier, first token, number of tokens) of each.

    Raises RequestError: all three are missing (the common namespace is None), or one has a wrong
    type, or is nothing that an event carries.

    >>> Namespace(lora="legal")
    Namespace(lora='legal', salt=None, images=())
    """

    __slots__ = ()

    def __new__(
        cls,
        lora: str | None = None,
        salt: str | None = None,
        images: Iterable[tuple[str, int, int]] = (),
    ) -> Namespace:
        for name, text in (("lora", lora), ("salt", salt)):
            if text is not None and not _is_name(text):
                what = "a string that is not empty, and has bytes in UTF-8"
                given = shown(text) if name == "lora" or not text else f"a {type(text).__name__}"
                raise RequestError(f"{name} is {given}, {what}, is needed")
        if not isinstance(images, Iterable) or isinstance(images, str | bytes):
            raise RequestError(f"images is {shown(images)}, a list of images is needed")
        named = list(images)
        if not all(isinstance(image, tuple | list) and len(image) == 3 for image in named):
            raise RequestError(f"images is {shown(named)}: each is a name, first token and length")
        listed = tuple(Image(*image) for image in named)
        for image in listed:
            if (
                not _is_name(image.identifier)
                or type(image.start) is not int
                or type(image.length) is not int
                or not 0 <= image.start < TOKEN_LIMIT
                or not 1 <= image.length < TOKEN_LIMIT
            ):
                raise RequestError(f"{shown(image)} is no name, first token and number of tokens")
        # Else there would be two names for the common namespace, and requests in one would miss KV
        # of the other.
        if lora is None and salt is None and not listed:
            raise RequestError("a namespace of nothing is the common one: None")
        return super().__new__(cls, lora, salt, listed)

    def __repr__(self) -> str:
        salt = None if self.salt is None else shown_secret(self.salt)
        return f"Namespace(lora={self.lora!r}, salt={salt!r}, images={self.images!r})"
