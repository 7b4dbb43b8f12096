"""Random workloads for the engine of Hugging Face's models: conversations, shared prompts, samples
drawn with seeds, aborts, pools that are too small for all at once; every answer compared with the
model by itself.

`fuzz/run.py engine` runs many of them, `tests/integration/hf` a few.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixkv.engines.hf import PagedModel, Sampling
from prefixkv.engines.hf.engine import draw
from tests.support.hf_world import Answer, Reference, World, choose_plainly

_ORDERS = ("layer_major", "page_major")


@dataclass
class Found:
    """What the rounds have shown: how many answers were compared, and how often what."""

    answers: int = 0
    tokens: int = 0
    near_ties: int = 0  # answers that part where two tokens are as likely, but for rounding
    aborted: int = 0
    hit_tokens: int = 0
    logprobs: int = 0  # tokens whose log-probabilities were compared
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Storm:
    """Bursts of some conversations, with one prompt several times over, and aborts at any time."""

    talks: int
    rounds: int
    bursts: Sequence[int]  # requests at once
    more: Sequence[int]  # tokens behind what was said
    longest: int  # tokens of a prompt
    again: float  # chance that a prompt comes twice
    answers: Sequence[int]  # tokens
    steps: int  # of a round, at most
    abort: float  # chance in a step
    logprobs: int | None = None  # of each token, to compare more than which is the likeliest

    def run(
        self, world: World, seed: int, counted: Callable[[set[str]], Iterable[int]] = lambda _: ()
    ) -> set[str]:
        """Play the storm to its end, auditing decode. Returns the requests that were aborted.

        What happens in a round hangs on the machine's speed. So the storm goes on, for at most
        five times its rounds, while any of `counted` is 0: it is called with the requests that
        were aborted, and gives counts of what the test is to have seen.
        """
        chance, draw_ids = random.Random(seed), np.random.default_rng(seed)
        talks = [draw_ids.integers(0, 256, 120).tolist() for _ in range(self.talks)]
        aborted: set[str] = set()
        for number in range(5 * self.rounds):
            if number >= self.rounds and all(counted(aborted)):
                break
            for _ in range(chance.choice(self.bursts)):
                more = draw_ids.integers(0, 256, chance.choice(self.more)).tolist()
                tokens = (chance.choice(talks) + more)[: self.longest]
                for _ in range(1 + (chance.random() < self.again)):
                    rid, most = f"r{len(world.answers)}", chance.choice(self.answers)
                    sampling = Sampling(ignore_end=True, logprobs=self.logprobs)
                    world.ask(rid, tokens, max_new_tokens=most, sampling=sampling)
            for _ in range(chance.randint(1, self.steps)):
                world.step()
                waiting = [one.ask.rid for one in world.answers if not one.done]
                if waiting and chance.random() < self.abort:
                    rid = chance.choice(waiting)
                    aborted.add(rid)
                    world.decode.abort(rid)
            whole = [one for one in world.answers if one.done and one.ask.rid not in aborted]
            if whole and chance.random() < 0.5:
                one = chance.choice(whole)
                said = [*one.ask.tokens.tolist(), *one.tokens[0]]
                talks[chance.randrange(self.talks)] = said[:260]
            world.decode.audit()
        world.run()
        return aborted


def checkpoint_counts(world: World) -> list[int]:
    """What a storm of a model whose prefill goes on from checkpoints is to have seen."""
    points = world.prefill.node.pages.saves
    stats = world.decode.stats()
    counts = [stats[name] for name in ("retractions", "skipped_tokens", "evicted_pages")]
    return [points.evicted, world.prefill.stats()["evicted_pages"], *counts]


def shape_of(rng: np.random.Generator, equal_pages: bool = False) -> dict[str, Any]:
    """Page sizes, layouts and pools of a round. Decode's pool holds the largest request, and few
    more; prefill's too."""
    size = int(rng.choice([1, 4, 16, 32]))
    factor = 1 if equal_pages else int(rng.choice([1, 1, 2, 4]))
    sizes = (size, size * factor) if rng.random() < 0.5 else (size * factor, size)
    tight = float(rng.choice([1.3, 2.0, 6.0]))
    decode_pages, prefill_pages = (-(-int(200 * tight) // one) + 2 for one in sizes)
    return {
        "page_size": sizes[0],
        "prefill_page_size": sizes[1],
        "order": str(rng.choice(_ORDERS)),
        "prefill_order": str(rng.choice(_ORDERS)),
        "pages": decode_pages,
        "prefill_pages": prefill_pages,
        "chunk_tokens": int(rng.choice([7, 32, 200])),
        "decode": {"cache": bool(rng.random() < 0.85), "reserve_tokens": int(rng.choice([0, 16]))},
        "prefill": {"cache": bool(rng.random() < 0.85)},
    }


def sampling_of(rng: np.random.Generator) -> Sampling:
    """Greedy more often than not; else drawn, cut off in different ways."""
    logprobs = int(rng.choice([0, 1, 5, 20])) if rng.random() < 0.4 else None
    if rng.random() < 0.6:
        return Sampling(logprobs=logprobs)
    return Sampling(
        temperature=float(rng.choice([0.3, 0.8, 1.5])),
        top_k=int(rng.choice([0, 1, 5, 40])),
        top_p=float(rng.choice([0.3, 0.9, 1.0])),
        seed=int(rng.integers(2**63)) if rng.random() < 0.5 else None,
        logprobs=logprobs,
    )


def run_round(
    model: PagedModel, reference: Reference, seed: int, found: Found, num_requests: int = 12
) -> None:
    """One round. Raises AssertionError where an answer is not the model's."""
    rng = np.random.default_rng(seed)
    # Groups of layers need pages of one size.
    equal_pages = bool(model.window)
    with World(model, **shape_of(rng, equal_pages)) as world:
        shared = rng.integers(0, model.vocab_size, 60)
        asked = 0
        while asked < num_requests:
            for _ in range(int(rng.integers(1, 5))):
                asked += 1
                _ask(world, rng, shared, f"{seed}.{asked}")
            for _ in range(int(rng.integers(0, 25))):
                world.step()
            if rng.random() < 0.3:
                _abort_one(world, rng, found)
        world.run()
        stats = world.decode.stats()
        for name in ("retractions", "shared_flights", "evicted_pages", "blocked_steps"):
            found.counts[name] = found.counts.get(name, 0) + stats[name]
        found.hit_tokens += stats["skipped_tokens"]
        world.at_rest()
    for answer in world.answers:
        compare(answer, reference, found)


def _ask(world: World, rng: np.random.Generator, shared: Any, rid: str) -> None:
    """A new prompt, one that begins as others do, or the next turn of one that is answered."""
    vocab = world.decode.model.vocab_size
    new = rng.integers(0, vocab, int(rng.integers(1, 50)))
    kind = rng.random()
    done = [one for one in world.answers if one.done and one.tokens.get(0)]
    if kind < 0.4 and done:
        before = done[int(rng.integers(len(done)))]
        tokens = np.concatenate([before.ask.tokens, before.tokens[0], new[:10]])[:150]
    elif kind < 0.75:
        tokens = np.concatenate([shared[: int(rng.integers(1, 61))], new])
    else:
        tokens = new
    sampling = sampling_of(rng)
    world.ask(
        rid, tokens, sampling=sampling, max_new_tokens=int(rng.integers(1, 40)),
        num_samples=int(rng.choice([1, 1, 1, 3])), cacheable=bool(rng.random() < 0.9),
        namespace=None if rng.random() < 0.8 else "other",
    )  # fmt: skip


def _abort_one(world: World, rng: np.random.Generator, found: Found) -> None:
    lives = [one for one in world.answers if not one.done]
    if lives:
        one = lives[int(rng.integers(len(lives)))]
        if rng.random() < 0.7:
            assert world.decode.abort(one.ask.rid)
        else:  # at prefill: decode hears of it, and the client
            name = f"{world.decode.node.peer_id.name}/{one.ask.rid}/0.0"
            world.prefill.abort(name)
        found.aborted += 1


def check_answers(world: World, reference: Reference, but: Collection[str] = ()) -> Found:
    """Every answer is the model's, and whole but for those that were aborted."""
    found = Found()
    for answer in world.answers:
        compare(answer, reference, found)
        if answer.ask.rid not in but:
            assert {end.finish for end in answer.ends.values()} <= {"length", "stop"}
    assert found.near_ties <= 1
    return found


def compare(answer: Answer, reference: Reference, found: Found) -> None:
    """Every token, also of an answer that was cut short, is what the model says by itself."""
    ask, sampling = answer.ask, answer.ask.sampling
    for sample, said in answer.tokens.items():
        end = answer.ends[sample]
        if end.finish == "length":
            assert len(said) == ask.max_new_tokens
        else:
            assert end.finish in ("abort", "error", "stop"), end
        if not said:
            continue
        given = answer.logprobs[sample]
        if sampling.logprobs is None:
            assert not any(given)
        else:
            try:
                reference.check_logprobs([*ask.tokens, *said], given, sampling.logprobs)
            except AssertionError:
                if not reference.routes_by_rounding([*ask.tokens, *said]):
                    raise
                found.near_ties += 1
            found.logprobs += len(given)
        found.answers += 1
        found.tokens += len(said)
        if sampling.temperature == 0:
            expected = reference.greedy(ask.tokens, len(said), said)
            if said != expected:
                assert reference.is_near(ask.tokens, said, expected), (ask.rid, said, expected)
                found.near_ties += 1
            continue
        logits = reference.logits([*ask.tokens, *said], len(said))
        for position, (token, row) in enumerate(zip(said, logits, strict=True)):
            number = draw(sampling.seeded(ask.rid), sample, position)
            expected_token, distance = choose_plainly(row, sampling, number)
            if token != expected_token:
                assert distance < reference.near, (ask.rid, sample, position, token, expected_token)
                found.near_ties += 1
