"""A model as transformers runs it by itself: what an engine's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from prefixkv.engines.hf.models import PagedModel, copy_of


class Reference:
    """The same model with weights of its own. Owned by one thread.

    It computes with one thread: several, on a machine that has other work, wait for each other at
    every small kernel.
    """

    def __init__(self, model: PagedModel) -> None:
        self.model = copy_of(model)

    def save(self, folder: Path) -> None:
        """Write the config and the weights there, as `load_model` reads them."""
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def answer(self, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
        """What `generate` says after these tokens, the likeliest token each time. An end token ends
        it, and is in it."""
        prompt = torch.tensor([list(tokens)])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            said = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        finally:
            torch.set_num_threads(threads)
        answer: list[int] = said[0, len(tokens) :].tolist()
        return answer
