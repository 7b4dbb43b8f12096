"""A model as transformers runs it by itself, to compare an engine's answers with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from prefixkv.engines.hf.models import PagedModel, unpaged_copy


class Reference:
    """A copy of a model with its own weights. Owned by one thread.

    It computes with one thread. Several threads, on a machine that has other work, wait for each
    other at every small kernel.
    """

    def __init__(self, model: PagedModel) -> None:
        self.model = unpaged_copy(model)

    def save(self, folder: Path) -> None:
        """Write the reference model's config and weights to a folder, for `load_model`."""
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def answer(self, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the reference answer to these tokens, greedy, by transformers' own `generate`.

        An end token ends the answer, and is part of it.
        """
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
