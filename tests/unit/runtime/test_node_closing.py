"""Nodes that open and close: what they took comes back, and what the other side makes of it."""

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, HostConfig, KVEventsConfig, PrefillConfig, TransportConfig
from prefixkv.errors import ClosedError, DrainingError, InternalError, RequestError, TransferError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.page_copy import CpuPageCopy
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.request import Request
from prefixkv.runtime import control_thread
from prefixkv.transfer import DecodeTransfers, PrefillTransfers, RankSpec
from tests.support.node_pair import NodePair, drive_until, left, make_pool, tokens_of
from tests.support.node_stages import Proceed, computing, promised, queued, transferring
from tests.support.patience import NEVER_S, PATIENCE_S, SkippableClock, lasting_address, until
from tests.support.wires import wired
from tests.unit.runtime.conftest import QUICK, MakePair, node_threads, open_descriptors


@pytest.mark.slow
def test_every_cycle_gives_back_what_it_took() -> None:
    """Threads and descriptors, also of nodes that close in the middle of things."""

    def cycle(in_the_middle: bool) -> None:
        with (
            PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
            DecodeNode(make_pool(), DecodeConfig(control=QUICK)) as decode,
        ):
            pair = NodePair(decode, prefill)
            pair.p.hold = in_the_middle
            pair.submit("r", tokens_of(1, 10))
            pair.until(lambda: bool(pair.p.computing if in_the_middle else pair.d.ended))
            assert len(node_threads()) == 4
        assert not node_threads()

    cycle(False)
    before = open_descriptors()
    for in_the_middle in (False, True, True):
        cycle(in_the_middle)
    assert open_descriptors() == before


def test_a_closed_node_says_so() -> None:
    prefill = PrefillNode(make_pool(), PrefillConfig(control=QUICK))
    decode = DecodeNode(make_pool(), DecodeConfig(control=QUICK))
    pair = NodePair(decode, prefill)
    pair.d.hold_running = True
    pair.submit("r", tokens_of(1, 10))
    pair.until(lambda: "r" in pair.d.running)
    req = pair.d.running["r"]
    for node in (decode, prefill):
        node.close()
        node.close()
    request = Request("s", [1], room=9, prefill="tcp://127.0.0.1:1", decode="decode-0")
    shared: list[Callable[[], Any]] = []
    for node in (decode, prefill):
        shared += [
            node.wait,
            node.fileno,
            node.flush,
            node.audit,
            node.stats,
            node.peers,
            node.pop_failed,
        ]
        shared += [lambda node=node: node.add(request), lambda node=node: node.abort("r")]
    for call in [
        *shared, decode.pop_preallocated, decode.pop_transferred, decode.pop_needs_prefill,
        lambda: decode.append_many([req], [1]), lambda: decode.finish(req),
        lambda: decode.retract("r"), lambda: decode.fence("prefill-0", 1), prefill.pop_bootstrapped,
        prefill.pop_sent, lambda: prefill.send_chunk(None, 1),
    ]:  # fmt: skip
        with pytest.raises(ClosedError):
            call()


@pytest.fixture
def patient_farewells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The last words of a node that closes arrive, however slow the machine, while somebody is
    there to hear them."""
    with monkeypatch.context() as patch:
        patch.setattr(control_thread, "_FAREWELL_S", PATIENCE_S)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_any_wire")
@pytest.mark.parametrize("stage", [promised, computing, transferring])
def test_prefill_closes_and_its_pages_are_free_at_once(
    make_pair: MakePair, stage: Callable[[NodePair], Proceed], patient_farewells: None
) -> None:
    """Its farewell says that no write of it can land any more: nothing waits for a deadline."""
    pair = make_pair(prefill={"bind": lasting_address()})
    stage(pair)
    pair.prefill.close()
    pair.p.hold = False
    drive_until(lambda: "r" in pair.d.ended and not left(pair.decode), [pair.d])
    assert isinstance(pair.d.ended["r"], TransferError)
    config = PrefillConfig(bind=pair.prefill.endpoint, control=QUICK)
    pair.prefill = PrefillNode(make_pool(), wired(config))
    again = NodePair(pair.decode, pair.prefill)  # under the same name and address
    again.submit("again", tokens_of(2, 20), room=77)
    again.run("again")
    pair.p = again.p


def test_decode_closes_and_prefill_lets_go(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, patient_farewells: None
) -> None:
    proceed = transferring(pair)
    transport = pair.prefill.transfers.thread.transports
    remove, removed = transport.remove_peer, []
    monkeypatch.setattr(transport, "remove_peer", lambda peer: [removed.append(peer), remove(peer)])
    pair.decode.close()
    drive_until(lambda: "r" in pair.p.failed, [pair.p])
    proceed()
    drive_until(lambda: not left(pair.prefill), [pair.p])
    assert pair.prefill.peers() == {}
    assert removed == [pair.decode.peer_id]
    pair.decode = DecodeNode(make_pool(), DecodeConfig(control=QUICK))
    again = NodePair(pair.decode, pair.prefill)
    again.submit("again", tokens_of(1, 30))
    again.run("again")
    assert again.p.sent == ["again"]
    pair.d = again.d


def test_a_node_whose_agent_lives_on_claims_no_fence(
    clock: SkippableClock, pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes may still land: decode's pages stay held, until somebody who knows says
    otherwise."""
    transferring(pair)
    transport = pair.prefill.transfers.thread.transports
    real = transport.close

    def close() -> None:
        real()
        raise InternalError("the agent outlived its transport")

    monkeypatch.setattr(transport, "close", close)
    with pytest.raises(InternalError, match="outlived"):
        pair.prefill.close()
    assert not [name for name in node_threads() if name.endswith("prefill-0")]
    clock.skip(NEVER_S, [pair.decode])
    drive_until(lambda: "r" in pair.d.ended, [pair.d])
    clock.skip(NEVER_S, [pair.decode])
    drive_until(lambda: pair.decode.stats()["pages_quarantined"] == 8, [pair.d])
    pair.decode.fence(pair.prefill.peer_id.name, pair.prefill.peer_id.incarnation)
    drive_until(lambda: not left(pair.decode), [pair.d])
    assert pair.decode.stats()["quarantined_pages"] == 8
    monkeypatch.undo()
    pair.prefill = PrefillNode(make_pool(), PrefillConfig(control=QUICK))
    pair.p = NodePair(pair.decode, pair.prefill).p


