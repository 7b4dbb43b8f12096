"""A model with a recurrent state over real nodes: prefill computes of a next turn what is new, and
decode gets the right state all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, KVEventsConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.request import Request
from prefixkv.runtime.metrics import NodeCollector
from prefixkv.serving.router import WorkerIndex
from prefixkv.spi import PrefillGroup
from tests.support.node_pair import left
from tests.support.patience import until
from tests.support.patterns import make_pools
from tests.unit.kv_events.follower import Subscriber

TWO_HEADS = (StateTensor("sum", 0, 2, (1,), "float32"),)
OWN = 2  # slots of prefill's engine


def state_of(tokens: Sequence[int], before: float = 0.0) -> float:
    """What the state is after these tokens, if it was `before`: exact in float32."""
    for token in tokens:
        before = (before * 31 + token + 1) % 65_521
    return before


class Pair:
    """Two nodes, and the engine of a model that has one number of state, in each of two heads. With
    `ranks` prefill is of as many, with one cache."""

    def __init__(
        self, checkpoints: int, step: int = 1, kv_events: KVEventsConfig | None = None,
        ranks: int = 1,
    ) -> None:  # fmt: skip
        mesh = Mesh(2, 2, ranks)
        pool = make_pools(Mesh(2, 2), 64, 4, 16)[0]
        state = StatePool.create(TWO_HEADS, 4)
        of_ranks = [
            StatePool.create(TWO_HEADS, OWN + checkpoints, mesh, rank) for rank in range(ranks)
        ]
        self.decode_state = state.view("sum", 0)
        self.prefill_states = [one.view("sum", 0) for one in of_ranks]
        config = PrefillConfig(checkpoints=checkpoints, checkpoint_tokens=step, kv_events=kv_events)
        pools = make_pools(mesh, 64, 4, 16)
        self.prefill: Any
        if ranks > 1:
            self.prefill = PrefillGroup(pools, config, mesh, of_ranks)
        else:
            self.prefill = PrefillNode(pools[0], config, state=of_ranks[0])
        self.leader = self.prefill
        self.decode = DecodeNode(pool, DecodeConfig(reserve_tokens=0), state=state)
        self.computed: list[int] = []  # tokens, of each prompt
        self.router = WorkerIndex(10_000)  # of prefill's pages
        self._rooms = 0

    def serve(self, tokens: list[int]) -> DecodeRequest:
        """Compute a prompt on prefill, and look at what arrives."""
        self._rooms += 1
        room = {"room": self._rooms, "decode": self.decode.peer_id.name}
        rid = f"r{self._rooms}"
        self.prefill.add(Request(rid, tokens, **room))
        self.decode.add(Request(rid, tokens, 2, prefill=self.prefill.endpoint, **room))
        arrived: list[DecodeRequest] = []

        def step() -> None:
            self.decode.pop_preallocated()
            for req in self.prefill.pop_bootstrapped():
                self._compute(req)
            arrived.extend(self.decode.pop_transferred())
            self.prefill.pop_sent()

        until(lambda: bool(arrived), step=step)
        (req,) = arrived
        assert set(self.decode_state[req.state_slot].ravel().tolist()) == {state_of(tokens)}
        self.decode.append_many([req], [1])
        self.decode.finish(req)
        until(lambda: not left(self.decode) and not left(self.leader), step=step)
        return req

    def _compute(self, req: Any) -> None:
        own, tokens, done = 0, req.tokens.tolist(), req.prefix_len
        # What routers are told of is what can be used, and all of it.
        assert self.router.apply(self.leader.take_cache_events())
        page_size = self.leader.pool.layout.page_size
        keys = page_keys(RadixKey(tokens[:-1]).data, page_size)
        assert done == self.router.depth(None, keys) * page_size
        assert (req.checkpoint_slot >= 0) == (done > 0)
        # The checkpoint is copied: a state that is being computed is never one. On each rank, by
        # the slots that rank 0 says.
        for state in self.prefill_states:
            state[own] = state[req.checkpoint_slot] if done else 0.0
        self.computed.append(len(tokens) - done)
        while done < len(tokens):
            end = min([len(tokens), *(at for at in req.stops if at > done)])
            slot = self.prefill.save_state(req, end) if end in req.stops else -1
            for state in self.prefill_states:
                before = state[own].ravel().tolist()
                assert len(set(before)) == 1
                state[own] = state_of(tokens[done:end], before[0])
                if slot >= 0:
                    state[slot] = state[own]
            last = end == len(tokens)
            more: dict[str, Any] = {"last": True, "state_slot": own} if last else {}
            self.prefill.send_chunk(req, end, **more)
            done = end

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_error: object) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.mark.parametrize(("step", "ranks"), [(1, 1), (8, 1), (1, 2)])
def test_a_next_turn_computes_what_is_new(step: int, ranks: int) -> None:
    with Pair(checkpoints=4, step=step, ranks=ranks) as pair:
        said = [5] * 30
        for turn in range(5):
            pair.serve(said)
            said = said + [turn] * 12
        # A page has 4 tokens: each turn is 12 more, and what the last page, or step, cut off.
        first, *later = pair.computed
        assert first == 30
        assert max(later) <= 12 + max(4, step) - 1, pair.computed
        pair.prefill.audit()
        pair.prefill.flush()
        pair.serve(said)
        assert pair.computed[-1] == len(said)


def test_sockets_tell_routers_of_checkpoints() -> None:
    """One beside the pages of each turn, and its end where another takes its slot."""
    free = "tcp://127.0.0.1:*"
    events = KVEventsConfig(free, free, free, checkpoint_blocks=True, heartbeat_s=0.05)
    with Pair(checkpoints=2, kv_events=events) as pair:
        subscriber = Subscriber(pair.prefill.kv_events, 4, groups=True)
        try:
            said: list[int] = []
            for turn in range(3):
                said += [turn] * 30
                pair.serve(said)
            points = pair.prefill.pages.checkpoints
            follower = subscriber.follower
            while len(follower.checkpoints) != 2 or follower.matched(said) != 88:
                subscriber.follow()
            assert points.evicted
            assert follower.resumed(said) == 88
            assert follower.resumed(said[:87]) == 60
            assert follower.resumed(said[:59]) == 0
        finally:
            subscriber.close()


def test_what_few_checkpoints_cost_is_counted() -> None:
    """Two conversations that take turns, and one checkpoint: it is always the other one's."""
    with Pair(checkpoints=1) as pair:
        talks = [[5] * 30, [6] * 30]
        for talk in talks:
            pair.serve(talk)
        pair.serve(talks[0] + [1] * 12)
        stats = pair.prefill.stats()
        assert pair.computed == [30, 30, 42]
        assert stats["cut_tokens"] == 28, "seven whole pages of the first turn"
        assert (stats["checkpoints"], stats["checkpoint_slots"]) == (1, 1)
        assert stats["checkpoints_evicted"] >= 2
        seen = {
            sample.name: sample.value
            for metric in NodeCollector(pair.prefill).collect()
            for sample in metric.samples
            if sample.labels.get("state", "saved") == "saved"
        }
        assert seen["prefixkv_cut_tokens_total"] == 28
        assert seen["prefixkv_checkpoints"] == 1
        assert seen["prefixkv_checkpoints_evicted_total"] == stats["checkpoints_evicted"]
    with Pair(checkpoints=0) as pair:
        pair.serve([5] * 30)
        pair.serve([5] * 30)
        stats = pair.prefill.stats()
        assert stats["cut_tokens"] == stats["checkpoints"] == stats["checkpoint_slots"] == 0
