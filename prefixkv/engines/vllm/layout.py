"""vLLM's KV tensors as a pool of pages, and the refusal of caches that cannot be such a pool.

vLLM gives a view [block, head, token, content] of each layer. Where the kernels are known to keep
plain K and V (or a latent vector) there, servers may differ in block size and tensor parallelism.
Otherwise a block travels whole, one run of bytes per layer; a tag names all that the bytes depend
on, and servers with different tags, block sizes or shares of heads refuse each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final

import torch

from prefixkv import KVPool, PoolGroup
from prefixkv.engines.vllm.groups import LATENT, BlockGroups
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.errors import ConfigError
from prefixkv.spi import ITEMSIZE

_log = logging.getLogger("vllm.prefixkv")

PLAIN: Final = (
    "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN",
    "CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA",
)  # fmt: skip
"""Kernels of vLLM 0.32.0 that read `content` as K and then V of a head, or as the latent vector."""

_PARALLEL: Final = {
    "pipeline_parallel_size": "pipeline stages",
    "data_parallel_size": "data parallel ranks: start one server for each",
    "decode_context_parallel_size": "decode context parallel ranks",
    "prefill_context_parallel_size": "prefill context parallel ranks",
}


def check_engine(options: ConnectorOptions, config: Any, groups: BlockGroups) -> None:
    """Raise ConfigError for a setting, the connector's or vLLM's (`VllmConfig`), that transfers do
    not go with."""
    for name, feature in _PARALLEL.items():
        if (size := getattr(config.parallel_config, name)) > 1:
            raise ConfigError(f"{name} is {size}, must be 1: prefixkv's connector has no {feature}")
    kept = "a state" if groups.has_states else "a window"
    instead = "" if groups.has_states else ", or start vLLM with --disable-hybrid-kv-cache-manager"
    for name in ("host_memory", "compute_below", "recompute_below", "policy"):
        if groups.windows and (value := getattr(options, name)):
            raise ConfigError(
                f"{name}: is {value!r}; leave it out with a model whose layers keep {kept}{instead}"
            )
    model, cache, has_host = config.model_config, config.cache_config, bool(options.host_memory)
    # NIXL has registered the KV memory, which on a CPU never moves.
    may_move = config.device_config.device_type != "cpu"
    refusals = {
        "the model is an encoder-decoder, whose KV is not transferred": model.is_encoder_decoder,
        "enable_sleep_mode is True, must be False (no --enable-sleep-mode): a server that wakes up "
        "has its KV in other memory than prefixkv's connector has registered": may_move
        and model.enable_sleep_mode,
        "host_memory: this server is a kv_producer alone; it is for decode, which loads from there "
        "what prefill need not send": has_host and not config.kv_transfer_config.is_kv_consumer,
        "host_memory: the prefix cache is off (--no-enable-prefix-caching), and host memory has "
        "the blocks that it evicts": has_host and not cache.enable_prefix_caching,
    }
    if groups.has_states:
        refusals |= {
            "--use-replayssm keeps a part of each state elsewhere, which prefixkv's connector does "
            "not transfer": cache.use_replayssm,
            f"--prefix-match-unit is {cache.prefix_match_unit}: with states prefixkv's connector "
            f"takes whole blocks alone, of {groups.block_size} tokens": cache.prefix_match_unit
            not in (None, groups.block_size),
        }
    for why, is_so in refusals.items():
        if is_so:
            raise ConfigError(why)
    if may_move and model.enable_cumem_allocator:
        _log.warning(
            "--enable-cumem-allocator: the KV memory must not be released, nor the server be put "
            "to sleep, since prefixkv's connector has registered it"
        )


def is_plain(spec: Any, backends: Iterable[str]) -> bool:
    # Each further field of a spec means bytes in a block besides K and V, or K and V of two sizes.
    return (
        {*backends} <= {*PLAIN}
        and spec.kv_quant_mode.name in ("NONE", "FP8_PER_TENSOR")
        and spec.state_content_bytes is None
        and spec.num_head_slots is None
        and spec.head_size_v in (0, spec.head_size)
    )


def pool_of(
    kv_caches: Mapping[str, torch.Tensor], kv_cache: Any, tag: str, *, plain: bool = False
) -> KVPool:
    """Return a pool with block numbers as page numbers, over the layers that keep every token. Each
    window group, and each group of states, is a group of it. Raises ConfigError if a block is not
    one run of bytes per layer.

    `kv_caches` are by layer name, [kernel block, head, token, content]; a block of the manager is
    one or more consecutive kernel blocks. `plain` is the result of `is_plain`; kernel blocks that
    form no array of tokens are opaque all the same.
    """
    groups, num_blocks = BlockGroups.of(kv_cache), kv_cache.num_blocks
    of = kv_cache.kv_cache_groups
    # A state is not an array of tokens, and a block is one group's now and another's then.
    plain = plain and not groups.has_states
    pool = _pool_of_group(kv_caches, of[groups.full], num_blocks, tag, plain)
    windows = [
        PoolGroup(
            one.name,
            _pool_of_states(kv_caches, of[one.number], pool, tag)
            if one.is_state
            else _pool_of_group(kv_caches, of[one.number], num_blocks, tag, plain),
            one.window,
        )
        for one in groups.windows
    ]
    return pool.with_groups(*windows) if windows else pool


def _pool_of_group(
    kv_caches: Mapping[str, torch.Tensor], group: Any, num_blocks: int, tag: str, plain: bool
) -> KVPool:
    spec = group.kv_cache_spec
    names = [name for name in group.layer_names if name in kv_caches]
    # Layers may share one tensor, which is registered once. Reversed, so that the first name stays.
    seen = {kv_caches[name].data_ptr(): name for name in reversed(names)}
    names = [name for name in names if name in seen.values()]
    # With MLA each rank has the whole latent vector, which counts as one head here; vLLM's own
    # number for it differs.
    is_latent = type(spec).__name__ == LATENT
    heads = 1 if is_latent else spec.num_kv_heads
    # 1. Plain: the pool has named axes, so servers of another block size or TP can read it.
    if plain and (views := [_tokens(kv_caches[name], num_blocks) for name in names])[0] is not None:
        whole = [view for view in views if view is not None]
        if is_latent:
            latent = [view.squeeze(1) for view in whole]
            return KVPool.from_tensors(latent, page_size=spec.block_size)
        k_and_v = [view.view(*view.shape[:3], 2, spec.head_size) for view in whole]
        axes = "page", "head", "token", "kv", "dim"
        shape = {"num_kv_heads": heads, "head_dim": spec.head_size}
        return KVPool.from_tensors(k_and_v, page_size=spec.block_size, axes=axes, **shape)
    # 2. Opaque: bytes, under a tag that the other server must have too.
    blocks = [_blocks(name, kv_caches[name], num_blocks) for name in names]
    return _opaque(blocks, spec.block_size, heads, tag)


def _pool_of_states(
    kv_caches: Mapping[str, torch.Tensor], group: Any, full: KVPool, tag: str
) -> KVPool:
    """Return a pool over the states of a group: of each layer the bytes of a block, with those that
    fill it up to a block of `full`, in whose memory they lie. Raises ConfigError as `pool_of`."""
    num_blocks, block_bytes = full.layout.num_pages, full.layout.slab_page_bytes
    content = group.kv_cache_spec.state_content_size_bytes
    if content > block_bytes:
        raise ConfigError(
            f"{group.layer_names[0]}: a state has {content} bytes, a block of KV {block_bytes}"
        )
    views = []
    for name in group.layer_names:
        cache = kv_caches[name]  # [block, 1, 1, bytes of a state]
        if cache.shape[0] != num_blocks or cache[0].numel() * cache.itemsize != content:
            raise ConfigError(
                f"{name}: states are {tuple(cache.shape)}, must be {num_blocks} of {content} bytes"
            )
        raw = cache.view(torch.uint8)
        views.append(raw.as_strided((num_blocks, block_bytes), (raw.stride(0), 1)))
    return _opaque(views, full.layout.page_size, full.layout.num_kv_heads, tag)


def _opaque(views: list[torch.Tensor], page_size: int, num_heads: int, tag: str) -> KVPool:
    return KVPool.from_tensors(
        views, page_size=page_size, axes=("page", "packed"), num_kv_heads=num_heads, opaque=tag
    )


def _tokens(cache: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """Return a view [num_blocks, head, token of the block, content]; None where the tokens of a
    block's kernel blocks are not consecutive in memory."""
    cache = _as_known_dtype(cache)
    parts, (_, heads, tokens, content) = cache.shape[0] // num_blocks, cache.shape
    step, *inner = cache.stride()
    if parts > 1 and step != tokens * inner[1]:
        return None
    return cache.as_strided((num_blocks, heads, parts * tokens, content), (parts * step, *inner))


