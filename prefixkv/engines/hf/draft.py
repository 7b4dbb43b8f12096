"""A draft head behind a model, of the kind of EAGLE and MTP: one attention layer with KV of its
own, which guesses the next token from the model's last hidden state and the newest token. Its
weights are random: it stands for a real one, to show where a draft's KV lies and what travels with
it.

Slot i of its KV is made of (hidden state of token i - 1, token i). So no slot depends on a token
behind its page, and whatever page is cached is the same for every text that goes on from it. A
draft usually keeps (hidden state of token i, token i + 1) in slot i, which is the same one slot
earlier: then the last slot of a page is another one for each text behind it.

Its pages have the model's page ids: an aligned group of the pool.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from prefixkv.engines.hf.attention import FlatPool, GroupPlan
from prefixkv.engines.hf.identity import weights_digest
from prefixkv.spi import ConfigError, Pages, at_least

_BEHIND: Final = struct.Struct("<i")  # of a hidden state in `aux`: the tokens that it is behind
_ROPE_BASE: Final = 10_000.0
_EPSILON: Final = 1e-6


Tokens = Sequence[int] | np.ndarray[Any, Any]


class DraftPart(NamedTuple):
    """Some slots of one text's draft KV, from slot `start` on."""

    row: Pages  # its pages, which hold all its slots
    start: int
    tokens: Tokens  # one of each slot
    before: torch.Tensor  # the model's hidden state behind the token before each: [slots, width]


