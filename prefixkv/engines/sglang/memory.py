"""SGLang's KV and its metadata rows, as addresses, made into what transfers take.

SGLang gives a backend no tensors: an address and a length for each buffer, and the bytes of a page
in it. What a page holds says its pool (`shares.py`), or its kernels alone know it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from prefixkv import KVPool
from prefixkv.engines.sglang.shares import MLA, OPAQUE, UNKNOWN, Share
from prefixkv.spi import ConfigError, RequestError


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
    """A pool over SGLang's buffers; nothing is copied, and they have to outlive it. Its elements
    are bytes. Of opaque pages each buffer is a layer, whatever it holds.

    Args:
        addresses, lengths, page_bytes: of each buffer, in bytes: where it is, how long, and how
            much of it a page takes.
        page_size: tokens a page.
        device: "cpu" or "cuda:INDEX".
        tag: names what the bytes of an opaque page depend on; the two servers' have to be equal.
        share: how a page lies in the buffers.
    Raises:
        ConfigError: buffers whose pages differ in size or number.
    """
    shapes = {(length // size, size) for length, size in zip(lengths, page_bytes, strict=True)}
    if len(shapes) != 1:
        told = ", ".join(f"{pages} pages of {size} bytes" for pages, size in sorted(shapes))
        raise ConfigError(f"the KV buffers have {told or 'no pages'}: all have to be alike")
    ((num_pages, size),) = shapes
    buffers = [
        _bytes_at(address, num_pages * size, device).view(num_pages, size) for address in addresses
    ]
    if share.kind == OPAQUE:
        axes = "page", "packed"
        return KVPool.from_tensors(buffers, page_size=page_size, axes=axes, opaque=tag)
    if share.kind == MLA:
        return KVPool.from_tensors([buffer.view(num_pages, page_size, -1) for buffer in buffers])
    shape = num_pages, page_size, share.num_heads, -1
    slabs, half = [buffer.view(shape) for buffer in buffers], len(buffers) // 2
    return KVPool.from_tensors(slabs[:half], slabs[half:])


def _bytes_at(address: int, length: int, device: str) -> torch.Tensor:
    """uint8 [length], a view of memory that somebody else keeps."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(address, length), device=device)


class _OnDevice:
    """Memory of a GPU, as torch and others take it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class Rows:
    """SGLang's metadata: a row of each of several buffers in host memory belongs to a request. It
    has the first token, log-probabilities, hidden states and the room's number.

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
        """Addresses and sizes in bytes, one for each buffer; the buffers have to outlive this."""
        self._buffers = [
            np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address)).reshape(-1, size)
            for address, length, size in zip(addresses, lengths, row_bytes, strict=True)
        ]
        self.row_bytes = sum(row_bytes)

    def read(self, row: int) -> bytes:
        """One row of each, one behind the other."""
        return b"".join(buffer[row].tobytes() for buffer in self._buffers)

    def write(self, row: int, data: bytes) -> None:
        """The inverse of `read`. Raises RequestError for another size; nothing is written then."""
        if len(data) != self.row_bytes:
            raise RequestError(
                f"prefill sent metadata of {len(data)} bytes, decode's rows have {self.row_bytes}"
            )
        start = 0
        for buffer in self._buffers:
            size = buffer.shape[1]
            buffer[row] = np.frombuffer(data, np.uint8, size, start)
            start += size
