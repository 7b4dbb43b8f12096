"""What a group of ranks does beyond its first rank, what each may be given, and what it waits for
where another rank's process is dead: until it is fenced."""

import select
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import CurveConfig, DecodeConfig, ModelConfig, PrefillConfig, TransportConfig
from prefixkv.control.handshake import check_pair, named
from prefixkv.engines.sglang.transfer_options import OPTION_NAMES as SGLANG
from prefixkv.engines.vllm.options import OPTION_NAMES as VLLM
from prefixkv.errors import (
    AdmissionTimeoutError,
    CallerError,
    DrainingError,
    HandshakeError,
    InternalError,
    PeerLostError,
)
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.receiver_machine import RoomDrained
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.runtime.control_thread import ControlFailed
from prefixkv.runtime.metrics import NodeCollector
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.serving.config import OPTION_NAMES as SERVING
from prefixkv.spi import DecodeGroup, DecodeRank, PrefillRank
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.node_process import EVENTS
from tests.support.patience import lasting_address, returned, until
from tests.support.patterns import make_pools
from tests.support.processes import Child, children, obey
from tests.support.state_memory import SHARDED, TENSORS
from tests.unit.runtime.conftest import QUICK

MESH = Mesh(2, 2, tp_size=2)


def test_a_decode_rank_whose_process_is_dead_is_waited_for_until_it_is_fenced() -> None:
    config = DecodeConfig(control=QUICK, reserve_tokens=0, max_running=2)
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(num_kv_heads=1), config, RankLog(), MESH) as decode,
        DecodeRank(make_pool(num_kv_heads=1), config, MESH, 1, decode.peer_id) as other,
    ):
        pair = NodePair(decode, prefill)

        def exchange() -> None:
            other.apply(decode.take_log())
            decode.apply_rank_events(other.take_rank_events())

        def reached(found: Callable[[], object]) -> None:
            pair.until(lambda: exchange() or found())

        pair.d.hold_running = True
        pair.submit("runs", tokens_of(1, 10))
        reached(lambda: "runs" in pair.d.running)
        pair.p.hold = True
        pair.submit("comes", tokens_of(2, 12))
        reached(lambda: "comes" in pair.p.computing)
        pair.submit("waits", tokens_of(3, 9))
        # From here on nothing comes of rank 1, and nothing goes there.
        decode.abort("comes")
        pair.until(lambda: decode.awaited_ranks() == {1: 1})
        assert decode.stats()["pages_held"] == 3
        for bad in (0, 2, "1"):
            with pytest.raises(CallerError, match="rank"):
                decode.fence_rank(bad)  # type: ignore[arg-type]
        assert "runs" in pair.d.running
        decode.fence_rank(1)
        failed = {req.rid: req.error for req in decode.pop_failed()}
        assert failed.keys() == {"runs", "waits"}
        assert all(isinstance(error, PeerLostError) for error in failed.values())
        until(lambda: decode.drain(0.05))
        assert decode.awaited_ranks() == {}
        decode.audit()
        stats = decode.stats()
        assert (stats["pages_held"], stats["pages_owned"]) == (0, 0)
        with pytest.raises(DrainingError):
            decode.add(Request("late", [1, 2], room=9, prefill=prefill.endpoint))
        late = [b""]
        until(lambda: late.append(other.take_rank_events()) or late[-1])
        decode.apply_rank_events(late[-1])  # what it said before its end is left out
        assert decode.drain()


def serve_rank(pipe: Any, config: PrefillConfig) -> None:
    """In the child: prefill's rank 1, which obeys calls. Its chunks never leave: it waits for its
    device."""
    rank = PrefillRank(make_pools(PREFILL, *SIZES)[1], config, PREFILL, 1)
    pipe.send((rank.peer_id, rank.endpoint))
    apply, never = rank.apply, EVENTS["never"]
    rank.apply = lambda raw: apply(raw, never)  # type: ignore[assignment, method-assign]
    obey(pipe, rank)


