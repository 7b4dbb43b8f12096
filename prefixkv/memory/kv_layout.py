"""Layouts of KV memory: maps (layer, K or V, page, token, head) to addresses. Pure: owns no memory.

A *slab* is all that one layer keeps of one kind (K, V, or MLA's latent vector) for every page. It
is an array [page, token, head, dim] with free strides, only `dim` is always contiguous; so an
engine's own tensors can be described whatever the order of their dimensions. A layout travels to
the peer in HELLO as it is, and becomes addresses there: `validate` takes nothing for granted, and
its cost depends on the number of slabs only, never on a value in the message.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Final

import msgspec

from prefixkv.errors import ConfigError, check_range, shown
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import check_whole

ITEMSIZE: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}
SLABS_PER_LAYER: Final = {"mha": 2, "mla": 1, "fused": 1}
ORDERS: Final = ("layer_major", "page_major", "strided")
ADDRESS_END: Final = 2**63  # so that address arithmetic in int64 cannot overflow

_CUDA: Final = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")  # up to 1000 GPUs, each named one way only

_Dims = tuple[tuple[int, int], ...]  # (count, stride in bytes), the widest stride first, count > 1


class Slab(msgspec.Struct, frozen=True):
    """One layer's K, V or latent vectors. `base` is the address of page 0, token 0, head 0.

    Strides are in bytes. The stride of a dimension with a single element has no meaning.
    """

    base: int
    """Address of page 0, token 0, head 0."""
    page_stride: int
    """Bytes."""
    token_stride: int
    """Bytes."""
    head_stride: int
    """Bytes."""


# Limits for a frame: a peer cannot make us sort more than this.
Slabs = Annotated[tuple[Slab, ...], msgspec.Meta(max_length=8192)]
Regions = Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=8192)]
GroupName = Annotated[str, msgspec.Meta(max_length=64)]


class PageGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers of a model whose pages lie beside the pool's first ones, with a layout of their own.

    `window`: a token of these layers sees that many tokens, itself among them; older pages are
    given up, and the page ids are the group's own. 0: they keep every token, under the page ids of
    the first layers (*aligned*: a draft's KV, the keys of an index). A window group may lie in the
    memory of the first layers (`KVLayout.is_shared`).
    """

    name: GroupName
    """As in GroupDigest."""
    window: int
    """As in GroupDigest."""
    layout: KVLayout
    """Layout of its pages: their own number with a window, else the pool's; without further groups.
    With a window its slabs may be the pool's: then no page id is promised in both."""

    def first_page(self, num_tokens: int) -> int:
        """Return the number of the first page needed behind `num_tokens` tokens."""
        return max(0, num_tokens + 1 - self.window) // self.layout.page_size


