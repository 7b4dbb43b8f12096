"""Meshes: the part of a model's KV that each rank holds, and which rank writes to which.

Layers are shared out over pipeline stages, KV heads over tensor-parallel ranks; ranks are numbered
stage by stage. With more ranks than heads (always so with MLA) neighbours hold replicas of a head.

Each layer and head that a reader holds has exactly one writer. Of R replicas that write and Q that
read, writer j * R // Q serves reader j: equal meshes pair rank with rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import check_list, check_whole

MAX_RANKS: Final = 256  # each pair of ranks is looked at, which takes half a second for 256
MAX_FOLD: Final = 1024  # of page sizes: a peer may make a table this many rows long, for a run
GROUPS_NEED_IT: Final = "must be equal where a model has groups of layers"


class Shard(NamedTuple):
    """A range of layers and a range of heads, in numbers of the model unless said otherwise."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @classmethod
    def whole(cls, layout: KVLayout) -> Shard:
        """Return all that a pool holds, in its own numbers."""
        return cls(0, layout.num_layers, 0, layout.num_kv_heads)

    def overlap(self, other: Shard) -> Shard | None:
        """Return the layers and heads that both hold, or None; both in the same numbers.

        >>> Shard(0, 4, 0, 2).overlap(Shard(2, 4, 1, 1))
        Shard(first_layer=2, num_layers=2, first_head=1, num_heads=1)
        """
        layer = max(self.first_layer, other.first_layer)
        head = max(self.first_head, other.first_head)
        layers = (
            min(self.first_layer + self.num_layers, other.first_layer + other.num_layers) - layer
        )
        heads = min(self.first_head + self.num_heads, other.first_head + other.num_heads) - head
        return Shard(layer, layers, head, heads) if layers > 0 and heads > 0 else None

    def slabs_of(self, layout: KVLayout) -> tuple[Slab, ...]:
        """Return the slabs of these layers; in the pool's own numbers. Raises ConfigError for a
        shard that the pool does not hold."""
        whole = Shard.whole(layout)
        if self.overlap(whole) != self:
            raise ConfigError(f"{self} is not inside a pool of {whole}")
        kinds = layout.slabs_per_layer
        return layout.slabs[self.first_layer * kinds : (self.first_layer + self.num_layers) * kinds]

    def inside(self, rank: Shard) -> Shard:
        """Return the same shard in the numbers of a rank that holds it.

        >>> Shard(2, 2, 1, 1).inside(Shard(2, 4, 1, 1))
        Shard(first_layer=0, num_layers=2, first_head=0, num_heads=1)
        """
        return self._replace(
            first_layer=self.first_layer - rank.first_layer,
            first_head=self.first_head - rank.first_head,
        )


