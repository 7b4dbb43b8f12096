"""The transports of a rank together: which are made, and which of them a call reaches."""

import threading
from typing import Any

import pytest

from prefixkv.config import TransportConfig, Way
from prefixkv.errors import AbortedError, ConfigError, InternalError, PeerLostError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport import transports
from prefixkv.transport.base import PeerMemory, RankMemory, Settled, WriteDone, WriteFailed
from prefixkv.transport.transports import Transports, make_transports
from tests.support.fabric import FakeFabric
from tests.support.transport_driver import NUM_PAGES, Node
from tests.support.transport_pools import make_pool

WAYS: tuple[Way, Way] = ("nixl", "shm")


class Two:
    """A writer that reaches one target by two transports, each in a fabric of its own."""

    def __init__(self) -> None:
        self.writer, self.target = (
            Node(PeerId(name, 1), make_pool("layer_major", NUM_PAGES), None)
            for name in ("prefill", "decode")
        )
        self.writer.pool.fill(1)
        self.fabrics = {way: FakeFabric(seed=1) for way in WAYS}
        for fabric in self.fabrics.values():
            for node in (self.writer, self.target):
                fabric.transport(node.me, node.memory, node.events.append, owner=node)
        self.halves = {
            way: fabric.transports[self.writer.me] for way, fabric in self.fabrics.items()
        }
        self.both = Transports(self.halves)

    def add(self, way: Way) -> None:
        target = self.fabrics[way].transports[self.target.me]
        memory = PeerMemory(self.target.pool.layout)
        self.both.add_peer(way, self.target.me, target.metadata, memory)

    def write(self, job_id: int) -> None:
        self.both.write(self.writer.job(job_id, self.target, [job_id], [job_id]))

    def steps(self) -> list[int]:
        """How many steps each fabric makes until all is quiet."""
        return [fabric.run() for fabric in self.fabrics.values()]


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_is_written_by_its_transport_alone(way: Way) -> None:
    two = Two()
    two.add(way)
    two.write(1)
    made = dict(zip(WAYS, two.steps(), strict=True))
    assert [by for by, steps in made.items() if steps] == [way]
    assert two.writer.ends() == [WriteDone(1, two.writer.pool.layout.page_bytes)]
    assert two.target.pool.page(1) == two.writer.pool.page(1)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_is_cancelled_ends_wherever_it_is(way: Way) -> None:
    two = Two()
    two.add(way)
    two.write(1)
    two.both.cancel(1)
    two.steps()
    assert [type(end.error) for end in two.writer.ends()] == [AbortedError]  # type: ignore[union-attr]


def test_a_peer_that_moves_leaves_the_other_transport_with_its_jobs_ended() -> None:
    two = Two()
    two.add("shm")
    two.write(1)
    two.add("nixl")
    two.write(2)
    two.steps()
    failed = next(end for end in two.writer.ends(1))
    assert isinstance(failed, WriteFailed)
    assert failed.drained
    assert two.writer.ends(2) == [WriteDone(2, two.writer.pool.layout.page_bytes)]
    assert two.target.me not in two.halves["shm"]._peers


def test_a_peer_that_is_removed_is_known_to_none() -> None:
    two = Two()
    two.add("shm")
    two.both.remove_peer(two.target.me)
    two.both.remove_peer(two.target.me)
    two.write(1)
    two.steps()
    [failed] = two.writer.ends()
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, PeerLostError)
    assert not any(half._peers for half in two.halves.values())


def test_settled_counts_when_all_have_answered() -> None:
    """By which of them a writer that is gone has written is not known."""
    two = Two()
    for _ in range(2):
        two.both.settle("a", 0.1)
        assert [two.steps(), two.writer.of(Settled)] == [[1, 1], [Settled("a")] * 2]
        two.writer.events.clear()
        assert [two.both.settled("a") for _ in WAYS] == [False, True]


def test_rooms_are_expected_and_agents_renewed_by_all() -> None:
    two = Two()
    for half in two.halves.values():
        half._unproven.add(7)
    two.both.expect(3)
    two.both.renew()
    assert [(half.expected, half._renewing) for half in two.halves.values()] == [(3, True)] * 2


@pytest.mark.parametrize("stuck", WAYS)
def test_where_one_does_not_end_the_other_is_closed(
    stuck: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close() -> None:
        raise InternalError("still in a copy")

    two = Two()
    monkeypatch.setattr(two.halves[stuck], "close", close)
    with pytest.raises(InternalError, match="still in a copy"):
        two.both.close()
    assert [way for way, half in two.halves.items() if half.closed] == [
        way for way in WAYS if way != stuck
    ]


@pytest.mark.parametrize(
    ("backend", "ways"), [("nixl", WAYS[:1]), ("shm", WAYS[1:]), ("auto", WAYS)]
)
def test_a_backend_has_its_transports(backend: Any, ways: tuple[Way, ...]) -> None:
    pool = make_pool("layer_major", 4)
    config = TransportConfig(backend=backend)
    memory = RankMemory(pool.layout)
    made = Transports(make_transports(PeerId("p", 1), memory, lambda event: None, config))
    assert tuple(made.offers) == ways
    made.close()
    assert not [t.name for t in threading.enumerate() if t.name.endswith("-p")]


def test_where_one_cannot_start_the_other_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_shm(*args: Any) -> Any:
        raise ConfigError("no such sockets")

    monkeypatch.setattr(transports, "MAKERS", transports.MAKERS | {"shm": no_shm})
    pool, config = make_pool("layer_major", 4), TransportConfig(backend="auto")
    with pytest.raises(ConfigError, match="no such sockets"):
        make_transports(PeerId("unlucky", 1), RankMemory(pool.layout), lambda event: None, config)
    assert not [t.name for t in threading.enumerate() if t.name.endswith("-unlucky")]
