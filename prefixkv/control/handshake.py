"""The comparison of two ranks before anything is written, and what follows from it.

Every function here only reads, and raises for a pair that cannot work together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from prefixkv.config import Backend, Way
from prefixkv.control.effects import RELAYS, AddPeer
from prefixkv.errors import HandshakeError, RefusedError
from prefixkv.memory.mesh import (
    GroupHeads,
    Mesh,
    check_equal,
    check_group_heads,
    check_holds,
    check_meshes,
    check_opaque,
    check_page_sizes,
    check_whole_groups,
    ranks_promised_to,
    readers_awaited,
    sent_share,
    writers_to,
)
from prefixkv.memory.state_layout import StateLink, check_state_pairs, state_blocks
from prefixkv.paging import check_unit_range
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import (
    GroupDigest,
    Hello,
    HelloReply,
    Libraries,
    ModelDigest,
    ProcessLife,
    Topology,
)
from prefixkv.transport.base import PeerMemory


def named(error: Exception, option_names: Mapping[str, str]) -> Exception:
    """Return a refusal as the engine's user reads it: with the engine's option for the field."""
    return error.named(option_names) if isinstance(error, HandshakeError) else error


def check_pair(
    ours: ModelDigest, our_topology: Topology, theirs: ModelDigest, their_topology: Topology
) -> None:
    """Check that two workers can exchange KV: model, meshes and page sizes. Raises HandshakeError
    for the first thing that keeps them apart, ConfigError for a mesh that cannot be."""
    # The model first: meshes and page sizes mean something only for the same model.
    ours.check(theirs)
    our_mesh, their_mesh = our_topology.mesh(ours), their_topology.mesh(theirs)
    check_meshes(our_mesh, their_mesh)
    check_page_sizes(our_topology.page_size, their_topology.page_size)
    if ours.opaque:
        check_opaque(our_mesh, our_topology.page_size, their_mesh, their_topology.page_size)
    if ours.groups:
        check_whole_groups(our_mesh, our_topology.page_size, their_mesh, their_topology.page_size)
    for number, (group, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        heads = GroupHeads(group.name, group.num_kv_heads, group.attention, bool(group.opaque))
        check_group_heads(number, our_mesh, heads, their_mesh, other.num_kv_heads)


# --- decode's -------------------------------------------------------------------------------------


def check_reply(hello: Hello, reply: HelloReply) -> None:
    """Raise HandshakeError or ConfigError for a worker that this rank cannot work with."""
    # Before `refused`: what differs says more than the refusal that prefill answers for it.
    check_pair(hello.digest, hello.topology, reply.digest, reply.topology)
    if reply.refused:
        raise RefusedError("prefill", reply.refused)
    if reply.checksum and reply.checksum not in hello.checksums:
        raise HandshakeError("checksums", hello.checksums, reply.checksum)


def addresses_told(hello: Hello, address: str, reply: HelloReply) -> dict[int, str]:
    """Return, by rank, the address of each rank that our pages are promised to, as the leader's
    `reply` says. `address` is the leader's, rank 0. Raises HandshakeError for fewer endpoints than
    ranks."""
    theirs = reply.topology.mesh(reply.digest)
    if len(reply.endpoints) < theirs.num_ranks:
        what = theirs.num_ranks, len(reply.endpoints), "are fewer than its ranks"
        raise HandshakeError("endpoints", *what)
    ranks = ranks_promised_to(theirs, hello.topology.mesh(hello.digest), hello.rank)
    # A rank that listens at every address of its host is reached at the leader's; here, if the
    # leader has a path.
    near = address if address.startswith("tcp:") else "tcp://127.0.0.1:"
    every, host = r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)", near.rpartition(":")[0]
    return {rank: re.sub(every, host, reply.endpoints[rank]) if rank else address for rank in ranks}


def check_rank(address: str, reply: HelloReply, rank: int, leader: HelloReply) -> None:
    """Raise HandshakeError if rank, topology or checksums at `address` are not what its leader
    said."""
    of_leader = {"rank": rank, "topology": leader.topology, "checksum": leader.checksum}
    for name, expected in of_leader.items():
        check_equal(name, expected, getattr(reply, name), f"of {address} differs")


def relay_plan(hello: Hello, leader: HelloReply, replies: dict[int, HelloReply]) -> Any:
    """Return how the worker of `leader` stages what it writes to us; None if nothing is staged.
    `replies` are by rank, of all that write to us. Raises HandshakeError if only some of them
    stage."""
    theirs, ours = leader.topology.mesh(leader.digest), hello.topology.mesh(hello.digest)
    writers = writers_to(theirs, ours, hello.rank)
    relayed = [rank for rank in writers if replies[rank].relayed]
    if not relayed:
        return None
    if len(relayed) < len(writers) or hello.relay is None:
        raise HandshakeError("staging", writers, tuple(relayed), "is not on for all that write")
    return RELAYS[0].plan(hello, leader)


# --- prefill's ------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    """The result for a decode rank that passed.

    `added` is for the transport, None if nothing of ours goes there; `cut` says how that is staged,
    None if it is not. `readers` are the ranks of its worker that promise us pages. `instead` takes
    the place of `added` where the peer's memory cannot be mapped.
    """

    added: AddPeer | None
    cut: Any
    readers: tuple[int, ...]
    instead: AddPeer | None = None


class OurSide(NamedTuple):
    """A prefill rank as the handshake needs it.

    `slot_bytes` is the size of a local slot that slices of heads are gathered into where the reader
    has staging too; 0: none. `life` is this process, `backend` the transport it writes by,
    `option_names` as of `ModelConfig`. `max_tokens` is what its pool holds, 0 if that is not to be
    said. `libraries` are those that load NIXL's metadata. `place` and `checksums` are as of
    `Hello`.
    """

    digest: ModelDigest
    topology: Topology
    rank: int = 0
    slot_bytes: int = 0
    life: ProcessLife | None = None
    backend: Backend = "nixl"
    option_names: Mapping[str, str] = MappingProxyType({})
    max_tokens: int = 0
    libraries: Libraries = Libraries()
    place: str = ""
    checksums: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.topology.mesh(self.digest)


def accept(ours: OurSide, peer: PeerId, hello: Hello) -> Accepted:
    """Check a Hello, and return what follows: memory as a target, staging, readers. Raises
    HandshakeError or ConfigError if nothing can be written to the peer."""
    digest, rank = ours.digest, ours.rank
    # 1. The two workers fit each other.
    check_pair(digest, ours.topology, hello.digest, hello.topology)
    way, metadata = _way(ours, hello)
    if way == "nixl":
        ours.libraries.check(hello.libraries)
    # 2. The layout is consistent in itself, before sizes and addresses are taken from it.
    layout = hello.layout
    layout.validate()
    # 3. The layout holds the part of the model that this rank has in its worker's mesh.
    our_mesh, theirs = ours.mesh, hello.topology.mesh(digest)
    check_holds(layout, theirs.shard(hello.rank))
    # 4. The layout says the same as digest and topology, which are what was compared in 1.
    for name in ("dtype", "attention", "head_dim", "opaque"):
        check_equal(f"layout.{name}", getattr(digest, name), getattr(layout, name))
    check_equal("layout.page_size", hello.topology.page_size, layout.page_size)
    groups = tuple(GroupDigest.of(group) for group in layout.groups)
    check_equal("layout.groups", hello.digest.groups, groups)
    # 5. What of ours goes to this rank. Nothing: it still promises pages to us if it is a reader.
    readers = readers_awaited(our_mesh, rank, theirs)
    share = sent_share(our_mesh, rank, theirs, hello.rank)
    state = _state_link(ours, hello, theirs)
    if share is None:
        return Accepted(None, None, readers)
    mine, its = our_mesh.shard(rank), theirs.shard(hello.rank)
    unit_tokens = min(ours.topology.page_size, hello.topology.page_size)
    # A page id of a unit page must fit an int32.
    check_unit_range(layout.num_pages, hello.topology.page_size // unit_tokens)
    added = AddPeer(
        peer=peer,
        way=way,
        metadata=metadata,
        memory=PeerMemory(
            layout, (share.inside(mine), share.inside(its)), None, state, checksum_for(ours, hello)
        ),
        unit_tokens=unit_tokens,
    )
    # 6. Staging: only where one side holds fewer heads than what is sent, both sides have memory
    # for it, and bytes may go by NIXL. The shm transport copies slices straight into pages, but of
    # a worker's ranks all stage or none.
    cut = None
    is_slice = share.num_heads < max(mine.num_heads, its.num_heads)
    copied = ours.backend == "shm" or not hello.agent_metadata
    if not copied and is_slice and ours.slot_bytes and hello.relay is not None:
        hello.relay.validate()
        meshes = our_mesh, theirs, hello.rank
        cut = RELAYS[0].cut(*meshes, layout, unit_tokens, hello.relay)
        cut.check_slots(rank, ours.slot_bytes)
        memory = added.memory._replace(relay=hello.relay)
        added = msgspec.structs.replace(added, memory=memory, relayed=True)
    # 7. If its memory cannot be mapped after all, NIXL takes the peer where it may. Rooms that were
    # being written fail.
    instead = None
    if way == "shm" and not copied:
        with suppress(HandshakeError):
            ours.libraries.check(hello.libraries)
            instead = msgspec.structs.replace(added, way="nixl", metadata=hello.agent_metadata)
    return Accepted(added, cut, readers, instead)


def checksum_for(ours: OurSide, hello: Hello) -> str:
    """Return the best algorithm of checksums that both sides offer, "" if there is none."""
    return next((name for name in ours.checksums if name in hello.checksums), "")


def _way(ours: OurSide, hello: Hello) -> tuple[Way, bytes]:
    """Choose by which transport the peer is written, among its offers. Raises HandshakeError."""
    offers: dict[Way, bytes] = {"nixl": hello.agent_metadata, "shm": hello.mapping}
    is_near = hello.place == ours.place != ""
    if ours.backend == "auto":
        way: Way = "shm" if hello.mapping and (is_near or not hello.agent_metadata) else "nixl"
    else:
        way = ours.backend
    if not offers[way]:
        theirs = "shm" if hello.mapping else "nixl" if hello.agent_metadata else "none"
        raise HandshakeError("transport backend", ours.backend, theirs)
    if way == "shm" and hello.place != ours.place:
        reason = "differs, and shm is within one machine, network namespace and user"
        raise HandshakeError("place", ours.place, hello.place, reason)
    return way, offers[way]


def _state_link(ours: OurSide, hello: Hello, theirs: Mesh) -> StateLink | None:
    """None if no extra state of ours goes there. Raises as `accept`."""
    tensors = ours.digest.state
    if (hello.state is None) != (not tensors):
        raise HandshakeError("state", tensors, hello.state, "is there on one side only")
    if hello.state is None:
        return None
    check_state_pairs(tensors, ours.mesh, theirs)
    # First, since it bounds what the other costs.
    hello.state.check_holds(tensors, theirs, hello.rank)
    hello.state.validate()
    blocks = state_blocks(tensors, ours.mesh, ours.rank, theirs, hello.rank)
    return StateLink(hello.state, blocks) if blocks else None