def _blocks(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    parts, rest = divmod(cache.shape[0], num_blocks)
    if rest:
        raise ConfigError(f"{name} has {cache.shape[0]} kernel blocks for {num_blocks} blocks")
    cache = _as_known_dtype(cache)
    shape, strides = (parts, *cache.shape[1:]), cache.stride()
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    # In order of stride each axis must continue where the smaller ones end. A gap would mean bytes
    # of another block in between, which a transfer would overwrite.
    run = 1
    for stride, size in dims:
        if stride != run:
            raise ConfigError(
                f"{name} has strides {tuple(strides)} for a shape of {tuple(cache.shape)}: a block "
                "is not one run of bytes. Choose a layout whose blocks are, as LBHNC "
                "(VLLM_KV_CACHE_LAYOUT)"
            )
        run *= size
    return cache.as_strided((num_blocks, prod(shape)), (parts * strides[0], 1))


def _as_known_dtype(cache: torch.Tensor) -> torch.Tensor:
    known = str(cache.dtype).removeprefix("torch.") in ITEMSIZE
    return cache if known else cache.view(torch.uint8)


def event_on(kv_caches: Mapping[str, torch.Tensor]) -> Any:
    """Record a CUDA event on the current stream, and return it; None on a CPU."""
    # On a CPU the forward pass has returned when this is called, so its KV is written.
    device = next(iter(kv_caches.values())).device
    is_gpu = device.type == "cuda"
    return torch.cuda.current_stream(device).record_event() if is_gpu else None
