"""Runs in vLLM's environment: makes a tiny model whose layers keep a window, or a state, with
random weights.

python -m tests.integration.vllm.window_model FAMILY FOLDER WINDOW
"""

import sys
from typing import Any

from benchmarks.vllm_model import SEED, VOCABULARY, save_tokenizer

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.08,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 6, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Granite 4: four layers of Mamba 2, and two of attention.
    "granitemoehybrid": {
        "num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "attention"] * 2,
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "mamba_chunk_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 256, "position_embedding_type": "rope",
        "attention_multiplier": 0.18,
    },
}  # fmt: skip


def make(family: str, folder: str, window: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family], sliding_window=window)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    save_tokenizer(folder)


if __name__ == "__main__":
    _, family, folder, window = sys.argv
    make(family, folder, int(window))
