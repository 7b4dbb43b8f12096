"""A plug-in for SGLang on a CPU, so that models with windows and states run there.

SGLang's attention in torch writes a window layer's KV to its own pool, and reads it by the slots of
the other one; here it reads what it wrote. Of short convolutions SGLang has kernels for GPUs alone;
here they are in torch, on the same states of the same slots.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
CONVOLUTIONS = "sglang.srt.models.lfm2"


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{ATTENTION}.{name}", _by_own_slots, HookType.AROUND)
    HookRegistry.register(f"{CONVOLUTIONS}.causal_conv1d_fn", _conv, HookType.REPLACE)
    HookRegistry.register(f"{CONVOLUTIONS}.causal_conv1d_update", _conv_step, HookType.REPLACE)
    # What other models' layers import, which are not run here.
    sys.modules["sgl_kernel.mamba"] = module = ModuleType("sgl_kernel.mamba")
    module.__getattr__ = lambda name: None  # type: ignore[method-assign]
    for name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"):
        setattr(torch.ops.sgl_kernel, name, None)


def _by_own_slots(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **named: Any
) -> Any:
    pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None or not mapping[layer.layer_id][1]:
        return original(backend, q, k, v, layer, *args, **named)
    table = pool.translate_loc_from_full_to_swa(rows.req_to_token.long())
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    try:
        return original(backend, q, k, v, layer, *args, **named)
    finally:
        backend.req_to_token_pool = rows


def _conv(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, *, query_start_loc: Any, cache_indices: Any,
    has_initial_state: Any, conv_states: torch.Tensor, activation: Any = None, **_more: Any,
) -> torch.Tensor:  # fmt: skip
    """`x` [channels, tokens of all requests]."""
    assert activation is None
    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        mine = x[:, ends[i] : ends[i + 1]]
        before = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        seen = torch.cat([before.to(x.dtype), mine], 1)
        windows = seen.unfold(1, weight.shape[1], 1)
        out[:, ends[i] : ends[i + 1]] = (windows * weight[:, None]).sum(-1)
        conv_states[slot] = seen[:, -conv_states.shape[-1] :]
    return out if bias is None else out + bias[:, None]


def _conv_step(
    x: torch.Tensor, conv_states: torch.Tensor, weight: torch.Tensor, bias: Any = None,
    activation: Any = None, *, conv_state_indices: Any, **_more: Any,
) -> torch.Tensor:  # fmt: skip
    """`x` [requests, channels]: a token each."""
    assert activation is None
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        seen = torch.cat([conv_states[slot].to(x.dtype), x[i][:, None]], 1)
        out[i] = (seen * weight).sum(-1)
        conv_states[slot] = seen[:, 1:]
    return out if bias is None else out + bias
