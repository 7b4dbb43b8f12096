"""A prefill engine that hands chunks over before the GPU has computed them."""

from __future__ import annotations

from typing import Any

import torch

from prefixkv import PrefillNode
from prefixkv.conformance.hashing import PrefixHasher
from prefixkv.prefill.request import PrefillRequest
from tests.support.node_pair import PrefillDriver
from tests.support.patterns import MirroredPattern

POISON, CYCLES = 0xA5, 200_000_000
_hasher = PrefixHasher()


class LatePrefillDriver(PrefillDriver):
    """Computes on a stream of its own, behind `CYCLES` in which the GPU does nothing. Until then a
    chunk's slots are poison. `pending` counts the chunks whose event was not over when
    `send_chunk` had returned.
    """

    def __init__(self, node: PrefillNode) -> None:
        super().__init__(node)
        self.pending = 0
        self._cuda: Any = torch.cuda  # in parts untyped
        self._stream = self._cuda.Stream(node.pool.device)
        self._late: list[torch.Tensor] = []  # what a copy still reads

    def compute(self, req: PrefillRequest) -> None:
        assert isinstance(self.pattern, MirroredPattern)
        pool, pattern = self.node.pool, self.pattern
        hashes = _hasher.prefixes(req.tokens)
        start = self.computed[req.rid]
        end = min(start + self.chunk, req.num_tokens)
        touched = pattern.fill_mirror(req.pages, start, hashes[:end])
        data = pattern.mirror.read_pages(touched).to(pool.device)
        self._poison(touched, start - start // pattern.page_size * pattern.page_size)
        index = torch.tensor(touched, dtype=torch.int64, device=pool.device)
        self._late += [data, index]
        self._cuda.synchronize(pool.device)
        with self._cuda.stream(self._stream):
            self._cuda._sleep(CYCLES)
            for layer in range(pool.layout.num_layers):
                for kv, view in enumerate((pool.k(layer), pool.v(layer))):
                    view[index] = data[:, 2 * layer + kv].contiguous().view(view.dtype)
            ready = self._cuda.Event()
            ready.record(self._stream)
        last = end == req.num_tokens
        self.node.send_chunk(req, end, last, self.aux(req) if last else b"", ready)
        self.pending += not ready.query()
        self.computed[req.rid] = end
        if last:
            del self.computing[req.rid]

    def _poison(self, touched: Any, kept_slots: int) -> None:
        """All slots of the pages but the first ones of the first page, which were sent before."""
        bytes_there = self.node.pool.read_pages(touched)
        kept = bytes_there[0, :, :kept_slots].clone()
        bytes_there.fill_(POISON)
        bytes_there[0, :, :kept_slots] = kept
        self.node.pool.write_pages(touched, bytes_there)
