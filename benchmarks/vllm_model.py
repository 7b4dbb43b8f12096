"""Makes a small Llama with random weights, and a tokenizer of whole words. Run with the
interpreter that has transformers:

    python vllm_model.py FOLDER HIDDEN LAYERS HEADS KV_HEADS HEAD_DIM DTYPE
"""

from __future__ import annotations

import sys

VOCABULARY = 2048
SEED = 7


def make(
    folder: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, dtype: str
) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    _, folder, hidden, layers, heads, kv_heads, head_dim, dtype = sys.argv
    make(folder, int(hidden), int(layers), int(heads), int(kv_heads), int(head_dim), dtype)