# Each of both writers has half of each reader's heads.
PREFILL, DECODE = Mesh(4, 4, tp_size=2), Mesh(4, 4, pp_size=2)
SIZES = 64, 4, 16
LEASE = 16 << 10
STAGED = TransportConfig(staging_bytes=LEASE * 3 // 2, lease_bytes=LEASE)


@pytest.mark.parametrize(
    "proves", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fenced", "proved dead"]
)
def test_a_prefill_rank_whose_process_is_dead_is_waited_for_until_it_is_fenced(
    proves: bool,
) -> None:
    control = replace(QUICK, prove_death=proves)
    config = PrefillConfig(control=control, transport=STAGED)
    receives = DecodeConfig(control=control, transport=STAGED, reserve_tokens=0)
    pools, targets = make_pools(PREFILL, *SIZES), make_pools(DECODE, *SIZES)
    with children(Child) as start:
        other = start(serve_rank, config)
        its_id, endpoint = other.hello
        with (
            PrefillNode(pools[0], config, PREFILL, ranks=RankLog([endpoint])) as prefill,
            DecodeGroup(targets, receives, DECODE) as decode,
        ):
            computing: dict[str, Any] = {}
            failed: set[str] = set()

            def step() -> None:
                decode.pop_preallocated()
                failed.update(req.rid for req in decode.pop_failed())
                computing.update({req.rid: req for req in prefill.pop_bootstrapped()})

            def exchange() -> None:
                step()
                other.call("apply", prefill.take_log())
                prefill.apply_rank_events(other.call("take_rank_events"))

            for room, rid in enumerate(("given up", "cut")):
                where = {"prefill": prefill.endpoint, "decode": "decode-0"}
                request = Request(rid, tokens_of(room, 24), 2, room=room, **where)
                prefill.add(request)
                decode.add(request)
            until(lambda: len(computing) == 2, step=exchange)
            prefill.send_chunk(computing["cut"], 12)
            exchange()
            # From here on nothing comes of rank 1. What has ended on rank 0 waits for its word.
            other.kill()
            prefill.abort("given up")
            assert [req.rid for req in prefill.pop_failed()] == ["given up"]
            until(lambda: prefill.awaited_ranks() == {1: 1}, step=prefill.pop_sent)
            assert prefill.stats()["pages_owned"] > 0
            prefill.fence_rank(1)
            (cut,) = prefill.pop_failed()
            assert isinstance(cut.error, PeerLostError)
            assert "prefill rank 1: its process is dead" in str(cut.error)
            # Decode hears of it from rank 0. What rank 1 may still write is proved, or told.
            until(lambda: failed == {"given up", "cut"}, step=step)
            if not proves:
                assert decode.stats()["pages_held"] > 0
                decode.fence(*its_id)
            until(lambda: prefill.drain() and decode.drain(), step=step)
            for node in (prefill, decode):
                node.audit()
                assert node.stats()["pages_owned"] == node.stats()["pages_held"] == 0


def group(**changes: float) -> DecodeGroup:
    pools = make_pools(MESH, 16, 4, 16, order="layer_major")
    return DecodeGroup(pools, DecodeConfig(control=QUICK, reserve_tokens=0, **changes), MESH)  # type: ignore[arg-type]


def test_wait_ends_when_a_request_has_waited_too_long_and_not_before_there_is_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PREFIXKV_DEBUG")  # it waits in a thread of its own
    with group(waiting_timeout_s=0.3) as decode:
        assert not decode.wait(0.0)
        prompt = tokens_of(1, 60)
        decode.add(Request("waits", prompt, max_new_tokens=2, room=1, prefill=lasting_address()))
        assert decode.pop_preallocated() == []

        def wait() -> bool:
            while not decode.pop_preallocated() and not decode.has_results:
                decode.wait()
            return True

        assert returned(wait)
        (late,) = decode.pop_failed()
        assert (late.rid, type(late.error)) == ("waits", AdmissionTimeoutError)
        until(lambda: decode.stats()["pages_free"] == 16)


def test_an_error_on_a_rank_is_raised_and_costs_no_news() -> None:
    with group() as decode:
        (other,) = decode.others
        key = RoomKey(7, 0)
        poller = select.poll()
        poller.register(decode.fileno(), select.POLLIN)
        assert not poller.poll(0)
        other.transfers.thread.events.put(RoomDrained(key))
        assert poller.poll(0), "any rank's descriptor is the group's"
        other.transfers.thread.events.put(ControlFailed(ValueError("broke")))
        with pytest.raises(InternalError, match="broke"):
            decode.pop_failed()
        decode.pop_failed()
        assert len(decode.leader) == 1, "what it said before has come all the same"
        decode.transfers.thread.events.put(RoomDrained(key))
        decode.pop_failed()
        assert len(decode.leader) == 0


def test_the_audit_sees_a_rank_with_other_rows() -> None:
    with group() as decode:
        decode.audit()
        (other,) = decode.others
        other.page_table[0, 0] = 3
        with pytest.raises(InternalError, match="each rank has the rows and requests of rank 0"):
            decode.audit()


def test_the_ranks_of_a_worker_share_its_key() -> None:
    server, client = (CurveConfig(*(key.decode() for key in zmq.curve_keypair())) for _ in range(2))
    ours = replace(QUICK, curve=replace(server, allowed_clients={client.public_key: "decode-0"}))
    theirs = replace(QUICK, curve=replace(client, server_key=server.public_key))
    configs = {
        "prefill_config": PrefillConfig(control=ours),
        "decode_config": DecodeConfig(control=theirs),
    }
    with MeshPair(Mesh(2, 2), MESH, **configs) as pair:  # type: ignore[arg-type]
        pair.serve(1, {"r": tokens_of(1, 20)})
        assert not pair.failed
        pair.check_at_rest()


def test_metrics_have_what_all_ranks_of_prefill_have_sent() -> None:
    with MeshPair(MESH, Mesh(2, 2)) as pair:
        pair.serve(1, {"r": tokens_of(1, 20)})
        families = NodeCollector(pair.prefill).collect()
        (sent,) = [one for one in families if one.name == "prefixkv_sent_bytes"]
        assert sent.samples[0].value == pair.prefill.stats()["bytes_sent"] > 0
        assert pair.prefill.bytes_sent < sent.samples[0].value, "rank 0's are a part of them"
        pair.prefill.add(Request("q", tokens_of(2, 20), room=9, decode="decode-0"))
        until(lambda: pair.prefill.stats()["rooms"])
        until(lambda: all(other.stats()["rooms"] for other in pair.prefill.others))
        assert pair.prefill.stats()["rooms"] == 1, "a room of each rank is one room"


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:{port}", "ipc://{folder}/socket"])
def test_a_group_has_the_address_that_is_configured(tmp_path: Path, bind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = bind.format(port=free.getsockname()[1], folder=tmp_path)
    with MeshPair(MESH, Mesh(2, 2), prefill_config=PrefillConfig(bind=address)) as pair:
        assert pair.prefill.endpoint == address
        pair.serve(1, {"r": tokens_of(1, 20)})
        assert not pair.failed


def grouped(window: int = 10, heads: int = 2, name: str = "sliding", **sizes: Any) -> KVPool:
    of = {"num_pages": 8, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    full = KVPool.create(**(of | sizes))
    last = KVPool.create(**(of | sizes | {"num_kv_heads": heads, "num_pages": 12}))
    return full.with_groups(PoolGroup(name, last, window, 4))


def plain(**sizes: Any) -> tuple[RankSpec, ModelConfig]:
    return RankSpec(make_pool(device="cpu", **sizes)), ModelConfig()


def model(**named: Any) -> tuple[RankSpec, ModelConfig]:
    return plain()[0], ModelConfig(**named)


def groups(**changes: Any) -> tuple[RankSpec, ModelConfig]:
    return RankSpec(grouped(**changes)), ModelConfig()


def states(*tensors: StateTensor) -> tuple[RankSpec, ModelConfig]:
    state = StatePool.create(tensors, 2) if tensors else None
    pool = make_pool(num_layers=4, num_kv_heads=4, device="cpu")
    return RankSpec(pool, state=state), ModelConfig()


def tail(*what: Any) -> tuple[RankSpec, ModelConfig]:
    return states(SHARDED, StateTensor("tail", *what), *TENSORS[2:])


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        (plain(), plain(dtype="float16"), "dtype"),
        (plain(), plain(attention="mla", num_kv_heads=1), "attention"),
        (plain(), plain(num_layers=3), "num_layers"),
        (plain(), plain(num_kv_heads=4), "num_kv_heads"),
        (plain(), plain(head_dim=8), "head_dim"),
        (plain(), plain(page_size=6), "page_size"),
        (plain(), model(model="other"), "model"),
        (plain(), model(kv_scales="per-head"), "kv_scales"),
        (groups(), groups(window=9), "groups[0].window"),
        (groups(), groups(heads=4), "groups[0].num_kv_heads"),
        (groups(), groups(name="other"), "groups[0].name"),
        (groups(), groups(window=0, num_pages=12), "groups[0].window"),
        (groups(), groups(page_size=8), "page_size"),
        (groups(), (RankSpec(KVPool.create(8, 4, 1, 1, 8)), ModelConfig()), "groups[0]"),
        (states(*TENSORS), states(), "state[0]"),
        (states(*TENSORS), states(*TENSORS, StateTensor("more", 0, 1, (1,))), "state[4]"),
        (
            states(*TENSORS),
            states(StateTensor("other", 0, 4, (3, 5), "float16"), *TENSORS[1:]),
            "state[0].name",
        ),
        (states(*TENSORS), tail(0, 1, (40,), "uint8"), "state[1].layer"),
        (states(*TENSORS), tail(1, 2, (20,), "uint8"), "state[1].num_heads"),
        (states(*TENSORS), tail(1, 1, (20, 2), "uint8"), "state[1].head_shape"),
        (
            states(*TENSORS),
            states(StateTensor("conv", 0, 4, (3, 5), "bfloat16"), *TENSORS[1:]),
            "state[0].dtype",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_workers_that_do_not_fit_say_what_differs(ours: Any, theirs: Any, field: str) -> None:
    told = [(spec.digest(config), spec.topology) for spec, config in (ours, theirs)]
    for one, other in (told, told[::-1]):
        with pytest.raises(HandshakeError) as caught:
            check_pair(*one, *other)
        assert caught.value.field == field


TAG = "vllm=0.32.0 kernels=CPU_ATTN layout=LBHNC kv_cache_dtype=auto dtype=float32 instructions=amx"
DTYPES = "--kv-cache-dtype, or --dtype"
SGLANG_KV = "--kv-cache-dtype, --attention-backend, or --model-path"


def opaque(tag: str) -> tuple[RankSpec, ModelConfig]:
    memory = [torch.zeros(16, 8 * 4)]
    axes = "page", "packed"
    pool = KVPool.from_tensors(memory, page_size=8, axes=axes, num_kv_heads=1, opaque=tag)
    return RankSpec(pool), ModelConfig()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (plain(), plain(page_size=6), ("--block-size", "--page-size", "--page-size")),
        (plain(), plain(dtype="float16"), (DTYPES, DTYPES, "--dtype, or --model")),
        (opaque(TAG), opaque(TAG.replace("32", "64")),
         ("the version of vLLM, --dtype", SGLANG_KV, "")),
        (opaque(TAG), opaque(TAG.replace("auto", "fp8").replace("LBHNC", "BLHNC")),
         ("VLLM_KV_CACHE_LAYOUT, --kv-cache-dtype", SGLANG_KV, "")),
    ],
)  # fmt: skip
def test_a_refusal_names_the_engine_s_option(ours: Any, theirs: Any, options: Any) -> None:
    told = [
        part for spec, config in (ours, theirs) for part in (spec.digest(config), spec.topology)
    ]
    with pytest.raises(HandshakeError) as caught:
        check_pair(*told)
    field = caught.value.field
    for names, option in zip((VLLM, SGLANG, SERVING, {}), (*options, ""), strict=True):
        error: Any = named(caught.value, names)
        assert (error.field, error.option) == (field, option)
        assert str(error).startswith(f"{field} ({option}) " if option else f"{field} ")
