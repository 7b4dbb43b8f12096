"""What a node, rank, group or setting cannot be is refused by name, and nothing of it is left. Of
requests that prefill does not take, and peers that do not fit, both real nodes hear at once."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.config import (
    ComputeConfig,
    CurveConfig,
    DecodeConfig,
    HostConfig,
    KVEventsConfig,
    ModelConfig,
    PrefillConfig,
    TransportConfig,
)
from prefixkv.errors import (
    CallerError,
    ConfigError,
    DrainingError,
    HandshakeError,
    PeerLostError,
    RequestError,
)
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.spi import DecodeGroup, DecodeRank, PrefillGroup
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import until
from tests.support.patterns import make_pools
from tests.unit.runtime.conftest import QUICK, MakePair, node_threads, open_descriptors
from tests.unit.runtime.test_node_ranks import grouped
from tests.unit.runtime.test_windows import in_one_memory

TWO = Mesh(2, 2, 2)
TENSORS = [StateTensor("conv", 0, 2, (8,))]
FREE = "tcp://127.0.0.1:*"
OPEN = replace(QUICK, network_is_isolated=True)
HOST, NEAR, KEPT = HostConfig(num_pages=512, policy="lru"), ComputeConfig(), {"checkpoints": 2}
NO_CURVE = CurveConfig("p" * 40, "s" * 40, "k" * 40)  # which does not cover events


def decode(pool: KVPool | None = None, more: Any = (), **config: Any) -> DecodeNode:
    config = {"control": QUICK, **config}
    return DecodeNode(make_pool() if pool is None else pool, DecodeConfig(**config), **dict(more))


def prefill(pool: KVPool | None = None, more: Any = (), **config: Any) -> PrefillNode:
    config = {"control": QUICK, **config}
    return PrefillNode(make_pool() if pool is None else pool, PrefillConfig(**config), **dict(more))


def state(slots: int) -> dict[str, Any]:
    return {"state": StatePool.create(TENSORS, slots)} if slots else {}


def on(device: str, **sizes: Any) -> KVPool:
    pool = KVPool.create(16, 4, 2, 2, 16, **sizes)
    pool.layout = msgspec.structs.replace(pool.layout, device=device)
    return pool


def group(kind: Any, pages: tuple[int, ...], slots: tuple[int, ...] = ()) -> Any:
    pools = [make_pools(TWO, number, 4, 16, order="layer_major")[0] for number in pages]
    states = [
        StatePool.create(TENSORS, number, TWO, rank) if number else None
        for rank, number in enumerate(slots)
    ]
    config = DecodeConfig() if kind is DecodeGroup else PrefillConfig()
    return kind(pools, config, TWO, states=states)


def published(control: Any = QUICK, **more: Any) -> DecodeNode:
    events = KVEventsConfig("tcp://0.0.0.0:*", FREE, FREE)
    return decode(control=control, kv_events=events, **more)


def own_group() -> KVPool:
    full = KVPool.create(16, 4, 1, 1, 8)
    return full.with_groups(PoolGroup("draft", KVPool.from_tensors([full.k(0)], [full.v(0)])))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    # Addresses and networks.
    (lambda: prefill(bind="nonsense"), "bind is"),
    (lambda: prefill(bind="tcp://*:*"), "bind is"),
    (lambda: prefill(bind="tcp://0.0.0.0:*", control=OPEN), "interface="),
    (published, "network_is_isolated"),
    (lambda: published(replace(QUICK, curve=NO_CURVE)), "network_is_isolated"),
    # Ranks.
    (lambda: DecodeRank(make_pool(num_kv_heads=1), DecodeConfig(), TWO, 1, None), "worker"),  # type: ignore[arg-type]
    (lambda: DecodeRank(make_pool(num_kv_heads=1), DecodeConfig(), TWO, 1, "d"), "worker"),  # type: ignore[arg-type]
    *[
        (lambda kind=kind, of=of: group(kind, *of), why)  # type: ignore[misc]
        for kind in (DecodeGroup, PrefillGroup)
        for of, why in (
            (((16,),), "1 pools are given for 2 ranks"),
            (((16, 16, 16),), "3 pools are given for 2 ranks"),
            (((16, 12),), "num_pages is 12 on this rank, 16 on rank 0"),
            (((16, 16), (2,)), "1 states are given for 2 ranks"),
            (((16, 16), (2, 0)), "num_slots is 0 on this rank, 2 on rank 0"),
            (((16, 16), (2, 3)), "num_slots is 3 on this rank, 2 on rank 0"),
        )
    ],
    # Own compute and checkpoints.
    (lambda: decode(compute=NEAR, more={"ranks": RankLog()}), "^compute: a decode worker with sev"),
    (lambda: DecodeConfig(failure_policy="local"), "^failure_policy: 'local' needs compute"),
    (lambda: DecodeConfig(checkpoints=4), "checkpoints: 4 are to compute from"),
    (lambda: decode(compute=NEAR, checkpoints=4), "they are of extra state"),
    (lambda: decode(compute=NEAR, checkpoints=4, more=state(4)), "has 4 slots, and requests"),
    (lambda: decode(compute=NEAR, more=state(4)), "it needs checkpoints"),
    (lambda: prefill(checkpoints=4), "checkpoints: 4: they are of extra state"),
    (lambda: prefill(checkpoints=4, more=state(4)), "checkpoints: 4: .* has 4 slots"),
    (lambda: prefill(checkpoints=4, usable_prefix=lambda _, num: num, more=state(6)),
     "usable_prefix: .*checkpoints"),
    # Window groups.
    (lambda: decode(grouped(), compute=NEAR), "compute: with window groups it needs checkpoints"),
    (lambda: decode(grouped(window=0, num_pages=12), compute=NEAR), "compute: not with .* aligned"),
    (lambda: prefill(grouped(), {"mesh": Mesh(2, 1, 1, 2)}), "is of one stage, not 2"),
    (lambda: prefill(grouped(), {"mesh": Mesh(1, 2, 2)}, **KEPT), "a mesh of 2 ranks needs a Rank"),
    (lambda: prefill(grouped(), usable_prefix=lambda _, num: num), "usable_prefix: "),
    (lambda: decode(grouped(window=60)), "'sliding' has 12 pages; one request may need 17"),
    (lambda: prefill(grouped(window=30), **KEPT), "'sliding' has 12 pages; one request may need"),
    (lambda: prefill(grouped(), state(2), **KEPT), "the extra state has 2 slots"),
    (lambda: decode(in_one_memory()), "'sliding' has the first group's memory"),
    (lambda: prefill(in_one_memory()), "'sliding' has the first group's memory"),
    (own_group, "it needs a window"),
    # Host memory.
    (lambda: decode(host_memory=HOST, cache=False), "without cache"),
    (lambda: decode(host_memory=HOST, more={"ranks": RankLog()}), "ranks without a mesh"),
    (lambda: decode(host_memory=HostConfig(num_bytes=1)), "a page has"),
    (lambda: decode(host_memory=HostConfig(num_bytes=1 << 40)), "the host has .* free"),
    (lambda: decode(host_memory=HOST, kv_events=KVEventsConfig(FREE, FREE, FREE, medium="CPU")),
     "host memory"),
    # Devices.
    (lambda: decode(on("cuda:1"), state(2)), "state is on cpu, the KV pool is on cuda:1"),
    (lambda: prefill(on("cuda:1"), state(2)), "state is on cpu, the KV pool is on cuda:1"),
    (lambda: DecodeRank(on("cuda:1"), DecodeConfig(), TWO, 1, PeerId("d", 1), **state(2)),
     "state is on cpu, the KV pool is on cuda:1"),
    (lambda: decode(on("cuda:0"), transport=TransportConfig(checksums=True)),
     "checksums: are of memory of the CPU, .* cuda:0"),
    (lambda: on("cpu", shared=1), "shared is 1, True or False"),
    (lambda: StatePool.create(TENSORS, 2, shared=1), "shared is 1, True or False"),  # type: ignore[arg-type]
    # The record of traffic.
    (lambda: decode(record="/missing/r"), "record"),
    (lambda: DecodeConfig(record=""), "record"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_it_is_refused_by_name_and_leaves_nothing(make: Callable[[], Any], why: str) -> None:
    with pytest.raises((ConfigError, CallerError), match=why):
        make()
    assert not node_threads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda policy: prefill(bind="nonsense", policy=policy), "bind is"),
        (lambda policy: decode(on("cuda:900"), policy=policy), "NIXL"),
    ],
)
def test_a_node_that_fails_gives_its_descriptors_and_its_policy_back(
    make: Callable[[Any], Any], why: str
) -> None:
    """The second one's transport does not start."""
    before, policy = -1, LeastRecentlyUsed()
    for _ in range(2):
        with pytest.raises(Exception, match=why):
            make(policy)
        assert before in (-1, open_descriptors())
        before = open_descriptors()
    assert not node_threads()


