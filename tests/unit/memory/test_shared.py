"""Memory that a peer may map: sealed, zero, freed with its last tensor; and staging buffers."""

import errno
import fcntl
import gc
import mmap
import os

import pytest
import torch

from prefixkv.errors import CapacityError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.memory.kv_pool import SEALS, KVPool, block_of, blocks_of, shared_bytes
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.runtime.staging import RelayBuffer
from tests.support.gpu import GPU

SIZES = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}


def test_a_block_is_zero_and_whole_pages_long() -> None:
    memory = shared_bytes(5000)
    assert memory.shape == (5000,)
    assert not memory.any()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    block = block_of(memory.data_ptr(), 5000)
    assert block[:2] == (memory.data_ptr(), 2 * mmap.PAGESIZE)


def test_a_block_can_neither_shrink_nor_grow() -> None:
    memory = shared_bytes(2 * mmap.PAGESIZE)
    block = block_of(memory.data_ptr(), 1)
    assert fcntl.fcntl(block.fd, fcntl.F_GET_SEALS) == SEALS
    for size in (0, mmap.PAGESIZE, 3 * mmap.PAGESIZE):
        with pytest.raises(PermissionError) as caught:
            os.ftruncate(block.fd, size)
        assert caught.value.errno == errno.EPERM
    with pytest.raises(PermissionError):  # nor can a peer add a seal, against writes say
        fcntl.fcntl(block.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


@pytest.mark.slow
def test_memory_and_descriptor_go_with_the_last_tensor() -> None:
    memory = shared_bytes(100)
    block = block_of(memory.data_ptr(), 100)
    view = memory[3:5].view(1, 2)
    del memory
    gc.collect()
    os.fstat(block.fd)
    assert block_of(block.address, 1) == block
    del view
    gc.collect()
    assert block_of(block.address, 1) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(block.fd)


def test_only_ranges_inside_one_block_are_found() -> None:
    memory = shared_bytes(mmap.PAGESIZE)
    at = memory.data_ptr()
    assert block_of(at, mmap.PAGESIZE) is not None
    assert block_of(at, mmap.PAGESIZE + 1) is None
    before = block_of(at - 1, 1)  # another test's may lie there
    assert before is None or before.address + before.num_bytes == at
    private = torch.zeros(10)
    assert blocks_of([(at, 1), (at + 5, 5)]) == [block_of(at, 1)]
    assert blocks_of([(at, 1), (private.data_ptr(), 4)]) is None


def test_where_there_are_no_descriptors_left_is_a_capacity_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(CapacityError, match="Too many open files"):
        shared_bytes(1)


def test_more_than_there_is_is_a_capacity_error() -> None:
    gc.collect()  # other tests' memory
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="shared memory of"):
        shared_bytes(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("order", ["layer_major", "page_major"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_a_shared_pool_is_as_another_and_lies_in_one_block(order: str, attention: str) -> None:
    sizes = SIZES | ({"num_kv_heads": 1} if attention == "mla" else {})
    options = {"order": order, "attention": attention, **sizes}
    pool, other = KVPool.create(7, 4, shared=True, **options), KVPool.create(7, 4, **options)
    assert pool.layout.page_bytes == other.layout.page_bytes
    assert [bytes_ for _, bytes_ in pool.layout.regions] == [b for _, b in other.layout.regions]
    blocks = blocks_of(pool.layout.regions)
    assert blocks is not None
    assert len(blocks) == 1
    assert blocks_of(other.layout.regions) is None
    data = torch.randint(0, 256, pool.read_pages([0, 3]).shape, dtype=torch.uint8)
    pool.write_pages([2, 5], data)
    assert torch.equal(pool.read_pages([2, 5]), data)
    assert not pool.read_pages([0, 1, 3, 4, 6]).any()


def test_an_engines_own_tensors_may_be_shared() -> None:
    raw = shared_bytes(2 * 6 * 4 * 2 * 8)
    k, v = raw.view(2, 6, 4, 2, 8)
    pool = KVPool.from_tensors([k], [v], page_size=4)
    assert blocks_of(pool.layout.regions) == [block_of(raw.data_ptr(), 1)]


def test_state_and_staging_may_be_shared() -> None:
    state = StatePool.create([StateTensor("conv", 0, 2, (3,))], 4, shared=True)
    staging = RelayBuffer(8192, 4096, shared=True)
    assert blocks_of(state.layout.regions) is not None
    assert block_of(staging.area.base, staging.area.num_bytes) is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_area_describes_aligned_memory_and_slices_are_views(device: str) -> None:
    sizes = 5 * BLOCK_BYTES, 2 * BLOCK_BYTES
    for buffer in [RelayBuffer(*sizes, device) for _ in range(3)]:
        buffer.area.validate()
        assert buffer.area.base % BLOCK_BYTES == 0
        assert (buffer.area.num_bytes, buffer.area.lease_bytes) == sizes
        assert torch.device(buffer.device).type == device
        whole, piece = buffer.slice(0, 5 * BLOCK_BYTES), buffer.slice(BLOCK_BYTES, 100)
        assert whole.data_ptr() == buffer.area.base == piece.data_ptr() - BLOCK_BYTES
        assert (whole.dtype, whole.is_contiguous(), int(whole.sum())) == (torch.uint8, True, 0)
        assert piece.shape == (100,)
        piece.fill_(7)
        assert int(whole.sum()) == 700