MAX_GROUPS: Final = 64
Groups = Annotated[tuple[PageGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class KVLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory of one KV pool.

    `attention` is "mha" (K and V; GQA has fewer KV heads), "mla" (one latent vector of `head_dim`
    elements per token and layer, `num_kv_heads` = 1), or "fused" (one slab holds all that a layer
    keeps of its K and V; opaque only). `slabs` run layer 0 K, layer 0 V, layer 1 K, ... (mla,
    fused: one per layer). `regions` are the registered ranges as (address, bytes); each slab lies
    in one of them. `page_size` is in tokens. `dtype`, `attention` and `order` are plain strings, so
    that a value unknown here is refused by its name and is not a malformed frame. `device` is "cpu"
    or "cuda:INDEX", with the index that the owner's process knows the GPU by; the owner's staging
    area and state are there too. A default value is left out of the message.

    `opaque` is empty if the array [page, token, head, dim] is what it says. Otherwise the pages are
    *opaque*: only the code that wrote their bytes can read them (kernels that pack a block for an
    instruction set, rows with scales inside). It is then the name of that format. Such pages move
    whole, between pools that agree in this tag, page size, heads per rank and bytes per page. A
    page of a slab is then one run of bytes, and `head_dim` is its number of elements per token and
    head.

    `groups` are layers beside those described here, which keep every token (`PageGroup`). All of
    their memory is among the `regions` here.
    """

    page_size: int
    num_layers: int
    """Layers of this rank."""
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    """Elements of one head of one token."""
    dtype: str
    """Data type, as torch names it."""
    attention: str
    """Kind: "mha", "mla", or "fused": K and V of a layer in one slab, opaque pages only."""
    order: str
    """Order of pages: "layer_major", "page_major" or "strided"."""
    slabs: Slabs
    """Layer 0 K, layer 0 V, layer 1 K, ...; mla, fused: one per layer."""
    regions: Regions
    """The registered ranges, as (address, bytes); each slab lies in one of them."""
    num_pages: int
    """Pages of the pool."""
    device: str = "cpu"
    """Device: "cpu" or "cuda:INDEX", as the owner's process numbers the GPUs; staging area and
    state are on the same device."""
    opaque: str = ""
    """Name of a format that prefixkv cannot read, or empty: pages of it move whole, and a page of a
    slab is one run of bytes."""
    groups: Groups = ()
    """The groups of layers beside these, in the digest's order; their memory is among the regions.
    """

    @property
    def windows(self) -> tuple[PageGroup, ...]:
        """Groups whose layers keep the last tokens only."""
        return tuple(group for group in self.groups if group.window)

    @property
    def aligned(self) -> tuple[PageGroup, ...]:
        """Groups that have the page ids of the first layers."""
        return tuple(group for group in self.groups if not group.window)

    @property
    def with_same_ids(self) -> tuple[KVLayout, ...]:
        """Layouts of all that a page id names: its own layers, then its aligned groups."""
        return (self, *(group.layout for group in self.aligned))

    @property
    def device_id(self) -> int:
        """INDEX of "cuda:INDEX", 0 on the CPU."""
        return int(self.device.partition(":")[2] or 0)

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def slabs_per_layer(self) -> int:
        return SLABS_PER_LAYER[self.attention]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one slab: the smallest piece, always contiguous."""
        return self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one slab, all heads."""
        return self.num_kv_heads * self.head_bytes

    @property
    def slab_page_bytes(self) -> int:
        """Bytes of one page in one slab."""
        return self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all slabs."""
        return self.slab_page_bytes * len(self.slabs)

    @property
    def copied_page_bytes(self) -> int:
        """Bytes of one page in host memory: all that its id names."""
        return sum(one.page_bytes for one in self.with_same_ids)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in all slabs."""
        return self.token_bytes * len(self.slabs)

    # --- places -----------------------------------------------------------------------------------

    def slab(self, layer: int, kv: int) -> Slab:
        """Return the slab of `layer`; `kv` is 0 for K or the latent vector, 1 for V. Raises
        ConfigError."""
        for name, number, end in (
            ("layer", layer, self.num_layers), ("kv", kv, self.slabs_per_layer)
        ):  # fmt: skip
            if not isinstance(number, int) or not 0 <= number < end:
                raise ConfigError(f"{name} is {shown(number)}, must be in [0, {end})")
        return self.slabs[layer * self.slabs_per_layer + kv]

    # --- laws -------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every value, which may be a peer's, and that no two elements share a byte.

        Accepted are slabs that nest: a stride spans all that is inside it, and slabs that
        interleave do so with equal strides. Every usual engine layout does; an exotic one that does
        not is refused, even if by luck no byte is shared. O(n log n) in slabs and regions;
        allocates no more than a list of them. Raises ConfigError: names the value and its bound.
        """
        # Sizes first: the sums below rely on their bounds. Regions before slabs, which lie in them.
        self.validate_sizes()
        expected = self.num_layers * self.slabs_per_layer
        if len(self.slabs) != expected:
            raise ConfigError(
                f"{len(self.slabs)} slabs, must be {expected} for {self.num_layers} layers"
            )
        regions = sorted_regions(self.regions)
        for i, slab in enumerate(self.slabs):
            self._check_slab(i, slab, regions)
        self._check_slabs_apart()
        if self.groups:
            self._check_groups(regions)

    def _check_groups(self, regions: list[tuple[int, int]]) -> None:
        """Raise ConfigError unless the groups fit, in memory that no other group has."""
        names = [group.name for group in self.groups]
        if "" in names or len(set(names)) < len(names):
            raise ConfigError(f"groups are named {shown(names)}, each needs a name of its own")
        alone = [(self, "the first group")]
        for group in self.groups:
            layout, where = group.layout, f"group {group.name!r}"
            check_whole(f"{where}: window", group.window, 0, MAX_INDEX)
            if layout.groups:
                raise ConfigError(f"{where} has groups of its own")
            layout.validate()
            for name in ("page_size", "device", *(() if group.window else ("num_pages",))):
                ours, its = getattr(self, name), getattr(layout, name)
                if its != ours:
                    raise ConfigError(
                        f"{where}: {name} is {its}, that of the first group is {ours}"
                    )
            for start, num_bytes in layout.regions:
                check_inside(regions, f"{where}: its region", start, num_bytes)
            if self.is_shared(group):
                # Page ids are of one pool: what a promise names is looked at together.
                if not group.window or layout.num_pages != self.num_pages:
                    raise ConfigError(
                        f"{where} has the first group's memory: it needs a window, and as many "
                        f"pages, {self.num_pages}"
                    )
            else:
                alone.append((layout, where))
        spans = [
            (cluster[0][0], max(end for *_, end in cluster), where)
            for layout, where in alone
            for cluster in clusters(layout._spans())
        ]
        for (_, end, one), (start, _, other) in pairwise(sorted(spans)):
            if start < end:
                raise ConfigError(f"{one} and {other} share memory at {start:#x}")

    def is_shared(self, group: PageGroup) -> bool:
        """Return True if a group lies in the memory of the first group, slab for slab: an engine
        with one pool of pages gives each page to one group at a time."""
        return bool(group.layout.slabs) and set(group.layout.slabs) <= set(self.slabs)

    def _spans(self) -> list[tuple[int, int, int]]:
        """Return begin, number and end of each slab."""
        return [
            (slab.base, i, slab.base + _extent(self._dims(slab), self.head_bytes))
            for i, slab in enumerate(self.slabs)
        ]

    def validate_sizes(self) -> None:
        """Check sizes and names: the part of `validate` that needs no address."""
        for name in ("num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name), 1, MAX_INDEX)
        check_choice("dtype", self.dtype, tuple(ITEMSIZE))
        check_choice("attention", self.attention, tuple(SLABS_PER_LAYER))
        check_choice("order", self.order, ORDERS)
        # Shortened in the message, since a peer chose it.
        if self.device != "cpu" and not _CUDA.fullmatch(self.device):
            raise ConfigError(
                f'device is {self.device[:32]!r}, must be "cpu" or "cuda:INDEX", at most "cuda:999"'
            )
        if self.attention == "mla" and self.num_kv_heads != 1:
            raise ConfigError(f"num_kv_heads is {self.num_kv_heads}, must be 1 with mla")
        check_range("bytes in the name of opaque pages", len(self.opaque.encode()), 0, 256)
        if self.attention == "fused" and not self.opaque:
            raise ConfigError('attention is "fused", which only opaque pages are; opaque is empty')

    def _check_slab(self, i: int, slab: Slab, regions: list[tuple[int, int]]) -> None:
        """Raise ConfigError unless a slab is aligned, nested, and whole in one region."""
        check_range(f"slab {i} base", slab.base, 0, ADDRESS_END - 1)
        dims = self._dims(slab)
        for name, value in (("base", slab.base), *(("stride", stride) for _, stride in dims)):
            if value % self.itemsize:
                raise ConfigError(
                    f"slab {i} {name} is {value}, must be a multiple of {self.itemsize}"
                )
        # From the inside: each stride must span all that is within it, so elements never overlap.
        # `extent` ends as the bytes of the whole slab.
        extent = self.head_bytes
        for count, stride in reversed(dims):
            if stride < extent:
                raise ConfigError(f"slab {i} has a stride of {stride}, must be at least {extent}")
            extent += (count - 1) * stride
        one_run = ((self.page_size, self.token_bytes), (self.num_kv_heads, self.head_bytes))
        if self.opaque and self._inner_dims(slab) != _by_stride(one_run):
            raise ConfigError(
                f"slab {i} has strides of {slab.token_stride} and {slab.head_stride}, must be "
                f"{self.token_bytes} and {self.head_bytes}: an opaque page is one run of bytes"
            )
        check_inside(regions, f"slab {i}", slab.base, extent)

    def _check_slabs_apart(self) -> None:
        """Only slabs with overlapping extents are compared closely."""
        for group in clusters(self._spans()):
            first = group[0][1]
            dims = self._dims(self.slabs[first])
            for _, i, _ in group:
                if self._dims(self.slabs[i]) != dims:
                    raise ConfigError(f"slabs {first} and {i} interleave with different strides")
            _check_interleaved(group, dims, self.head_bytes)

    def _dims(self, slab: Slab) -> _Dims:
        return _by_stride(((self.num_pages, slab.page_stride), *self._inner_dims(slab)))

    def _inner_dims(self, slab: Slab) -> _Dims:
        return _by_stride(
            ((self.page_size, slab.token_stride), (self.num_kv_heads, slab.head_stride))
        )


def sorted_regions(regions: Regions) -> list[tuple[int, int]]:
    """Return the regions by address. Raises ConfigError if one is empty, out of range or
    overlaps another."""
    found = sorted(regions)
    for start, num_bytes in found:
        check_range("region address", start, 0, ADDRESS_END - 1)
        check_range("region bytes", num_bytes, 1, ADDRESS_END - start)
    # Sorted, so it is enough to compare neighbours.
    for (start, num_bytes), (following, _) in pairwise(found):
        if following < start + num_bytes:
            raise ConfigError(
                f"region at {following:#x} begins inside the one at {start:#x}, which ends at "
                f"{start + num_bytes:#x}"
            )
    return found


def check_inside(regions: list[tuple[int, int]], what: str, start: int, num_bytes: int) -> None:
    """Raise ConfigError unless this memory lies in one of the regions, which are sorted."""
    # It must end in the region in which it begins: what is between two regions is not registered,
    # and may not be a target of writes.
    at = bisect_right(regions, start, key=lambda region: region[0]) - 1
    end = sum(regions[at]) if at >= 0 else 0
    if start + num_bytes > end:
        raise ConfigError(
            f"{what} is [{start:#x}, {start + num_bytes:#x}), not inside one region"
            + (f"; the nearest one ends at {end:#x}" if at >= 0 else "")
        )


def _by_stride(dims: _Dims) -> _Dims:
    return tuple(sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1], reverse=True))


def _extent(dims: _Dims, element_bytes: int) -> int:
    return element_bytes + sum((count - 1) * stride for count, stride in dims)


def clusters(spans: Iterable[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Return spans of memory, as (begin, number, end), by begin; those that overlap together.

    >>> clusters([(8, 0, 9), (2, 1, 6), (0, 2, 3)])
    [[(0, 2, 3), (2, 1, 6)], [(8, 0, 9)]]
    """
    found: list[list[tuple[int, int, int]]] = []
    last = 0
    for begin, number, end in sorted(spans):
        # A gap: all spans before it are apart from all behind it.
        if begin >= last:
            found.append([])
        found[-1].append((begin, number, end))
        last = max(last, end)
    return found


def _check_interleaved(group: list[tuple[int, int, int]], dims: _Dims, element_bytes: int) -> None:
    """Raise ConfigError unless slabs, arrays of equal dimensions, share no byte. All must begin
    within one outermost stride and end before the next, so that they meet only inside the same
    element of it; there the same holds one dimension further in. `group` holds (base, slab number,
    end)."""
    # At most one recursion per dimension, three in all.
    extent = _extent(dims, element_bytes)
    for cluster in clusters((base, i, base + extent) for base, i, _ in group):
        (first, a, _), (last, b, _) = cluster[0], cluster[-1]
        if a == b:
            continue
        inner = dims[1:]
        # The last array's part within the first outermost element must end before the second
        # begins.
        if not dims or last + _extent(inner, element_bytes) > first + dims[0][1]:
            raise ConfigError(
                f"slabs {a} and {b} overlap: at {first:#x} and {last:#x}, {extent} bytes each"
            )
        _check_interleaved(cluster, inner, element_bytes)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError for what is none of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {shown(value)}, must be one of {', '.join(choices)}")


# --- memory for what cannot go straight into pages ------------------------------------------------

BLOCK_BYTES: Final = 4096


def whole_blocks(num_bytes: int) -> int:
    """Round `num_bytes` up to whole blocks.

    >>> whole_blocks(4097)
    8192
    """
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class RelayArea(msgspec.Struct, frozen=True, array_like=True):
    """Memory of `num_bytes` at address `base`. A lease takes at most `lease_bytes`; all in whole
    blocks of BLOCK_BYTES."""

    base: int
    """Address of the area."""
    num_bytes: int
    """Bytes of the area, whole blocks of 4,096."""
    lease_bytes: int
    """Largest lease, whole blocks."""

    def validate(self) -> None:
        """Raise ConfigError naming the value at fault in a peer's description."""
        # Whole blocks: leases are counted in them, and begin at block boundaries.
        for name in ("num_bytes", "lease_bytes"):
            value = getattr(self, name)
            if value < BLOCK_BYTES or value % BLOCK_BYTES:
                raise ConfigError(
                    f"staging {name} is {value}, must be a positive multiple of {BLOCK_BYTES}"
                )
        if self.lease_bytes > self.num_bytes:
            raise ConfigError(
                f"staging lease_bytes is {self.lease_bytes}, the area has {self.num_bytes}"
            )
        # Addresses in it must not overflow an int64.
        if not 0 < self.base < ADDRESS_END - self.num_bytes:
            raise ConfigError(f"staging of {self.num_bytes} bytes at {self.base} is no memory")