def test_with_what_is_asked_for_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    lo = TransportConfig(interface="lo,any")
    with prefill(bind="tcp://0.0.0.0:*", control=OPEN, transport=lo):
        assert "isolated" in caplog.text
    with published(OPEN) as node:
        assert node.kv_events is not None
        with pytest.raises(CallerError, match="RankLog"):
            node.take_log()


PROMPT = tokens_of(1, 30)


def for_prefill(rid: str, room: int, tokens: object = PROMPT) -> Request:
    return Request(rid, tokens, room=room, decode="decode-0")  # type: ignore[arg-type]


def test_decode_hears_at_once_what_prefills_add_refuses(pair: NodePair) -> None:
    pair.submit("twice", PROMPT, room=1, tell=False)
    pair.prefill.add(for_prefill("twice", 9))
    with pytest.raises(RequestError, match="is here already"):
        pair.prefill.add(for_prefill("twice", 1))
    pair.prefill.abort("twice")
    pair.run("twice")
    assert "is here already" in str(pair.d.ended["twice"])
    pair.submit("late", PROMPT, room=2, tell=False)
    pair.prefill.drain()
    with pytest.raises(DrainingError):
        pair.prefill.add(for_prefill("late", 2))
    pair.run("late")
    assert "is being drained" in str(pair.d.ended["late"])


