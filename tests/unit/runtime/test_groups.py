"""What a group of ranks does beyond its first rank."""

from __future__ import annotations

import select
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from prefixkv.config import CurveConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import AdmissionTimeoutError, InternalError
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.receiver_machine import RoomDrained
from prefixkv.request import Request
from prefixkv.runtime.control_thread import ControlFailed
from prefixkv.runtime.metrics import NodeCollector
from prefixkv.spi import DecodeGroup
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import tokens_of
from tests.support.patience import lasting_address, returned, until
from tests.support.patterns import make_pools
from tests.unit.runtime.conftest import QUICK

MESH = Mesh(2, 2, 2)


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


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:{port}", "ipc://{folder}/socket"])
def test_a_group_has_the_address_that_is_configured(tmp_path: Path, bind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = bind.format(port=free.getsockname()[1], folder=tmp_path)
    with MeshPair(MESH, Mesh(2, 2), prefill_config=PrefillConfig(bind=address)) as pair:
        assert pair.prefill.endpoint == address
        pair.serve(1, {"r": tokens_of(1, 20)})
        assert not pair.failed
