"""A model as transformers runs it by itself, to compare an engine's answers with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from prefixkv.engines.hf.models import PagedModel, unpaged_copy


class Reference:
    """A copy of a model with its own weights. Owned by one thread, and computes with one: several,
    on a busy machine, wait for each other at every small kernel."""

    def __init__(self, model: PagedModel) -> None:
        self.model = unpaged_copy(model)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def answer(self, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the greedy answer of transformers' own `generate`, its end token included."""
        prompt = torch.tensor([list(tokens)], device=self.model.device)
        # The number of threads is the process's, not this call's: put it back in any case.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            generated = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        finally:
            torch.set_num_threads(threads)
        answer: list[int] = generated[0, len(tokens) :].tolist()
        return answer
