"""KV in VRAM from one process to another over real NIXL, every byte looked at. Skipped without a
GPU; `PREFIXKV_TEST_DEVICE=cuda` runs the other tests of this folder in VRAM too."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from prefixkv import DecodeNode
from prefixkv.config import DecodeConfig, PrefillConfig
from tests.support.gpu import GPU
from tests.support.node_pair import (
    DecodeDriver,
    drive_until,
    left,
    make_pool,
    node_at_rest,
    tokens_of,
)
from tests.support.node_process import NodeProcess, node_processes
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK

pytestmark = GPU
PAIRS = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]


class There:
    """Prefill in a process of its own, decode here."""

    def __init__(self, stack: ExitStack, devices: tuple[str, str], **pool: Any) -> None:
        start = stack.enter_context(node_processes())
        sizes = {"num_pages": 160, "num_layers": 4, "head_dim": 64}
        pools = [sizes | pool | {"device": device} for device in devices]
        orders = ("layer_major", "page_major")
        for one, order in zip(pools, orders, strict=True):
            one.setdefault("order", order)
        self.child: NodeProcess = start("prefill", PrefillConfig(control=QUICK), pools[0])
        self.node = stack.enter_context(
            DecodeNode(make_pool(**pools[1]), DecodeConfig(control=QUICK))
        )
        self.d = DecodeDriver(self.node, lambda *ask: self.child.call("add", *ask))

    def run(self, *rids: str) -> None:
        drive_until(lambda: self.d.ended.keys() >= set(rids), [self.d])
        assert {rid: self.d.ended[rid] for rid in rids} == dict.fromkeys(rids)

    def check_at_rest(self) -> None:
        drive_until(lambda: not left(self.node), [self.d])
        node_at_rest(self.node)
        assert self.d.mismatches == self.d.wrong_aux == 0
        until(lambda: not self.child.call("stats")["rooms"])
        self.child.call("check_at_rest")


@pytest.mark.parametrize("order", ["layer_major", "page_major"])
@pytest.mark.parametrize("devices", PAIRS, ids=str)
def test_every_byte_arrives_between_two_processes(
    stack: ExitStack, devices: tuple[str, str], order: str
) -> None:
    """Conversations of three turns side by side: what decode has cached in VRAM is not sent
    again."""
    there = There(stack, devices, order=order)
    there.child.call("set", chunk=32)
    for turn, length in enumerate((30, 61, 126)):
        rids = [f"{seed}.{turn}" for seed in range(3)]
        for seed, rid in enumerate(rids):
            tokens = tokens_of(seed, length)
            there.d.submit(rid, tokens, there.child.endpoint, max_new_tokens=3)
        there.run(*rids)
        if turn:
            assert all(there.d.prefix_lens[rid][0] > 0 for rid in rids)
    there.check_at_rest()
    assert set(there.child.call("get", "sent")) == set(there.d.ended)


def test_a_chunk_is_read_once_its_cuda_event_is_over(stack: ExitStack) -> None:
    there = There(stack, ("cuda", "cuda"))
    there.child.call("late")
    there.child.call("set", chunk=32)
    for seed in range(3):
        there.d.submit(f"{seed}", tokens_of(seed, 126), there.child.endpoint, max_new_tokens=2)
    there.run("0", "1", "2")
    assert there.child.call("get", "pending") >= 3, "the test has shown nothing"
    there.check_at_rest()


def test_pages_come_back_once_the_steps_cuda_event_is_over(stack: ExitStack) -> None:
    there = There(stack, ("cuda", "cuda"))
    there.d.hold_running = True
    there.d.submit("r", tokens_of(1, 126), there.child.endpoint, max_new_tokens=2)
    drive_until(lambda: "r" in there.d.running, [there.d])
    req = there.d.running.pop("r")
    after = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    after.record()
    there.node.finish(req, after=after)
    held = there.node.stats()["locks"]
    assert not after.query(), "the test has shown nothing"
    assert held
    after.synchronize()
    drive_until(lambda: not left(there.node), [there.d])
    assert there.d.mismatches == 0
