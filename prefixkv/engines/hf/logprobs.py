"""Log-probabilities of tokens as OpenAI's interface has them: log_softmax of the logits in float32,
before temperature, top_k and top_p. The first token's travel with it from prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from prefixkv.engines.hf.requests import LEAST, TokenLogprob

_ROWS: Final = 64  # positions whose float32 distributions are in memory at once


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """At most `_ROWS` distributions are in memory. O(rows * vocabulary).

    Args:
        logits: [len(tokens), vocabulary], any float type and device.
        num_top: the number of likeliest tokens per row; never more than there are are returned.
    """
    found: list[TokenLogprob] = []
    for begin in range(0, len(tokens), _ROWS):
        some = slice(begin, begin + _ROWS)
        logs = torch.log_softmax(logits[some].float(), -1)
        logs = logs.nan_to_num(nan=LEAST, neginf=LEAST).clamp_(LEAST, 0.0)
        ids = torch.tensor(tokens[some], device=logs.device)
        chosen = logs.gather(1, ids[:, None]).squeeze(1).tolist()
        # One `topk` for the most that any row needs: its first n are the n likeliest of each row.
        most = min(max(num_top[some]), logs.shape[-1])
        best = logs.topk(most)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, logprob, (likely, values), num in zip(
            tokens[some], chosen, rows, num_top[some], strict=True
        ):
            top = tuple(zip(likely[:num], values[:num], strict=True))
            found.append(TokenLogprob(int(token), logprob, top))
    return found
