"""What a group of ranks does beyond its first rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zmq

from prefixkv.config import CurveConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import AdmissionTimeoutError, InternalError
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.receiver_machine import RoomDrained
from prefixkv.request import Request
from prefixkv.runtime.control_thread import ControlFailed
from prefixkv.runtime.groups import DecodeGroup
from prefixkv.testing.pattern import make_pools
from tests.models.mesh_workers import MeshPair
from tests.models.node_pair import tokens_of
from tests.models.patience import lasting_address, returned, until
from tests.runtime.conftest import QUICK

MESH = Mesh(2, 2, 2)


def group(**changes: float) -> DecodeGroup:
    pools = make_pools(MESH, 16, 4, 16, order="layer_major")
    return DecodeGroup(pools, DecodeConfig(control=QUICK, reserve_tokens=0, **changes), MESH)  # type: ignore[arg-type]


def test_wait_ends_when_a_request_has_waited_too_long_and_not_before_there_is_something() -> None:
    with group(waiting_timeout_s=0.3) as decode:
        assert not decode.wait(0.0)
        for room, rid in enumerate(("takes all", "waits")):
            decode.add(
                Request(
                    rid, tokens_of(room, 60), max_new_tokens=2, room=room, prefill=lasting_address()
                )
            )
        assert [req.rid for req in decode.pop_preallocated()] == ["takes all"]

        def wait() -> bool:
            while not decode.pop_preallocated() and not decode.scheduler.has_news:
                decode.wait()
            return True

        assert returned(wait)
        (late,) = decode.pop_failed()
        assert (late.rid, type(late.error)) == ("waits", AdmissionTimeoutError)
        decode.abort("takes all")
        until(lambda: not decode.stats()["pages_held"])


def test_an_error_on_a_rank_is_raised_and_costs_no_news() -> None:
    with group() as decode:
        (other,) = decode.others
        key = RoomKey(7, 0)
        other.transfers.thread.events.put(RoomDrained(key))
        other.transfers.thread.events.put(ControlFailed(ValueError("broke")))
        with pytest.raises(InternalError, match="broke"):
            decode.pop_failed()
        decode.pop_failed()
        assert decode._leader.rooms is not None
        assert len(decode._leader.rooms) == 1, "what it said before has come all the same"
        decode.transfers.thread.events.put(RoomDrained(key))
        decode.pop_failed()
        assert len(decode._leader.rooms) == 0


def test_the_ranks_of_a_worker_share_its_key() -> None:
    server, client = (CurveConfig(*(key.decode() for key in zmq.curve_keypair())) for _ in range(2))
    ours = replace(QUICK, curve=replace(server, allowed_clients={client.public_key: "decode-0"}))
    theirs = replace(QUICK, curve=replace(client, server_key=server.public_key))
    configs = {
        "prefill_config": PrefillConfig(control=ours),
        "decode_config": DecodeConfig(control=theirs),
    }
    with MeshPair(Mesh(2, 2), MESH, **configs) as pair:  # type: ignore[arg-type]
        pair.submit("r", tokens_of(1, 20), room=1)
        pair.until(lambda: "r" in pair.arrived)
        assert pair.mismatches == 0
        pair.finish("r")
        pair.until(pair.at_rest)
