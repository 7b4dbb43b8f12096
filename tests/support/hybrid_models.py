"""Folders of tiny models with recurrent layers, or with sliding windows, and random weights: one of
each family that the engine of Hugging Face's models is tested with. Their answers are words of no
language, by the small model's tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixkv.engines.hf.small import save_tokenizer, small_tokenizer, speak_words

SEED: Final = 7

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_GDN: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 4, "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 12, "linear_value_head_dim": 12,
}  # fmt: skip
_MAMBA: Final[Mapping[str, Any]] = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 12, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    # Gated delta net, every fourth layer attention, experts.
    "qwen3_next": {**_GDN, **_EXPERTS},
    # Mamba 2, two layers attention, experts as a layer of their own. transformers bounds the step
    # from below where it computes several tokens, and not where it computes one: with the default
    # of 1e-3 the two differ, in `generate` too.
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe", "mamba", "attention"],
        "head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 12,
        "n_groups": 2, "chunk_size": 16, "time_step_min": 1e-6, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    # Granite 4: Mamba 2, every second layer attention.
    "granitemoehybrid": {
        "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 64, **_MAMBA,
    },
    "qwen3_5_text": _GDN,
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], **_MAMBA},
    # Mamba 2 and attention in each layer.
    "falcon_h1": {"num_hidden_layers": 3, "head_dim": 12, "mamba_d_ssm": 96, **_MAMBA},
    # Convolutions alone: a state of a few tokens.
    "lfm2": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "olmo_hybrid": _GDN,
    # Windows: every third layer attends to all tokens, with a rope of its own.
    "gemma3_text": {
        "num_hidden_layers": 6, "head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    # Windows: every second layer attends to all tokens; sinks in all of them; experts.
    "gpt_oss": {
        "num_hidden_layers": 4, "head_dim": 12, "sliding_window": 20, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip

WINDOWED: Final = ("gemma3_text", "gpt_oss")
"""Families with sliding windows; the others have recurrent layers."""


def config_of(family: str, **sizes: Any) -> Any:
    """Return the transformers config of one of the families, with some sizes replaced."""
    return AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **sizes})


def make_folder(family: str, folder: Path, seed: int = SEED) -> None:
    """Write config, random weights and tokenizer of one of the families to a folder."""
    tokenizer = small_tokenizer()
    end = tokenizer.get_vocab()["<|end|>"]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        config = config_of(family, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end)
        model = AutoModelForCausalLM.from_config(config)
    speak_words(model.lm_head.weight, end)
    model.save_pretrained(folder)
    save_tokenizer(folder)
