"""One contract, one suite: staging's gather and scatter on the CPU and by Triton, byte by byte,
canaries around.

Triton's kernels run on CUDA where there is one, else on the CPU under its interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixkv.errors import ConfigError, PageStateError
from prefixkv.memory import stage_copy
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.memory.stage_plan import StagePlan
from prefixkv.paging import unit_pages
from tests.support.engine_tensors import DTYPES, Memory
from tests.support.mesh_pools import ORDERS, mesh_layout

Make = Callable[[KVLayout, Shard, int], StagingCopy]


def scatter_into(copy: StagingCopy, units: np.ndarray, stage: torch.Tensor) -> None:
    scatter_together([(copy, stage)], units)


@pytest.fixture(params=["cpu", "triton"])
def engine(request: pytest.FixtureRequest) -> str:
    """Where pools and stages are, for `make`."""
    if request.param == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return str(request.param)


@pytest.fixture
def device(engine: str) -> str:
    return "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"


@pytest.fixture
def make(engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    if engine == "cpu":
        return staging_copy
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from prefixkv.memory.copy_triton import TritonCopy

    return lambda layout, part, unit: TritonCopy(StagePlan.of(layout, part, unit), device)


PARTS = [Shard(0, 3, 0, 4), Shard(1, 2, 1, 2), Shard(2, 1, 3, 1)]
LATENT = [Shard(0, 3, 0, 1), Shard(1, 1, 0, 1)]
PAGES = (5, 2, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("unit_tokens", "head_bytes"), [(4, 16), (2, 3), (1, 6)])
@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("order", ORDERS)
def test_gather_reads_and_scatter_writes_just_the_bytes_of_the_part(
    make: Make,
    engine: str,
    device: str,
    order: str,
    attention: str,
    unit_tokens: int,
    head_bytes: int,
) -> None:
    heads = 4 if attention == "mha" else 1
    memory = Memory(mesh_layout(order, 7, 4, 3, heads, attention, head_bytes), device)
    fold = 4 // unit_tokens
    start, stop = (0, len(PAGES)) if fold == 1 else (1, len(PAGES) * fold - 1)
    units = unit_pages(np.array(PAGES, np.int32), fold, start, stop)
    parts = PARTS if attention == "mha" else LATENT
    for part in (
        parts if engine == "cpu" else [parts[unit_tokens % len(parts)]]
    ):  # the interpreter is slow
        copy = make(memory.layout, part, unit_tokens)
        places = memory.places(PAGES, part, unit_tokens, start, stop)
        before = memory.bytes()
        stage = torch.zeros(copy.num_bytes(len(units)) + 64, dtype=torch.uint8, device=device)
        copy.gather(units, stage[32:-32])
        assert np.array_equal(stage[32:-32].cpu().numpy(), before[places])
        assert not stage[:32].any()
        assert not stage[-32:].any()
        assert np.array_equal(memory.bytes(), before)

        new = np.random.default_rng(1).integers(0, 256, len(places), np.uint8)
        scatter_into(copy, units, torch.from_numpy(new).to(device))
        before[places] = new
        assert np.array_equal(memory.bytes(), before)


@pytest.mark.slow
def test_more_rows_and_longer_ones_than_a_tile(make: Make, device: str) -> None:
    head_bytes = 8 * 257
    memory = Memory(mesh_layout("heads before tokens", 7, 4, 2, 4, "mha", head_bytes), device)
    part = Shard(0, 2, 0, 4)
    copy = make(memory.layout, part, 4)
    places = memory.places(PAGES, part, 4, 0, len(PAGES))
    before = memory.bytes()
    stage = torch.zeros(copy.num_bytes(len(PAGES)), dtype=torch.uint8, device=device)
    copy.gather(np.array(PAGES, np.int32), stage)
    assert np.array_equal(stage.cpu().numpy(), before[places])
    scatter_into(copy, np.array(PAGES, np.int32), stage.flip(0))
    before[places] = before[places][::-1]
    assert np.array_equal(memory.bytes(), before)


@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_of_any_dtype_moves_between_our_layouts(
    make: Make, device: str, dtype: str, attention: str
) -> None:
    heads = 2 if attention == "mha" else 1
    pools = [
        KVPool.create(
            6, 4, 2, heads, 8, dtype=dtype, attention=attention, order=order, device=device
        )
        for order in ("layer_major", "page_major")
    ]
    source, target = pools
    shape = (6, len(source.layout.slabs), 4, heads, source.layout.head_bytes)
    data = torch.from_numpy(np.random.default_rng(2).integers(0, 256, shape, np.uint8))
    source.write_pages(range(6), data)
    from_, to = (make(pool.layout, Shard.whole(pool.layout), 4) for pool in pools)
    stage = torch.empty(from_.num_bytes(3), dtype=torch.uint8, device=device)
    from_.gather(np.array([4, 0, 5], np.int32), stage)
    scatter_into(to, np.array([1, 2, 0], np.int32), stage)
    assert torch.equal(target.read_pages([1, 2, 0]), data[[4, 0, 5]])
    assert not target.read_pages([3, 4, 5]).any()


@pytest.mark.parametrize("num_units", [1, 3])
def test_aligned_groups_are_staged_behind_the_pages(num_units: int) -> None:
    """Of odd sizes, so that a group begins at a word of its own."""

    def pool(heads: int, dim: int, seed: int) -> KVPool:
        made = KVPool.create(8, 4, 1, heads, dim, dtype="uint8")
        data = np.random.default_rng(seed).integers(0, 256, (8, 2, 4, heads, dim), np.uint8)
        made.write_pages(range(8), torch.from_numpy(data))
        return made

    def grouped(heads: int, seed: int) -> tuple[KVPool, KVPool]:
        draft, last = pool(heads * 2, 5, seed + 1), pool(heads, 3, seed + 2)
        first = pool(heads, 3, seed)
        return first.with_groups(PoolGroup("last", last, 9), PoolGroup("draft", draft)), draft

    (source, its_draft), (target, draft) = grouped(1, 1), grouped(2, 5)
    before = [one.read_pages(range(8)) for one in (target, draft, target.group("last"))]
    src, dst = np.array([4, 0, 5][:num_units], np.int32), [1, 2, 0][:num_units]
    gather = staging_copy(source.layout, Shard(0, 1, 0, 1), 4)
    scatter = staging_copy(target.layout, Shard(0, 1, 1, 1), 4)
    num_bytes = gather.num_bytes(num_units)
    # 2 slabs of 4 tokens of 3 bytes, and of 2 heads of 5, in whole words of 16.
    assert num_bytes == scatter.num_bytes(num_units) == num_units * (32 + 80)
    for stage in (torch.empty(num_bytes + 1, dtype=torch.uint8), torch.empty(0)):
        with pytest.raises(ConfigError, match="stage is"):
            gather.gather(src, stage)
    stage = torch.empty(num_bytes, dtype=torch.uint8)
    gather.gather(src, stage)
    scatter_into(scatter, np.array(dst, np.int32), stage)
    before[0][dst, :, :, 1:] = source.read_pages(src)
    before[1][dst, :, :, 2:] = its_draft.read_pages(src)
    for one, want in zip((target, draft, target.group("last")), before, strict=True):
        assert torch.equal(one.read_pages(range(8)), want)


def test_layers_that_begin_alike_and_have_other_page_strides(make: Make, device: str) -> None:
    k = [torch.zeros(4, 2, 1, 8, device=device), torch.zeros(8, 2, 1, 8, device=device)[::2]]
    pool = KVPool.from_tensors(k, [torch.zeros_like(k[0]) for _ in k], page_size=2)
    pages = np.array([3, 1], np.int32)
    pool.write_pages(range(4), torch.arange(4 * 4 * 2 * 32).to(torch.uint8).view(4, 4, 2, 1, 32))
    copy = make(pool.layout, Shard.whole(pool.layout), 2)
    stage = torch.zeros(copy.num_bytes(2), dtype=torch.uint8, device=device)
    copy.gather(pages, stage)
    want = pool.read_pages(pages)
    assert torch.equal(stage.cpu().view(4, 2, 2, 1, 32), want.transpose(0, 1))
    pool.write_pages(pages, torch.zeros_like(want))
    scatter_into(copy, pages, stage)
    assert torch.equal(pool.read_pages(pages), want)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "error"),
    [
        ([0, 7], PageStateError),
        ([-1], PageStateError),
        ([], PageStateError),
        ([[0]], PageStateError),
    ],
)
def test_units_outside_the_pool_are_not_copied(
    make: Make, device: str, units: list[int], error: type
) -> None:
    memory = Memory(mesh_layout("layer_major", 7, 4, 3, 4), device)
    copy = make(memory.layout, PARTS[0], 4)
    before = memory.bytes()
    stage = torch.zeros(copy.num_bytes(len(units)), dtype=torch.uint8, device=device)
    for act in (copy.gather, copy.scatter_steps):
        with pytest.raises(error):
            act(np.array(units, np.int32), stage)
    assert np.array_equal(memory.bytes(), before)
    assert not stage.any()


def test_units_that_cannot_be_written_are_copied_without_a_warning(make: Make, device: str) -> None:
    """As pages of orders are. Torch says so once a process, and here every time."""
    memory = Memory(mesh_layout("layer_major", 7, 4, 3, 4), device)
    copy = make(memory.layout, PARTS[0], 4)
    units = np.array([2, 5], np.int32)
    units.flags.writeable = False
    stage = torch.zeros(copy.num_bytes(2), dtype=torch.uint8, device=device)
    torch.set_warn_always(True)
    try:
        copy.gather(units, stage)
        scatter_into(copy, units, stage)
    finally:
        torch.set_warn_always(False)


def test_another_stage_is_refused(make: Make, device: str) -> None:
    memory = Memory(mesh_layout("layer_major", 7, 4, 3, 4), device)
    copy = make(memory.layout, PARTS[0], 4)
    size = copy.num_bytes(1)
    before = memory.bytes()
    stages = [
        torch.zeros(size - 1, dtype=torch.uint8, device=device),
        torch.zeros(size + 1, dtype=torch.uint8, device=device),
        torch.zeros(size, dtype=torch.int8, device=device),
        torch.zeros(2 * size, dtype=torch.uint8, device=device)[::2],
        torch.zeros((1, size), dtype=torch.uint8, device=device),
        torch.zeros(size, dtype=torch.uint8, device="meta"),
    ]
    for stage in stages:
        for act in (copy.gather, copy.scatter_steps):
            with pytest.raises(ConfigError, match="stage is"):
                act(np.zeros(1, np.int32), stage)
    assert np.array_equal(memory.bytes(), before)


def test_rows_are_as_long_as_they_are_contiguous() -> None:
    def row_bytes(order: str, part: Shard) -> int:
        return StagePlan.of(mesh_layout(order, 7, 4, 3, 4, "mha", 16)[0], part, 4).row_bytes

    assert row_bytes("layer_major", PARTS[0]) == 4 * 4 * 16
    assert row_bytes("page_major", PARTS[1]) == 2 * 16
    assert row_bytes("heads before tokens", PARTS[0]) == 16
    assert row_bytes("heads before tokens", PARTS[2]) == 4 * 16
    assert row_bytes("padded tokens", PARTS[0]) == 4 * 16


_COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from prefixkv.memory import copy_triton as staging_triton

kernel = triton.jit(staging_triton._copy_rows)
constants = dict(fold=4, rows_a_unit=16, alignment=16, word=tl.int64, tile_rows=16, tile_width=64)
types = dict(slabs="*i64", offsets="*i64", units="*i32", stage="*i64", num_rows="i32")
types |= dict(row_words="i32")
for to_stage in (True, False):
    values = dict(constants, to_stage=to_stage)
    signature = dict(types, **dict.fromkeys(values, "constexpr"))
    names = list(signature)
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("slabs", "stage", "row_words")
        },
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx, ptx
"""


