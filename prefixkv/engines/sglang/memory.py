"""SGLang's memory in the form that transfers take: a rank's share of the KV, what a request keeps
beside it, and metadata rows.

A backend gets no tensors, but an address, a length and the bytes per page of each buffer. Where two
servers differ in their number of ranks, pages are cut by heads, so their layout is read from the
pool (`Share`). Pages of an unknown kind are opaque, known to SGLang's kernels only: they move
whole, between equal numbers of ranks.

SGLang calls each kind of what a request keeps beside the KV of all tokens a *component*: it gives a
backend the addresses of its buffers, and with each request the indices of what is to be sent. A
window (`swa`) is a window group of the pool, a recurrent state (`mamba`) a slot of a StatePool, the
keys of an index (`dsa`) an aligned group: they lie under the page ids of the KV, and are sent with
it. Every buffer's bytes are SGLang's own, so two servers need equal numbers of ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from prefixkv import KVPool, Mesh, PoolGroup, StatePool, StateTensor
from prefixkv.errors import ConfigError, RequestError
from prefixkv.spi import PageIds

OPAQUE: Final = "opaque"
MHA: Final = "mha"
MLA: Final = "mla"


class Share(NamedTuple):
    """The layout of a page in a rank's buffers.

    `kind` MHA: the first half of the buffers hold K, the others V, as [token, head, element]; MLA:
    latent vectors, complete on each rank; OPAQUE: known to SGLang's kernels only. Heads are KV
    heads, `num_heads` those of the rank and `total_heads` those of the model. `window`: tokens
    before its own that a token sees in layers with sliding windows, 0 without such layers.

    >>> Share(MHA, 2, 4).mesh(num_buffers=32, size=2).shard(1)
    Shard(first_layer=0, num_layers=16, first_head=2, num_heads=2)
    """

    kind: str = OPAQUE
    num_heads: int = 1
    total_heads: int = 1
    window: int = 0

    def mesh(self, num_buffers: int, size: int) -> Mesh:
        """Return the mesh of `size` ranks of such shares. Opaque pages count as one head per rank.
        `num_buffers` are a rank's, which are layers; of MHA two buffers are one layer."""
        if self.kind == MHA:
            return Mesh(num_buffers // 2, self.total_heads, size)
        return Mesh(num_buffers, 1 if self.kind == MLA else size, size)


UNKNOWN: Final = Share()


def share_of(pool: Any, total_heads: int) -> Share:
    """`total_heads` are the model's KV heads. Only the exact classes are recognised; a derived
    class may lay its pages out differently, and counts as opaque: a wrong guess would send wrong
    bytes, an opaque page only needs equal ranks."""
    name, module = type(pool).__name__, type(pool).__module__
    if module != "sglang.srt.mem_cache.memory_pool":
        return UNKNOWN
    if name == "MLATokenToKVPool":
        return Share(MLA)
    plain = name == "MHATokenToKVPool" and getattr(pool, "kv_cache_layout", None) == "nhd"
    if plain and all(
        buffer.dim() == 3 and buffer.shape[1] == pool.head_num and buffer.is_contiguous()
        for buffer in (*pool.k_buffer, *pool.v_buffer)
    ):
        return Share(MHA, pool.head_num, total_heads)
    return UNKNOWN


_CURRENT_SHARE: ContextVar[Share] = ContextVar("share of the manager that SGLang makes")


def current_share() -> Share:
    return _CURRENT_SHARE.get(UNKNOWN)


@contextmanager
def use_share(share: Share) -> Iterator[None]:
    """Set the share while a manager is made: its constructor has no argument for it."""
    token = _CURRENT_SHARE.set(share)
    try:
        yield
    finally:
        _CURRENT_SHARE.reset(token)


def pool_of(
    addresses: Sequence[int],
    lengths: Sequence[int],
    page_bytes: Sequence[int],
    *,
    page_size: int,
    device: str,
    tag: str,
    share: Share = UNKNOWN,
) -> KVPool:
    """Return a pool over the KV memory at these addresses, with bytes as elements. The buffers have
    to outlive it. Of opaque pages each buffer counts as a layer.

    `page_bytes` is each buffer's share of a page. `tag` names all that the bytes of an opaque page
    depend on; both servers' must be equal. `share` is the layout of a page in the buffers.

    Raises ConfigError if the buffers differ in the size or number of their pages.
    """
    # One page id addresses all buffers, so all of them must have the same number of pages; of one
    # size, since a pool has one shape per layer.
    shapes = {(length // size, size) for length, size in zip(lengths, page_bytes, strict=True)}
    if len(shapes) != 1:
        listed = ", ".join(f"{pages} pages of {size} bytes" for pages, size in sorted(shapes))
        raise ConfigError(f"the KV buffers have {listed or 'no pages'}: all have to be alike")
    ((num_pages, size),) = shapes
    buffers = [
        bytes_at(address, num_pages * size, device).view(num_pages, size) for address in addresses
    ]
    # 1. Opaque: bytes under a tag. 2. MLA: one latent vector per token. 3. MHA: K, then V, by head.
    if share.kind == OPAQUE:
        axes = "page", "packed"
        return KVPool.from_tensors(buffers, page_size=page_size, axes=axes, opaque=tag)
    if share.kind == MLA:
        return KVPool.from_tensors([buffer.view(num_pages, page_size, -1) for buffer in buffers])
    shape = num_pages, page_size, share.num_heads, -1
    slabs, half = [buffer.view(shape) for buffer in buffers], len(buffers) // 2
    return KVPool.from_tensors(slabs[:half], slabs[half:])


def bytes_at(address: int, length: int, device: str) -> torch.Tensor:
    """Return a view uint8 [length] of memory that SGLang owns."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(address, length), device=device)


class _OnDevice:
    """GPU memory by its address, in the interface through which torch takes it without a copy."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class Rows:
    """SGLang's metadata: buffers in host memory, of each of which a request owns one row.

    A row has the first token, log-probabilities, hidden states and the room's number. It travels as
    the `aux` of a room.

    >>> first, second = np.arange(8, dtype=np.uint8), np.zeros(4, np.uint8)
    >>> rows = Rows([first.ctypes.data, second.ctypes.data], [8, 4], [4, 2])
    >>> rows.row_bytes, rows.read(1).hex()
    (6, '040506070000')
    >>> rows.write(0, bytes([9] * 6))
    >>> first.tolist(), second.tolist()
    ([9, 9, 9, 9, 4, 5, 6, 7], [9, 9, 0, 0])
    """

    def __init__(
        self, addresses: Sequence[int], lengths: Sequence[int], row_bytes: Sequence[int]
    ) -> None:
        """Per buffer its address and sizes in bytes. The buffers have to outlive this."""
        self._buffers = [
            np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address)).reshape(-1, size)
            for address, length, size in zip(addresses, lengths, row_bytes, strict=True)
        ]
        self.row_bytes = sum(row_bytes)

    def read(self, row: int) -> bytes:
        """Return a row of every buffer, concatenated."""
        return b"".join(buffer[row].tobytes() for buffer in self._buffers)

    def write(self, row: int, data: bytes) -> None:
        """Write what `read` returned. Raises RequestError for another size, and writes nothing."""
        if len(data) != self.row_bytes:
            raise RequestError(
                f"prefill sent metadata of {len(data)} bytes, decode's rows have {self.row_bytes}"
            )
        # The size was checked: a peer's bytes can fill this row, and no other request's.
        start = 0
        for buffer in self._buffers:
            size = buffer.shape[1]
            buffer[row] = np.frombuffer(data, np.uint8, size, start)
            start += size


WINDOW: Final = "swa"
STATE: Final = "mamba"
INDEX: Final = "dsa"


def state_refusals(args: Any, window: int) -> list[str]:
    """Return why what a model keeps beside its KV cannot be sent, by SGLang's arguments. `window`
    is that of `Share`. Empty where it can, or where there is nothing."""
    kinds = [kind.value for kind in args.state_types]
    unknown = sorted({kind for kind in kinds if kind not in (WINDOW, STATE, INDEX)})
    found = {
        f"the model keeps state besides its KV ({', '.join(unknown)}), which is not sent":
            bool(unknown),
        # Buffers of several kinds, each with page ids or slots of its own, under one name.
        "DeepSeek V4's compressed KV and its windows are not sent":
            getattr(args, "mla_compression_ratios", None) is not None,
        f"the model keeps two components of one kind ({', '.join(kinds)}), which was not run":
            len({*kinds}) < len(kinds),
        "leave out --speculative-algorithm: a draft beside windows or states was not run":
            bool(kinds) and args.num_draft_entries > 0,
        # SGLang then caps decode's cached prefix nowhere, and it may reach into the window.
        "the model has sliding windows: --page-size above 1 is needed":
            WINDOW in kinds and args.page_size == 1,
        "SGLang does not say how long the model's sliding windows are":
            WINDOW in kinds and window <= 0,
    }  # fmt: skip
    return [reason for reason, refused in found.items() if refused]


class OfRequest(NamedTuple):
    """For each window group the pages of its window, and the slot of the state, -1 without one."""

    windows: tuple[PageIds, ...] = ()
    state_slot: int = -1


NOTHING: Final = OfRequest()


class Components:
    """The components of a rank's memory, and what a request has in each. `args`: without a reason
    in `state_refusals`."""

    def __init__(self, args: Any, window: int, device: str) -> None:
        """Raises ConfigError for buffers of one component that differ in the size or number of
        their items, and for a model without any KV."""
        self._kinds = [kind.value for kind in args.state_types]
        self._groups: list[PoolGroup] = []
        self._buffers: list[tuple[int, int, int]] = []  # of states: address, length, bytes a slot
        layout = getattr(args, "swa_kv_cache_layout", None) or "plain"
        for kind, *buffers in zip(
            self._kinds, args.state_data_ptrs, args.state_data_lens, args.state_item_lens,
            strict=True,
        ):  # fmt: skip
            if kind == STATE:
                self._buffers = list(zip(*buffers, strict=True))
                continue
            tag = f"sglang {args.kv_cache_dtype_str} {kind} {layout if kind == WINDOW else ''}"
            pool = pool_of(*buffers, page_size=args.page_size, device=device, tag=tag.strip())
            # SGLang's window is what a token sees before its own.
            self._groups.append(PoolGroup(kind, pool, window + 1 if kind == WINDOW else 0))
        self._device = device

    def pool_with(self, pool: KVPool) -> KVPool:
        """Add windows and indices to a pool. Raises ConfigError for those that do not fit it."""
        return pool.with_groups(*self._groups) if self._groups else pool

    def state_pool(self, mesh: Mesh, rank: int) -> StatePool | None:
        """Each rank's share of a buffer counts as one head. None without any state."""
        if not self._buffers:
            return None
        tensors = [
            StateTensor(f"{STATE}{i}", 0, mesh.tp_size, (size,), "uint8")
            for i, (_, _, size) in enumerate(self._buffers)
        ]
        views = [
            bytes_at(address, length, self._device).view(length // size, 1, size)
            for address, length, size in self._buffers
        ]
        return StatePool(tensors, views, mesh, rank)

    def of_request(self, indices: Sequence[Any] | None, pages: Sequence[int]) -> OfRequest:
        """`pages` are those of its KV, behind decode's prefix. Raises RequestError where the
        indices are not of as many components, no single slot of a state, or other pages."""
        if not self._kinds:
            return NOTHING
        if indices is None or len(indices) != len(self._kinds):
            raise RequestError(f"indices of {len(indices or ())} components of {self._kinds}")
        windows: list[PageIds] = []
        slot = -1
        for kind, given in zip(self._kinds, indices, strict=True):
            if kind == WINDOW:
                windows.append(np.asarray(given, np.int32))
            elif kind == STATE:
                slots = np.asarray(given).ravel()
                if len(slots) != 1:
                    raise RequestError(f"{len(slots)} slots of a request's state, 1 is needed")
                slot = int(slots[0])
            elif not np.array_equal(given, pages):
                raise RequestError(f"{len(given)} pages of {kind}, which are not those of the KV")
        return OfRequest(tuple(windows), slot)
