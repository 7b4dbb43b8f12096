"""Views of SGLang's KV memory and metadata rows, in the form that transfers take.

A backend gets no tensors, but an address, a length and the bytes per page of each buffer. The
content of a page is described by its pool (`shares.py`), or known to SGLang's kernels only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from prefixkv import KVPool
from prefixkv.engines.sglang.shares import MLA, OPAQUE, UNKNOWN, Share
from prefixkv.errors import ConfigError, RequestError


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
