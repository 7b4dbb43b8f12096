"""The copies of staging alone bring every byte to where the nodes would bring it."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import numpy as np
import pytest
import torch

from benchmarks.bare_staging import BareReceiver, BareSender
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh

HEADS, LAYERS, PAGES, LEASE = 4, 2, 9, 4 << 12  # a lease takes few of the pages


def pools_of(mesh: Mesh, order: str) -> list[KVPool]:
    heads = HEADS // mesh.tp_size
    return [KVPool.create(12, 4, LAYERS, heads, 16, order=order) for _ in range(mesh.num_ranks)]


@pytest.mark.parametrize(("writers", "readers"), [(4, 1), (1, 4)])
def test_all_pages_arrive(writers: int, readers: int) -> None:
    meshes = Mesh(LAYERS, HEADS, writers), Mesh(LAYERS, HEADS, readers)
    pages = np.random.default_rng(1).permutation(12)[:PAGES].astype(np.int32)
    sources, targets = (pools_of(mesh, "layer_major") for mesh in meshes)
    kv = torch.randint(0, 256, (PAGES, 2 * LAYERS, 4, HEADS, 32), dtype=torch.uint8)
    for pool, part in zip(sources, kv.chunk(writers, dim=3), strict=True):
        pool.write_pages(pages, part.contiguous())
    ours, theirs = Pipe()
    receiver = BareReceiver(meshes, targets, pages, LEASE)
    sender = BareSender(meshes, sources, pages, LEASE, receiver.where)
    sending = threading.Thread(target=sender.send, args=(theirs, LEASE))
    sending.start()
    ended_s = receiver.take(ours, LEASE)
    sending.join(10.0)
    assert not sending.is_alive()
    assert ended_s > 0
    for pool, part in zip(targets, kv.chunk(readers, dim=3), strict=True):
        assert torch.equal(pool.read_pages(pages), part)