def test_a_duplicate_does_not_harm_the_one_that_lives(pair: NodePair) -> None:
    pair.p.hold = True
    pair.submit("r", PROMPT, room=1)
    for request in (for_prefill("r", 1), for_prefill("another", 1)):
        with pytest.raises(RequestError):
            pair.prefill.add(request)
        with pytest.raises(RequestError, match="in use"):
            pair.prefill.refuse(request)
    pair.p.hold = False
    pair.run("r")
    assert pair.d.ended["r"] is None


# --- peers ----------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, *words: str) -> bool:
    return any(all(word in line for word in words) for line in caplog.messages)


def test_both_sides_log_whom_they_meet_and_that_they_do_not_fit(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkv.peers")
    pair = make_pair()
    pair.submit("r", PROMPT)
    pair.run("r")
    until(lambda: logged(caplog, "decode-0: met: prefill-0 life", pair.prefill.endpoint))
    until(lambda: logged(caplog, "prefill-0: met: decode-0 life"))
    misfit = make_pair(
        decode={"model": ModelConfig(model="another", option_names={"model": "--name"})},
        prefill={"model": ModelConfig(option_names={"model": "--path"})},
    )
    misfit.submit("r", PROMPT, tell=False)
    misfit.run("r")
    assert isinstance(misfit.d.ended["r"], HandshakeError)
    until(lambda: logged(caplog, "decode-0: refused:", "model (--name) differs"))
    until(lambda: logged(caplog, "prefill-0: refused: decode-0 life", "model (--path) differs"))


def test_a_prefill_worker_that_was_fenced_and_lives_is_told(
    pair: NodePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.p.hold = True
    pair.submit("r", PROMPT)
    pair.until(lambda: bool(pair.p.computing))
    assert pair.decode.lost_peers() == pair.prefill.lost_peers() == {}
    pair.decode.fence(*pair.prefill.peer_id)
    pair.until(lambda: "r" in pair.d.ended and "r" in pair.p.failed)
    error = pair.d.ended["r"]
    assert isinstance(error, PeerLostError)
    assert error.peer == pair.prefill.peer_id
    assert isinstance(pair.p.failed["r"], PeerLostError)
    assert "was fenced" in str(pair.p.failed["r"])
    assert pair.prefill.stats()["refused_by_peers"] == 1
    until(lambda: logged(caplog, "prefill-0: refused: decode-0 life", "was fenced"))
    until(lambda: logged(caplog, "decode-0: over: prefill-0 life", "was fenced"))


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_worker_that_is_closed_is_no_reason_to_warn(
    first: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkv")
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(), DecodeConfig(control=QUICK)) as decode,
    ):
        pair = NodePair(decode, prefill)
        pair.submit("r", PROMPT)
        pair.run("r")
        until(lambda: logged(caplog, "prefill-0: met: decode-0 life"))
        leaves, stays = (prefill, decode) if first == "prefill" else (decode, prefill)
        leaves.close()
        left = f"{stays.peer_id.name}: left: {leaves.peer_id}"
        until(lambda: logged(caplog, left, "has left"))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ZeroDivisionError("on purpose")


def test_a_log_handler_that_raises_breaks_nothing(pair: NodePair) -> None:
    logger = logging.getLogger("prefixkv.peers")
    handler, level = _Raises(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        pair.submit("r", PROMPT)
        pair.run("r")
        until(lambda: pair.decode.stats()["log_errors"] > 0)
        until(lambda: pair.prefill.stats()["log_errors"] > 0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert pair.d.ended["r"] is None
    assert pair.decode.stats()["control_errors"] == 0
