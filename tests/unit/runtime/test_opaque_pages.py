"""Pages whose bytes only their engine's kernels can read, over real NIXL: they arrive whole, byte
for byte, or the two workers refuse each other by name.

The pools are as vLLM's CPU backend has them: [block, head, token, K and V], a tensor a layer, where
the inside of a block is packed for the instruction set. So what a block holds is random here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.memory.kv_pool import KVPool
from prefixkv.request import Request
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK

PAGES, LAYERS, HEADS, ROW = 12, 3, 2, 16
AXES = ("page", "head", "token", "packed")


class Worker:
    """A node, and the blocks of its pool: uint8 [page, head, token, packed] a layer."""

    def __init__(
        self, stack: ExitStack, side: type[Any], page_size: int, opaque: str, padding: int = 0
    ) -> None:
        block = HEADS * page_size * ROW
        rows = [torch.randint(0, 256, (PAGES, block + padding), dtype=torch.uint8)
                for _ in range(LAYERS)]  # fmt: skip
        self.blocks = [row[:, :block].unflatten(1, (HEADS, page_size, ROW)) for row in rows]
        self.before = [block.clone() for block in self.blocks]
        said: dict[str, Any] = {"page_size": page_size, "num_kv_heads": HEADS, "opaque": opaque}
        if opaque:
            pool = KVPool.from_tensors(self.blocks, axes=AXES, **said)
        else:  # what the engine of the prototype said of them
            axes = ("page", "head", "kv", "token", "dim")
            halves = [block.view(PAGES, HEADS, 2, page_size, ROW // 2) for block in self.blocks]
            pool = KVPool.from_tensors(halves, axes=axes, **said)
        config = DecodeConfig if side is DecodeNode else PrefillConfig
        self.node: Any = stack.enter_context(side(pool, config(control=QUICK)))


@pytest.fixture
def serve() -> Any:
    """serve(prefill, decode) -> what ended on decode."""

    def run(prefill: Worker, decode: Worker, num_tokens: int) -> Any:
        tokens = tokens_of(3, num_tokens)
        decode.node.add(Request("r", tokens, room=1, prefill=prefill.node.endpoint))
        prefill.node.add(Request("r", tokens, room=1, decode=decode.node.peer_id.name))
        ended: list[Any] = []

        def step() -> bool:
            decode.node.pop_preallocated()
            for req in prefill.node.pop_bootstrapped():
                prefill.pages = req.pages.tolist()
                for end in (num_tokens // 2, num_tokens):
                    last = end == num_tokens
                    prefill.node.send_chunk(req, end, last, b"first" if last else b"")
            prefill.node.pop_sent()
            prefill.node.pop_failed()
            ended.extend([*decode.node.pop_transferred(), *decode.node.pop_failed()])
            return bool(ended)

        until(step)
        return ended[0]

    return run


Serve = Callable[[Worker, Worker, int], Any]


@pytest.mark.slow
@pytest.mark.usefixtures("_wire")
@pytest.mark.parametrize("padding", [0, 40], ids=["dense", "padded pages on decode"])
def test_opaque_pages_arrive_byte_for_byte(serve: Serve, padding: int) -> None:
    """Also what lies behind the last token of the last page: where that begins is not known."""
    with ExitStack() as stack:
        prefill = Worker(stack, PrefillNode, 32, "amx")
        decode = Worker(stack, DecodeNode, 32, "amx", padding)
        req = serve(prefill, decode, 100)
        assert (req.error, req.aux) == (None, b"first")
        pages = req.pages.tolist()
        assert len(pages) == 4
        for there, here, before in zip(decode.blocks, prefill.blocks, decode.before, strict=True):
            assert torch.equal(there[pages], here[prefill.pages])
            others = [page for page in range(PAGES) if page not in pages]
            assert torch.equal(there[others], before[others])
        decode.node.abort("r")
