"""Extra state of requests over real NIXL: it arrives on every rank, no prefix hit is served without
it, and with checkpoints prefill computes of a next turn what is new."""

from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeConfig, KVEventsConfig, Mesh, PrefillConfig, StateTensor, TransportConfig
from prefixkv.errors import RequestError
from prefixkv.runtime.metrics import NodeCollector
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import tokens_of
from tests.support.state_memory import StateMemory
from tests.support.state_workers import StatePair, owner_of
from tests.unit.kv_events.follower import Subscriber
from tests.unit.runtime.conftest import QUICK

ONE = Mesh(4, 4)


def configs(transport: TransportConfig | None = None, **prefill: Any) -> dict[str, Any]:
    of = {"transport": transport or TransportConfig(), "control": QUICK}
    return {"prefill_config": PrefillConfig(**of, **prefill), "decode_config": DecodeConfig(**of)}


def test_prefill_goes_on_from_its_own_prefix_only_as_far_as_the_engine_has_the_state() -> None:
    options = {**configs(), "decode_config": DecodeConfig(cache=False, control=QUICK)}
    with StatePair(ONE, ONE, usable=True, **options) as pair:
        tokens = tokens_of(1, 60)
        # An engine that rounds to pages has the state behind 20, too.
        for number, known in enumerate([[], [], [22, 20], [22, 40]]):
            pair.p.snapshots.update(owner_of(tokens[:end]) for end in known)
            pair.serve(number + 1, {str(number): tokens})
        assert [pair.p.starts[str(number)] for number in range(4)] == [0, 0, 20, 40]
        pair.check()


def test_a_slot_goes_with_the_last_chunk_and_with_no_other() -> None:
    with StatePair(ONE, ONE, **configs()) as pair:
        pair.p.hold = True
        pair.submit("r", tokens_of(1, 30), 1)
        pair.until(lambda: "r" in pair.p.computing)
        node, req = pair.prefill, pair.p.computing["r"]
        for end, last, slot in [(12, False, 0), (30, True, -1), (30, True, 6), (30, True, -2)]:
            with pytest.raises(RequestError, match=f"state.slot (is )?{slot}"):
                node.send_chunk(req, end, last, state_slot=slot)
        pair.p.hold = False
        pair.run("r")
        pair.check()


def test_heads_that_would_come_from_ranks_that_send_no_kv_are_refused() -> None:
    meshes = Mesh(2, 1, 2), Mesh(2, 1)
    tensors = (StateTensor("conv", 0, 2, (4,)),)
    states = [
        [StateMemory(tensors, 2, m, rank).pool() for rank in range(m.num_ranks)] for m in meshes
    ]
    with MeshPair(*meshes, attention="mla", device="cpu", **configs(), states=states) as pair:
        pair.submit("r", tokens_of(0, 10), room=1)
        pair.until(lambda: "r" in pair.failed)
        assert "send no KV" in str(pair.failed["r"])


# --- checkpoints ----------------------------------------------------------------------------------


def talk(pair: StatePair, tokens: list[int]) -> int:
    """The tokens that prefill computes of this prompt."""
    room = len(pair.p.sent) + 1
    pair.serve(room, {f"r{room}": np.array(tokens, np.int32)})
    return len(tokens) - pair.p.starts[f"r{room}"]


@pytest.mark.parametrize(("step", "ranks"), [(1, 1), (8, 1), (1, 2)])
def test_a_next_turn_computes_what_is_new(step: int, ranks: int) -> None:
    options = configs(checkpoints=4, checkpoint_tokens=step)
    with StatePair(Mesh(4, 4, ranks), ONE, slots=(2, 4), **options) as pair:
        said, computed = [5] * 30, []
        for turn in range(5):
            computed.append(talk(pair, said))
            said = said + [turn] * 12
        # A page has 4 tokens: each turn is 12 more, and what the last page, or step, cut off.
        assert computed[0] == 30
        assert max(computed[1:]) <= 12 + max(4, step) - 1, computed
        pair.prefill.flush()
        assert talk(pair, said) == len(said)
        pair.check()


def test_sockets_tell_routers_of_checkpoints() -> None:
    """One beside the pages of each turn, and its end where another takes its slot."""
    free = "tcp://127.0.0.1:*"
    events = KVEventsConfig(free, free, free, checkpoint_blocks=True, heartbeat_s=0.05)
    options = configs(checkpoints=2, kv_events=events)
    with StatePair(ONE, ONE, slots=(2, 4), **options) as pair:
        subscriber = Subscriber(pair.prefill.kv_events, 4, groups=True)
        try:
            said: list[int] = []
            for turn in range(3):
                said += [turn] * 30
                talk(pair, said)
            follower = subscriber.follower
            while len(follower.checkpoints) != 2 or follower.matched(said) != 88:
                subscriber.follow()
            assert pair.prefill.stats()["checkpoints_evicted"]
            assert follower.resumed(said) == 88
            assert follower.resumed(said[:87]) == 60
            assert follower.resumed(said[:59]) == 0
        finally:
            subscriber.close()


def test_what_few_checkpoints_cost_is_counted() -> None:
    """Two conversations that take turns, and one checkpoint: it is always the other one's."""
    with StatePair(ONE, ONE, slots=(2, 4), **configs(checkpoints=1)) as pair:
        talks = [5] * 30, [6] * 30, [5] * 30 + [1] * 12
        assert [talk(pair, said) for said in talks] == [30, 30, 42]
        stats = pair.prefill.stats()
        assert stats["cut_tokens"] == 28, "seven whole pages of the first turn"
        assert (stats["checkpoints"], stats["checkpoint_slots"]) == (1, 1)
        assert stats["checkpoints_evicted"] >= 2
        seen = {
            (sample.name.removeprefix("prefixkv_"), sample.labels.get("state", "")): sample.value
            for metric in NodeCollector(pair.prefill).collect()
            for sample in metric.samples
        }
        assert seen["cut_tokens_total", ""] == 28
        assert (seen["checkpoints", "saved"], seen["checkpoints", "other"]) == (1, 0)
        assert seen["checkpoints_evicted_total", ""] == stats["checkpoints_evicted"]
    with StatePair(ONE, ONE, **configs()) as pair:
        talk(pair, [5] * 30)
        talk(pair, [5] * 30)
        stats = pair.prefill.stats()
        assert stats["cut_tokens"] == stats["checkpoints"] == stats["checkpoint_slots"] == 0
