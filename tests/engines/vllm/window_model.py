"""Runs in vLLM's environment: makes a tiny model whose layers keep a window, with random weights.

python window_model.py FAMILY FOLDER WINDOW
"""

from __future__ import annotations

import sys
from typing import Any

VOCABULARY, SEED = 2048, 7
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
}  # fmt: skip


def make(family: str, folder: str, window: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family], sliding_window=window)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    _, family, folder, window = sys.argv
    make(family, folder, int(window))
