"""Layouts: sizes, and that what `validate` accepts is sound whatever a peer sends."""

import itertools
import operator
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import ITEMSIZE, SLABS_PER_LAYER, KVLayout, Slab
from prefixkv.protocol.messages import decode, encode
from tests.unit.control.wire import DECODE, HELLO

GOOD = KVLayout(
    num_pages=10,
    page_size=4,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype="bfloat16",
    attention="mha",
    order="layer_major",
    slabs=tuple(Slab(base, 128, 32, 16) for base in (0x10000, 0x10500, 0x20000, 0x20500)),
    regions=((0x20000, 0x0A00), (0x10000, 0x0A00)),
)


def changed(**values: Any) -> KVLayout:
    return msgspec.structs.replace(GOOD, **values)


def with_slab(i: int, **values: Any) -> KVLayout:
    slabs = list(GOOD.slabs)
    slabs[i] = msgspec.structs.replace(slabs[i], **values)
    return changed(slabs=tuple(slabs))


def address(layout: KVLayout, layer: int, kv: int, page: int, token: int, head: int) -> int:
    slab = layout.slab(layer, kv)
    strides = slab.page_stride, slab.token_stride, slab.head_stride
    return slab.base + sum(map(operator.mul, (page, token, head), strides))


def bytes_of(layout: KVLayout) -> list[int]:
    """The address of every byte of every slab, one by one."""
    return [
        address(layout, layer, kv, page, token, head) + i
        for layer in range(layout.num_layers)
        for kv in range(layout.slabs_per_layer)
        for page in range(layout.num_pages)
        for token in range(layout.page_size)
        for head in range(layout.num_kv_heads)
        for i in range(layout.head_bytes)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 0), "layer is 2"), ((-1, 0), "layer is -1"), ((0, 2), "kv is 2")],
)
def test_no_slab_outside_the_pool(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GOOD.slab(*arguments)


def test_the_number_of_pages_has_to_be_said() -> None:
    said = msgspec.to_builtins(GOOD)
    del said["num_pages"]
    with pytest.raises(msgspec.ValidationError, match="num_pages"):
        msgspec.convert(said, KVLayout)


NO_DEVICES = [
    "CPU", "cpu:0", "cpu ", "cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:+1", "cuda:1 ",
    "cuda:1000", "cuda:\u0661", "mps", "meta", "DRAM",
]  # fmt: skip
HUGE = [0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 10**40]


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    "field", ["num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim"]
)
def test_sizes_out_of_range(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is {value}, must be in \[1, "):
        changed(**{field: value}).validate()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (changed(dtype="float64"), "dtype is 'float64', must be one of float32"),
        (changed(attention="ring"), "attention is 'ring'"),
        (changed(order=""), "order is ''"),
        (changed(device=""), 'device is \'\', must be "cpu" or "cuda:INDEX"'),
        *(
            (changed(device=device), re.escape(f"device is '{device}', must"))
            for device in NO_DEVICES
        ),
        (changed(device="cuda:1\n"), "device is 'cuda:1.n'"),
        (changed(device="cuda:" + "9" * 10**6), f"device is 'cuda:{'9' * 27}', must"),
        (changed(attention="mla"), "num_kv_heads is 2, must be 1"),
        (changed(attention="mla", num_kv_heads=1), "4 slabs, must be 2 for 2 layers"),
        (changed(slabs=()), "0 slabs, must be 4"),
        (changed(num_layers=2**31 - 1), f"4 slabs, must be {2**32 - 2}"),
        (changed(regions=()), "slab 0 is .* not inside one region"),
        (
            changed(num_pages=11),
            "slab 1 is .* not inside one region; the nearest one ends at 0x10a00",
        ),
        (changed(num_pages=2**31 - 1), "not inside one region"),
        (changed(head_dim=2**31 - 1), "stride of 16, must be at least 4294967294"),
        (with_slab(0, base=0x0FFF0), "slab 0 is .* not inside one region"),
        (with_slab(0, base=-16), "slab 0 base is -16, must be in"),
        (with_slab(0, base=2**63), "slab 0 base"),
        (with_slab(0, base=0x10001), "slab 0 base is 65537, must be a multiple of 2"),
        (with_slab(1, head_stride=17), "slab 1 stride is 17, must be a multiple of 2"),
        (with_slab(1, page_stride=0), "slab 1 has a stride of 0"),
        (with_slab(1, page_stride=-128), "slab 1 has a stride of -128"),
        (with_slab(1, page_stride=126), "slab 1 has a stride of 126, must be at least 128"),
        (with_slab(1, token_stride=30), "slab 1 has a stride of 30, must be at least 32"),
        (with_slab(1, page_stride=2**62), "slab 1 is .* not inside one region"),
        (with_slab(1, base=0x10000), "slabs 0 and 1 overlap"),
        (with_slab(3, base=0x20080), "slabs 2 and 3 overlap"),
        (with_slab(1, base=0x10080, page_stride=130), "interleave with different strides"),
        (
            changed(regions=(*GOOD.regions, (0x10100, 16))),
            "region at 0x10100 begins inside the one at 0x10000",
        ),
        (changed(regions=((0, 2**63),)), None),
        (changed(regions=((0, 2**63 + 1),)), "region bytes"),
        (changed(regions=((2**64, 1),)), "region address"),
        (changed(regions=((0x10000, 0),)), "region bytes is 0"),
        (changed(regions=((-16, 2**30),)), "region address is -16"),
    ],
)
def test_what_a_peer_may_not_send(layout: KVLayout, message: str | None) -> None:
    if message is None:
        layout.validate()
        return
    with pytest.raises(ConfigError, match=message):
        layout.validate()