def test_the_kernel_compiles_for_a_gpu_and_moves_16_bytes_at_a_time(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses. Compiling needs no GPU, and says nothing of
    running on one."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", _COMPILE], env=environment, check=True, timeout=600)


def test_parts_that_are_scattered_together(
    make: Make, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of one unit page and in a single one, parts of one size and of several."""
    units = np.array([5, 0, 3, 6], np.int32)
    parts = [Shard(0, 3, 0, 1), Shard(0, 3, 1, 1), Shard(0, 2, 2, 2)]
    for step_bytes in (1, 1 << 30):
        monkeypatch.setattr(stage_copy, "_STEP_BYTES", step_bytes)
        memory = Memory(mesh_layout("layer_major", 7, 4, 3, 4, "mha", 8), device)
        expected = memory.bytes()
        stages = []
        for seed, part in enumerate(parts):
            copy = make(memory.layout, part, 4)
            num_bytes = copy.num_bytes(len(units))
            new = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
            expected[memory.places(tuple(units.tolist()), part, 4, 0, len(units))] = new
            stages.append((copy, torch.from_numpy(new).to(device)))
        scatter_together(stages, units)
        assert np.array_equal(memory.bytes(), expected)


def test_nothing_is_copied_where_one_of_several_stages_does_not_fit() -> None:
    memory = Memory(mesh_layout("layer_major", 7, 4, 1, 2, "mha", 8), "cpu")
    before = memory.bytes()
    copy = staging_copy(memory.layout, Shard(0, 1, 0, 1), 4)
    stages = [(copy, torch.zeros(num_bytes, dtype=torch.uint8)) for num_bytes in (64, 65)]
    with pytest.raises(ConfigError, match="65"):
        scatter_together(stages, np.array([5], np.int32))
    assert np.array_equal(memory.bytes(), before)