@dataclass(frozen=True, slots=True)
class Mesh:
    """A model of `num_layers` and `num_kv_heads` (mla: 1), divided over the ranks of one side.

    `stage_layers` are the layers of each stage; empty: equal, the first stages one more.
    """

    num_layers: int
    num_kv_heads: int
    tp_size: int = 1
    pp_size: int = 1
    stage_layers: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def replicas(self) -> int:
        """Ranks of a stage that hold the same head."""
        return max(1, self.tp_size // self.num_kv_heads)

    def validate(self) -> None:
        """Raise ConfigError naming the value that no mesh can have. Call it first."""
        for name in ("num_layers", "num_kv_heads", "tp_size", "pp_size"):
            check_whole(name, getattr(self, name), 1, MAX_INDEX)
        # A peer's mesh comes here too: the number of ranks bounds the work for it.
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(f"tp_size * pp_size is {self.num_ranks}, must be at most {MAX_RANKS}")
        if self.pp_size > self.num_layers:
            raise ConfigError(
                f"pp_size is {self.pp_size}, must be at most num_layers, {self.num_layers}"
            )
        # Else a rank would hold part of a head, or ranks would hold different numbers of them.
        if not _divides(self.tp_size, self.num_kv_heads):
            raise ConfigError(
                f"tp_size is {self.tp_size}, must divide num_kv_heads, {self.num_kv_heads}, or be "
                "divided by it"
            )
        stages = self.stage_layers
        check_list("stage_layers", stages)
        for layers in stages:
            check_whole("stage_layers", layers, 1, MAX_INDEX)
        if stages and (len(stages) != self.pp_size or sum(stages) != self.num_layers):
            raise ConfigError(
                f"stage_layers is {stages}, must be {self.pp_size} numbers from 1 whose sum is "
                f"{self.num_layers}"
            )

    def shard(self, rank: int) -> Shard:
        """Return the layers and heads of a rank, in the numbers of the model.

        >>> Mesh(num_layers=5, num_kv_heads=8, tp_size=4, pp_size=2).shard(6)
        Shard(first_layer=3, num_layers=2, first_head=4, num_heads=2)
        >>> Mesh(num_layers=5, num_kv_heads=2, tp_size=4).shard(3)
        Shard(first_layer=0, num_layers=5, first_head=1, num_heads=1)
        """
        check_whole("rank", rank, 0, self.num_ranks - 1)
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        each, more = divmod(self.num_layers, self.pp_size)
        stages = self.stage_layers or tuple(each + (stage < more) for stage in range(self.pp_size))
        first_layer = list(accumulate(stages, initial=0))[pp_rank]
        # With more ranks than heads each holds one, and `replicas` neighbours hold the same.
        num_heads = max(1, self.num_kv_heads // self.tp_size)
        return Shard(first_layer, stages[pp_rank], tp_rank // self.replicas * num_heads, num_heads)


def _divides(a: int, b: int) -> bool:
    return max(a, b) % min(a, b) == 0


# --- pairs --------------------------------------------------------------------------------------


def check_equal(field: str, ours: object, theirs: object, reason: str = "differs") -> None:
    """Raise HandshakeError unless the values of a field are equal."""
    if ours != theirs:
        raise HandshakeError(field, ours, theirs, reason)


def check_meshes(ours: Mesh, theirs: Mesh) -> None:
    """Raise HandshakeError for another model, or tensor-parallel sizes of which neither divides the
    other; ConfigError if theirs breaks a law of meshes."""
    # It came in a frame: nothing of it is used before this.
    theirs.validate()
    for name in ("num_layers", "num_kv_heads"):
        check_equal(name, getattr(ours, name), getattr(theirs, name))
    if not _divides(ours.tp_size, theirs.tp_size):
        raise HandshakeError("tp_size", ours.tp_size, theirs.tp_size, "neither divides the other")


def check_page_sizes(ours: int, theirs: int) -> None:
    """Raise HandshakeError unless one size is a multiple of the other, up to MAX_FOLD."""
    if ours < 1 or theirs < 1 or not _divides(ours, theirs):
        raise HandshakeError("page_size", ours, theirs, "neither divides the other")
    if max(ours, theirs) > MAX_FOLD * min(ours, theirs):
        why = f"one is more than {MAX_FOLD} times the other"
        raise HandshakeError("page_size", ours, theirs, why)


def check_opaque(ours: Mesh, our_page_size: int, theirs: Mesh, their_page_size: int) -> None:
    """Raise HandshakeError unless each page of one side is a whole page of the other, as opaque
    pages need. Pipeline stages may differ."""
    why = "must be equal where pages are opaque"
    check_equal("page_size", our_page_size, their_page_size, why)
    check_equal("tp_size", ours.tp_size, theirs.tp_size, why)


def check_whole_groups(ours: Mesh, our_page_size: int, theirs: Mesh, their_page_size: int) -> None:
    """Raise HandshakeError where layers in groups meet several pipeline stages, or pages of two
    sizes. Of the heads see `check_group_heads`."""
    if max(ours.pp_size, theirs.pp_size) > 1:
        why = "must be 1 where a model has groups of layers"
        raise HandshakeError("pp_size", ours.pp_size, theirs.pp_size, why)
    check_equal("page_size", our_page_size, their_page_size, GROUPS_NEED_IT)


class GroupHeads(NamedTuple):
    """The heads of a group of layers on each rank. `is_whole`: its pages are opaque."""

    name: str
    num_kv_heads: int
    attention: str
    is_whole: bool


def check_group_heads(number: int, ours: Mesh, mine: GroupHeads, theirs: Mesh, its: int) -> None:
    """Raise HandshakeError where ranks of one mesh cannot write the heads of group `number` of
    layers to those of the other: `mine` on each of our ranks, `its` heads on each of theirs.

    With equal tensor-parallel sizes rank i writes all of its heads to rank i. Else a group's heads
    are cut as the first layers' are, see `group_part`: over all ranks both sides have as many of
    them, and a rank has a replica of them where it has one of the first layers' heads.

    >>> check_group_heads(0, Mesh(2, 4, 2), GroupHeads("w", 4, "mha", False), Mesh(2, 4, 1), 8)
    """
    sizes = ours.tp_size, theirs.tp_size
    field = f"groups[{number}].num_kv_heads"
    if ours.tp_size == theirs.tp_size:
        check_equal(field, mine.num_kv_heads, its)
        return
    if mine.is_whole:
        why = f"must be equal where pages of group {mine.name!r} are opaque"
        raise HandshakeError("tp_size", *sizes, why)
    if mine.attention == "mla" and ours.num_kv_heads > 1:
        why = f"must be equal where group {mine.name!r} has one head (mla), the first layers more"
        raise HandshakeError("tp_size", *sizes, why)
    all_of_ours = mine.num_kv_heads * ours.tp_size // ours.replicas
    all_of_theirs = its * theirs.tp_size // theirs.replicas
    why = "differs over all ranks, and tp_size differs too"
    check_equal(field, all_of_ours, all_of_theirs, why)


def group_part(part: Shard, first: KVLayout, group: KVLayout) -> Shard:
    """Return what a rank sends, or takes, of a group of layers, in the pool's own numbers: all
    layers, and as many of the heads as `part` is of the first layers' heads. Raises HandshakeError
    where that is no whole number."""
    heads, its_heads = first.num_kv_heads, group.num_kv_heads
    scaled = [divmod(number * its_heads, heads) for number in (part.first_head, part.num_heads)]
    if any(rest for _, rest in scaled):
        why = f"cannot be cut as {part.num_heads} of the first layers' {heads} heads are"
        raise HandshakeError("num_kv_heads", its_heads, its_heads, why)
    return Shard(0, group.num_layers, scaled[0][0], scaled[1][0])


def check_holds(layout: KVLayout, shard: Shard) -> None:
    """Raise HandshakeError if a pool does not have the layers and heads of its rank's shard."""
    for name, expected in (("num_layers", shard.num_layers), ("num_kv_heads", shard.num_heads)):
        held = getattr(layout, name)
        check_equal(f"layout.{name}", expected, held, "is not the rank's share")


def sent_share(writers: Mesh, writer: int, readers: Mesh, reader: int) -> Shard | None:
    """Return the shard that rank `writer` writes into the pool of rank `reader`; None if nothing.
    Over all writers these are the reader's shard, each layer and head once. The meshes have passed
    `check_meshes`."""
    share = writers.shard(writer).overlap(readers.shard(reader))
    if share is None:
        return None
    # Both hold the head, perhaps as replicas. The rule at the top says which of the writers serves
    # this reader, so that nothing is written twice.
    replica = reader % readers.tp_size % readers.replicas
    sender = replica * writers.replicas // readers.replicas
    return share if writer % writers.tp_size % writers.replicas == sender else None


def sent_shares(writers: Mesh, readers: Mesh, reader: int) -> dict[int, Shard]:
    """Return, by rank in order, the shard that each rank writes to `reader`; see `sent_share`."""
    shares = (
        (rank, sent_share(writers, rank, readers, reader)) for rank in range(writers.num_ranks)
    )
    return {rank: share for rank, share in shares if share is not None}


def writers_to(writers: Mesh, readers: Mesh, reader: int) -> tuple[int, ...]:
    """Return the ranks that write to `reader`: it waits for each of them, and for no other.

    >>> writers_to(Mesh(4, 8, tp_size=4), Mesh(4, 8, tp_size=2), reader=1)
    (2, 3)
    >>> writers_to(Mesh(4, 1, tp_size=4, pp_size=2), Mesh(4, 1), reader=0)  # MLA: one a stage
    (0, 4)
    """
    return tuple(sent_shares(writers, readers, reader))


def ranks_promised_to(writers: Mesh, readers: Mesh, reader: int) -> tuple[int, ...]:
    """Return the ranks that `reader` promises its pages to: those that write to it.

    Rank 0 also promises to ranks that write to no reader: their engine waits for the room too.

    >>> ranks_promised_to(Mesh(4, 1, tp_size=2), Mesh(4, 1), reader=0)
    (0, 1)
    """
    return tuple(
        rank
        for rank in range(writers.num_ranks)
        if reader in readers_awaited(writers, rank, readers)
    )


def readers_awaited(writers: Mesh, writer: int, readers: Mesh) -> tuple[int, ...]:
    """Return the ranks from which `writer` awaits promises; see `ranks_promised_to`."""
    ranks = range(readers.num_ranks)
    found = tuple(rank for rank in ranks if sent_share(writers, writer, readers, rank))
    # A writer without readers (replicas of its heads serve all) waits for rank 0, or it would never
    # learn of the room's end.
    return found or (0,)
