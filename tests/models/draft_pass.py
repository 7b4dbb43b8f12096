"""A draft head computed in one pass, without pages; and what both workers do with theirs, watched
step by step and held against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from prefixkv.engines.hf.draft import DraftHead
from tests.models.hf_world import Reference, World

OFF = 1e-2  # what is wrong differs by more, what is right by less than a tenth of that


def hidden_states(reference: Reference, tokens: Any) -> torch.Tensor:
    """The model's hidden state behind each of these tokens, by one forward: [tokens, width]."""
    ids = torch.as_tensor(np.asarray(tokens, np.int64), device=reference.model.device)[None]
    with torch.no_grad():
        found: torch.Tensor = reference.model.base_model(ids).last_hidden_state[0]
    return found


def plain_draft(
    head: DraftHead, before: torch.Tensor, tokens: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V of each slot, [slots, heads, dim], and the draft's logits behind it.

    before: the hidden state that each slot is made of, [slots, width]; tokens: its token.
    """
    embedding, to_logits = head._model
    num = len(before)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def heads(rows: torch.Tensor, weight: torch.Tensor, turned: bool) -> torch.Tensor:
        found = (rows @ weight.T).view(num, -1, head.head_dim)
        if not turned:
            return found
        half = head.head_dim // 2
        angle = torch.arange(num)[:, None] * 1e4 ** (-torch.arange(half) / half)
        as_complex = torch.complex(found[..., :half], found[..., half:])
        moved = as_complex * torch.polar(torch.ones(()), angle)[:, None].to(as_complex.device)
        return torch.cat([moved.real, moved.imag], -1)

    embedded = embedding(torch.as_tensor(np.asarray(tokens, np.int64), device=before.device))
    hidden = embedded + torch.cat([normed(before), normed(embedded)], 1) @ head.both.T
    seen = normed(hidden)
    q, k = heads(seen, head.q, True), heads(seen, head.k, True)
    v = heads(seen, head.v, False)
    group = head.num_heads // head.num_kv_heads
    later = torch.ones(num, num, dtype=torch.bool, device=before.device).triu(1)
    outs = []
    for at in range(head.num_heads):
        scores = q[:, at] @ k[:, at // group].T / head.head_dim**0.5
        outs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, at // group])
    hidden = hidden + torch.cat(outs, 1) @ head.o.T
    hidden = hidden + F.silu(normed(hidden) @ head.up.T) @ head.down.T
    return k, v, to_logits(normed(hidden))


def one_pass(
    reference: Reference, head: DraftHead, tokens: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `plain_draft`, of a text: its hidden states by one forward of the model."""
    hidden = hidden_states(reference, tokens)
    before = torch.cat([hidden.new_zeros(1, head.width), hidden[:-1]])
    with torch.no_grad():
        return plain_draft(head, before, tokens)


def fit(reference: Reference, head: DraftHead, texts: list[list[int]], steps: int) -> None:
    """Train the head a little on what the model says, so that some of its guesses are right."""
    weights = [one.requires_grad_(True) for one in head.parameters()]
    by = torch.optim.Adam(weights, 3e-3)
    data = [(text, hidden_states(reference, text)) for text in texts]
    for _ in range(steps):
        loss = torch.zeros((), device=reference.model.device)
        for text, hidden in data:
            before = torch.cat([hidden.new_zeros(1, head.width), hidden[:-1]])
            logits = plain_draft(head, before, text)[2]
            loss = loss + F.cross_entropy(logits[:-1], torch.tensor(text[1:], device=logits.device))
        by.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        by.step()
    for one in weights:
        one.requires_grad_(False)


class Watch:
    """The draft of both workers of a world: the bytes that prefill sends, those that decode begins
    with, and each guess with the text that it was made behind.

    A slot depends on the tokens up to it, so it is known by them.
    """

    def __init__(self, world: World, reference: Reference) -> None:
        self.world, self.reference = world, reference
        head = world.decode.model.draft
        assert head is not None
        self.head = head
        self.sent: dict[tuple[int, ...], set[bytes]] = {}
        self.arrived = 0  # slots with bytes that prefill has sent
        self.guessed: list[tuple[list[int], torch.Tensor]] = []
        self.sizes = world.decode.node.pool.layout.page_size
        self._watch_prefill()
        self._watch_decode()

    def bytes_at(self, engine: Any, pages: Any, position: int) -> bytes:
        pool = engine.node.pool.group(self.head.name)
        page, slot = divmod(position, self.sizes)
        at = int(pages[page])
        both = torch.cat([pool.k(0)[at, slot].flatten(), pool.v(0)[at, slot].flatten()])
        return both.cpu().numpy().tobytes()

    def _watch_prefill(self) -> None:
        engine = self.world.prefill
        send = engine.node.send_chunk
        done: dict[str, int] = {}

        def sending(req: Any, end: int, *more: Any) -> int:
            tokens = tuple(req.tokens.tolist())
            for position in range(done.get(req.rid, 0), end):
                found = self.bytes_at(engine, req.pages, position)
                self.sent.setdefault(tokens[: position + 1], set()).add(found)
            done[req.rid] = end
            return send(req, end, *more)

        engine.node.send_chunk = sending  # type: ignore[method-assign, assignment]

    def _watch_decode(self) -> None:
        engine = self.world.decode
        drafting = engine._drafting
        assert drafting is not None
        begin, step, head = drafting.begin, drafting.step, drafting._head

        def beginning(req: Any) -> bytes:
            tokens = tuple(req.tokens.tolist())
            for position in range(req.kv_len):
                here = self.bytes_at(engine, req.pages, position)
                self.arrived += here in self.sent.get(tokens[: position + 1], ())
                # What was not in the cache, nor on its way to another, has prefill's bytes.
                if position >= req.hit_tokens + req.shared_tokens and not req.resumed:
                    assert here in self.sent[tokens[: position + 1]]
            return begin(req)

        class Noting:
            def __call__(self, *given: Any) -> torch.Tensor:
                found: torch.Tensor = head(*given)
                return found

            def logits(self, hidden: torch.Tensor) -> torch.Tensor:
                found.append(head.logits(hidden))
                return found[-1]

            both, aux_bytes = head.both, head.aux_bytes

        found: list[torch.Tensor] = []

        def stepping(node: Any, reqs: list[Any]) -> Any:
            texts = [req.tokens.tolist() for req in reqs if req in drafting._states]
            found.clear()
            result = step(node, reqs)
            if texts:
                self.guessed += zip(texts, found[0], strict=True)
            return result

        drafting._head = Noting()  # type: ignore[assignment]
        drafting.begin, drafting.step = beginning, stepping  # type: ignore[method-assign]

    def worst_guess(self) -> float:
        """By how much the logits of a guess differ from those of the draft in one pass, at most."""
        worst = 0.0
        known: list[tuple[list[int], torch.Tensor]] = []
        for text, logits in sorted(self.guessed, key=lambda one: -len(one[0])):
            whole = next((by for longer, by in known if longer[: len(text)] == text), None)
            if whole is None:
                whole = one_pass(self.reference, self.head, text)[2]
                known.append((text, whole))
            worst = max(worst, float((whole[len(text) - 1] - logits).abs().max()))
        return worst

    def worst_page(self) -> float:
        """By how much the draft's KV in the pages of both trees differs from that of one pass, at
        most: of each cached page, whoever has written it."""
        worst = 0.0
        for engine in (self.world.prefill, self.world.decode):
            pool = engine.node.pool.group(self.head.name)
            for node in engine.node.scheduler.pages.cache.nodes():
                if node.children:
                    continue
                keys, ids, at = [], [], node
                while at.parent is not None:
                    keys.insert(0, bytes(at.key))
                    ids.insert(0, bytes(at.pages))
                    at = at.parent
                tokens = np.frombuffer(b"".join(keys), np.int32)
                pages = torch.from_numpy(np.frombuffer(b"".join(ids), np.int32).copy()).long()
                k, v, _ = one_pass(self.reference, self.head, tokens)
                for kind, expected in ((pool.k(0), k), (pool.v(0), v)):
                    here = kind[pages].flatten(0, 1)
                    worst = max(worst, float((here - expected).abs().max()))
        return worst

    def check(self) -> None:
        """Nothing differs by more than sums in another order do."""
        assert self.arrived
        assert self.guessed
        assert self.worst_guess() < OFF / 10
        assert self.worst_page() < OFF / 10
