"""Makes a small Llama with random weights, a tokenizer of whole words, and two LoRA adapters
(`adapter-1`, `adapter-2`), for vLLM and SGLang. Run with the interpreter that has transformers:

    python vllm_model.py FOLDER HIDDEN LAYERS HEADS KV_HEADS HEAD_DIM DTYPE
"""

from __future__ import annotations

import sys

VOCABULARY = 2048
SEED = 7
ADAPTERS = (1, 2)
LORA_RANK = 4


def make(
    folder: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, dtype: str
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=2 * hidden,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,  # so that the best token is well ahead of the second
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(folder)
    for number in ADAPTERS:
        make_adapter(f"{folder}/adapter-{number}", number, hidden, layers, heads * head_dim)


def save_tokenizer(folder: str) -> None:
    """A tokenizer of whole words: `w17` is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def make_adapter(folder: str, seed: int, hidden: int, layers: int, q_size: int) -> None:
    """A LoRA adapter of the query projections."""
    import json
    from pathlib import Path

    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {}
    for layer in range(layers):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{at}.lora_A.weight"] = torch.randn(LORA_RANK, hidden) * 0.3
        weights[f"{at}.lora_B.weight"] = torch.randn(q_size, LORA_RANK) * 0.3
    Path(folder).mkdir()
    save_file(weights, f"{folder}/adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "bias": "none",
        "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (Path(folder) / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    _, folder, hidden, layers, heads, kv_heads, head_dim, dtype = sys.argv
    make(folder, int(hidden), int(layers), int(heads), int(kv_heads), int(head_dim), dtype)