@pytest.mark.parametrize(
    ("device", "device_id"), [("cpu", 0), ("cuda:0", 0), ("cuda:10", 10), ("cuda:999", 999)]
)
def test_a_layout_says_where_it_is(device: str, device_id: int) -> None:
    layout = changed(device=device)
    layout.validate()
    assert layout.device_id == device_id
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout


def test_what_a_layout_leaves_at_its_default_is_not_in_its_message() -> None:
    """A pool on the CPU, of plain pages, is described by the same bytes as ever."""
    raw = encode(DECODE, 1, HELLO)
    assert b"device" not in raw
    assert b"opaque" not in raw
    told = {"device": "cuda:1", "opaque": "amx"}
    layout = msgspec.structs.replace(HELLO.layout, **told)
    raw = encode(DECODE, 1, msgspec.structs.replace(HELLO, layout=layout))
    assert decode(raw).body.layout == layout  # type: ignore[union-attr]

    frame = msgspec.msgpack.decode(raw)
    said = next(value for value in frame[4] if isinstance(value, dict) and "device" in value)
    assert {name: said.pop(name) for name in told} == told
    assert decode(msgspec.msgpack.encode(frame)).body == HELLO


OPAQUE = changed(opaque="amx")  # its pages are one run each: 4 tokens of 2 heads of 16 bytes


def test_a_page_of_opaque_bytes_is_one_run_of_them() -> None:
    OPAQUE.validate()
    fused = msgspec.structs.replace(OPAQUE, attention="fused", num_layers=4)
    fused.validate()
    assert fused.slabs_per_layer == 1
    assert fused.slab(3, 0) == GOOD.slabs[3]
    one = msgspec.structs.replace(OPAQUE, page_size=1, num_kv_heads=1)
    stray = tuple(
        msgspec.structs.replace(slab, token_stride=3, head_stride=5) for slab in one.slabs
    )
    msgspec.structs.replace(one, slabs=stray).validate()  # strides of one element mean nothing


@pytest.mark.parametrize(
    ("token_stride", "head_stride"),
    [(16, 64), (36, 16), (36, 18)],
    ids=["heads before tokens", "gaps between tokens", "gaps between heads"],
)
def test_strides_inside_an_opaque_page_are_refused(token_stride: int, head_stride: int) -> None:
    """Else a write would take a page apart, and put it together in another order."""
    strides = {"page_stride": 256, "token_stride": token_stride, "head_stride": head_stride}
    slabs = tuple(Slab(base=0x10000 + 0x1000 * i, **strides) for i in range(4))
    plain = changed(slabs=slabs, regions=((0x10000, 0x10000),))
    plain.validate()
    with pytest.raises(ConfigError, match=r"slab 0 has strides of .* must be 32 and 16: an opaque"):
        msgspec.structs.replace(plain, opaque="amx").validate()


def test_the_name_of_a_format_fits_into_a_handshake() -> None:
    changed(opaque="x" * 256).validate()
    with pytest.raises(ConfigError, match=r"name of opaque pages is 258, must be in \[0, 256\]"):
        changed(opaque="\u00e9" * 129).validate()