class DraftHead(torch.nn.Module):
    """A draft head with random weights. Owned by its model's thread.

    Args:
        model: the transformers model. Its embedding, and its head, which turns hidden states into
            logits, are used as they are.
        seed: seed of the weights; equal on all workers.
        num_heads: its query heads.
        num_kv_heads, head_dim: of its KV, which need not be the model's.

    Raises ConfigError for sizes that cannot be.

    `name` is that of its group in a pool. It has a digest of its weights: workers with different
    heads, or of which one has none, refuse each other by it.
    """

    both: torch.nn.Parameter
    q: torch.nn.Parameter
    k: torch.nn.Parameter
    v: torch.nn.Parameter
    o: torch.nn.Parameter
    up: torch.nn.Parameter
    down: torch.nn.Parameter

    def __init__(
        self,
        model: Any,
        seed: int = 0,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
    ) -> None:
        super().__init__()
        at_least(1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_heads of a draft is {num_heads}, must be a multiple of {num_kv_heads}"
            )
        if head_dim % 2:
            raise ConfigError(f"head_dim of a draft is {head_dim}, must be even")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.width = width = int(model.config.get_text_config().hidden_size)
        # In a tuple: they are not among this module's own weights.
        self._model = model.get_input_embeddings(), model.get_output_embeddings()
        like = next(model.parameters())
        sizes = {
            "both": (width, 2 * width),
            "q": (num_heads * head_dim, width),
            "k": (num_kv_heads * head_dim, width),
            "v": (num_kv_heads * head_dim, width),
            "o": (width, num_heads * head_dim),
            "up": (2 * width, width),
            "down": (width, 2 * width),
        }
        # In numbers of its own, on the CPU: the same on every device.
        numbers = torch.Generator().manual_seed(seed)
        for name, (rows, columns) in sizes.items():
            weight = torch.randn(rows, columns, generator=numbers) / math.sqrt(columns)
            weight = weight.to(dtype=like.dtype, device=like.device)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.name = f"draft {weights_digest(self)}"

    @property
    def aux_bytes(self) -> int:
        """Bytes that `pack_hidden` takes of a room's `aux` for this draft."""
        return _BEHIND.size + self.width * self.both.dtype.itemsize

    @torch.inference_mode()
    def forward(self, flat: FlatPool, parts: Sequence[DraftPart]) -> torch.Tensor:
        """Write the draft KV of some slots of several texts to pages, and return the head's own
        hidden states: [slots of all parts, width].

        Args:
            flat: the memory of the draft's group.
            parts: of each text the slots, which follow those that are written; at least one.
        """
        device = flat.pool.device
        starts = [part.start for part in parts]
        ends = [part.start + len(part.tokens) for part in parts]
        plan = GroupPlan(flat, [part.row for part in parts], starts, ends, device)
        places = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
        ids = np.concatenate([np.asarray(part.tokens, np.int64) for part in parts])
        embedding, _ = self._model
        embedded = embedding(torch.from_numpy(ids).to(device))
        before = _normed(torch.cat([part.before for part in parts]))
        hidden = embedded + F.linear(torch.cat([before, _normed(embedded)], 1), self.both)
        # 1. Attention, by the paths of the model's own.
        seen = _normed(hidden)
        turn = self._turn(torch.from_numpy(places).to(device))
        q, k = (_turned(self._heads(seen, weight), turn) for weight in (self.q, self.k))
        v = self._heads(seen, self.v)
        plan.write(0, k, v)
        found = plan.attend(0, q, k, v, None)
        hidden = hidden + F.linear(found.flatten(2)[0], self.o)
        # 2. The rest of a layer.
        hidden = hidden + F.linear(F.silu(F.linear(_normed(hidden), self.up)), self.down)
        assert isinstance(hidden, torch.Tensor)
        # A guess is verified, so NaN in one ends no answer. Kept it would spoil all later guesses.
        if not math.isfinite(float(hidden.sum(dtype=torch.float32))):
            plan.erase(~hidden.isfinite().all(1))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits of the tokens that follow: [rows, vocabulary].

        hidden: of `forward`, [rows, width].
        """
        _, head = self._model
        logits: torch.Tensor = head(_normed(hidden))
        return logits

    def _heads(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return one of the draft's projections by heads: [1, heads, slots, dim]."""
        return F.linear(hidden, weight).view(1, len(hidden), -1, self.head_dim).transpose(1, 2)

    def _turn(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of the draft's rotary embedding: [slots, dim / 2] each."""
        half = torch.arange(self.head_dim // 2, dtype=torch.float32, device=places.device)
        angle = places[:, None] * _ROPE_BASE ** (-2 * half / self.head_dim)
        return angle.cos(), angle.sin()


def _normed(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a draft's hidden states with a mean square of 1."""
    return F.rms_norm(rows, rows.shape[-1:], eps=_EPSILON)


def _turned(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a draft's queries or keys, [1, heads, slots, dim], turned by their places."""
    cos, sin = (one.to(heads.dtype) for one in turn)
    a, b = heads[..., : cos.shape[1]], heads[..., cos.shape[1] :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# --- hidden states that travel --------------------------------------------------------------------


def pack_hidden(hidden: torch.Tensor, num_tokens: int) -> bytes:
    """Pack the model's hidden state, [width], behind `num_tokens` tokens, for a room's `aux`: the
    draft's next slot is made of it."""
    return _BEHIND.pack(num_tokens) + hidden.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def unpack_hidden(
    aux: bytes, num_tokens: int, head: DraftHead
) -> tuple[bytes, torch.Tensor | None]:
    """Return what stands before a hidden state that `pack_hidden` has put at the end of a room's
    `aux`, and the state on the head's device, [width]; None if it is behind another number of
    tokens.

    Raises ValueError for an `aux` that is too short.
    """
    num_bytes = head.aux_bytes
    rest, packed = aux[:-num_bytes], aux[-num_bytes:]
    if len(packed) != num_bytes:
        raise ValueError(f"aux of {len(aux)} bytes, a hidden state has {num_bytes}")
    # That of an earlier attempt: nothing was sent for this one.
    if _BEHIND.unpack_from(packed)[0] != num_tokens:
        return rest, None
    state = torch.frombuffer(bytearray(packed[_BEHIND.size :]), dtype=head.both.dtype)
    return rest, state.to(head.both.device)


# --- prefill --------------------------------------------------------------------------------------


def draft_part(
    head: DraftHead, row: Pages, start: int, tokens: Tokens, hidden: torch.Tensor,
    last: torch.Tensor | None,
) -> DraftPart:  # fmt: skip
    """Return the slots of a chunk of a prompt, for `DraftHead.forward`.

    Args:
        row, start, tokens: as of DraftPart.
        hidden: the model's hidden states of the chunk's tokens, or from the one before it on:
            [tokens or one more, width].
        last: that of the token before the chunk, where `hidden` has it not; None at the beginning
            of a text, whose first slot has zeros.
    """
    if len(hidden) == len(tokens):
        last = hidden.new_zeros(head.width) if last is None else last
        hidden = torch.cat([last[None], hidden])
    return DraftPart(row, start, tokens, hidden[:-1])