# --- drained before a restart ---------------------------------------------------------------------


def test_a_node_that_is_drained_serves_what_it_has_and_takes_nothing_new(pair: NodePair) -> None:
    pair.p.hold = True
    for number in range(6):
        pair.submit(f"r{number}", tokens_of(number, 30))
    pair.until(lambda: bool(pair.p.computing))
    for node in (pair.decode, pair.prefill):
        assert not node.drain()
        before = {name: value for name, value in node.stats().items() if name == "requests"}
        with pytest.raises(DrainingError, match="'late' comes too late") as caught:
            node.add(Request("late", tokens_of(1, 8), room=77, prefill=pair.prefill.endpoint))
        assert isinstance(caught.value, RequestError), (
            "who looks for those it cannot place finds it"
        )
        assert {name: value for name, value in node.stats().items() if name == "requests"} == before
    pair.p.hold = False
    pair.until(lambda: pair.decode.drain() and pair.prefill.drain())
    assert [pair.d.ended[f"r{number}"] for number in range(6)] == [None] * 6
    assert pair.decode.drain(timeout_s=10.0), "at once"


def test_drain_waits_but_not_while_the_engine_has_something_to_do(pair: NodePair) -> None:
    assert pair.decode.drain(timeout_s=10.0), "nothing lives here"
    pair.decode.draining = False
    proceed = queued(pair)
    pair.decode.abort("big")
    pair.decode.abort("r")
    assert not pair.decode.drain(timeout_s=1000.0), "pop_failed has two, so it does not wait"
    proceed()
    pair.until(lambda: {"big", "r"} <= set(pair.d.ended))
    pair.until(lambda: pair.decode.drain(timeout_s=0.01))


# --- forked ---------------------------------------------------------------------------------------


def ended(pid: int, codes: list[int]) -> bool:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        codes.append(os.waitstatus_to_exitcode(status))
    return bool(found)


def test_a_forked_child_that_closes_its_copies_leaves_the_parent_at_work(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, write = threading.Event(), CpuPageCopy.write

    def waits(*args: Any) -> None:
        assert may_copy.wait(PATIENCE_S)
        write(*args)

    monkeypatch.setattr(CpuPageCopy, "write", waits)
    free = "tcp://127.0.0.1:*"
    events = {"kv_events": KVEventsConfig(free, free, free)}
    host = HostConfig(num_pages=512, policy="lru", piece_bytes=1)
    pair = make_pair(decode={"host_memory": host, **events}, prefill=events)
    pair.submit("before", tokens_of(1, 10))
    pair.until(lambda: "before" in pair.d.ended)  # and its pages are being copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for node in (pair.decode, pair.prefill):
                node.close()
                node.close()
            code = 0
        finally:
            os._exit(code)
    codes: list[int] = []
    until(lambda: ended(pid, codes))
    assert codes == [0]
    may_copy.set()
    for rid in ("after", "again"):
        pair.submit(rid, tokens_of(2, 10))
        pair.run(rid)
        assert pair.d.ended[rid] is None
    assert pair.prefill.peers() == {pair.decode.peer_id: "ready"}
    assert node_threads().count("prefixkv-kv-events") == 2


# --- memory ---------------------------------------------------------------------------------------


TENSORS = [StateTensor("conv", 0, 2, (8,))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DecodeTransfers, PrefillTransfers])
@pytest.mark.parametrize("backend", ["nixl", "shm"])
def test_a_pool_without_another_reference_stays_until_it_has_closed(
    kind: Any, backend: Any
) -> None:
    pool = KVPool.create(16, 4, 2, 2, 16, shared=backend == "shm")
    state = StatePool.create(TENSORS, 2, shared=backend == "shm")
    left = weakref.ref(pool), weakref.ref(state)
    transport = TransportConfig(backend=backend)
    config = (DecodeConfig if kind is DecodeTransfers else PrefillConfig)(transport=transport)
    transfers = kind(RankSpec(pool, state=state), config)
    thread = transfers.thread
    del pool, state
    gc.collect()
    assert all(one() is not None for one in left)
    del transfers  # and is not closed: its threads go on
    gc.collect()
    assert all(one() is not None for one in left)
    thread.close()
    del thread
    gc.collect()
    assert [one() for one in left] == [None, None], "nothing else keeps it"