def test_k_and_v_in_one_slab_are_opaque() -> None:
    with pytest.raises(ConfigError, match='attention is "fused", which only opaque pages are'):
        changed(attention="fused", num_layers=4).validate()


def test_a_slab_across_two_adjacent_regions() -> None:
    with pytest.raises(ConfigError, match=r"slab 0 is .* not inside one region"):
        changed(regions=((0x10000, 0x100), (0x10100, 0x900), (0x20000, 0xA00))).validate()


def strided(sizes: tuple[int, ...], slabs: Any, regions: Any, **more: Any) -> KVLayout:
    names = "num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim"
    of = dict(zip(names, sizes, strict=True)) | {"order": "strided", "dtype": "uint8"} | more
    return changed(**of, slabs=tuple(slabs), regions=regions)


@given(data=st.data())
def test_every_nesting_of_the_dimensions_is_accepted(data: st.DataObject) -> None:
    """One dense tensor whose dimensions page, token, head, layer, kv come in any order, with
    padding anywhere."""
    names = "page", "token", "layer", "head", "kv"
    counts = {name: data.draw(st.integers(1, 3), name) for name in names} | {"kv": 2}
    stride, strides = 4, {}
    for name in data.draw(st.permutations(names)):
        strides[name] = stride + data.draw(st.sampled_from([0, 0, 4]), "padding")
        stride = strides[name] * counts[name]
    of_slab = [strides[name] for name in ("page", "token", "head")]
    places = itertools.product(range(counts["layer"]), range(2))
    slabs = (Slab(64 + i * strides["layer"] + kv * strides["kv"], *of_slab) for i, kv in places)
    sizes = *(counts[name] for name in names[:4]), 4
    layout = strided(sizes, slabs, ((64, stride),))
    layout.validate()
    touched = bytes_of(layout)
    assert len(set(touched)) == len(touched)


@st.composite
def loose_strides(
    draw: st.DrawFn, counts: tuple[int, int, int], element: int, unit: int
) -> tuple[int, int, int]:
    """Strides of (page, token, head) that nest in some order with gaps for other slabs, now and
    then spoilt."""
    strides, stride = [0, 0, 0], element
    for dim in draw(st.permutations(range(3))):
        stride *= draw(st.integers(1, 3))
        strides[dim] = stride
        stride *= counts[dim]
    if draw(st.integers(0, 5)) == 0:
        strides[draw(st.integers(0, 2))] += draw(st.sampled_from([-unit, unit]))
    return strides[0], strides[1], strides[2]


@pytest.mark.slow
@settings(max_examples=max(300, settings.default.max_examples))
@given(data=st.data())
def test_what_is_accepted_shares_no_byte_and_stays_in_its_regions(data: st.DataObject) -> None:
    """Slabs that interleave at random, many of them wrongly: accepted ones are checked byte by
    byte."""
    dtype = data.draw(st.sampled_from(["uint8", "float16"]))
    attention, unit = data.draw(st.sampled_from(["mha", "mla"])), ITEMSIZE[dtype]
    pages, tokens = (data.draw(st.integers(1, 3)) for _ in range(2))
    heads = 1 if attention == "mla" else data.draw(st.integers(1, 2), "heads")
    head_dim, layers = (data.draw(st.integers(1, 2)) for _ in range(2))
    some_strides = loose_strides((pages, tokens, heads), head_dim * unit, unit)
    shared, num_slabs = data.draw(some_strides), layers * SLABS_PER_LAYER[attention]
    bases = data.draw(st.lists(st.integers(0, 60), min_size=num_slabs, max_size=num_slabs))
    slabs = tuple(
        Slab(
            base * unit, *(data.draw(some_strides) if data.draw(st.integers(0, 9)) == 0 else shared)
        )
        for base in bases
    )
    every = [((0, 2000),), ((0, 100), (100, 900)), ((80, 900), (5, 70))]
    regions, of = data.draw(st.sampled_from(every)), {"dtype": dtype, "attention": attention}
    layout = strided((pages, tokens, layers, heads, head_dim), slabs, regions, **of)
    try:
        layout.validate()
    except ConfigError:
        return
    touched = bytes_of(layout)
    assert len(set(touched)) == len(touched)
    per_slab = len(touched) // num_slabs
    for i in range(num_slabs):
        mine = touched[i * per_slab : (i + 1) * per_slab]
        assert any(start <= min(mine) and max(mine) < start + size for start, size in regions)
