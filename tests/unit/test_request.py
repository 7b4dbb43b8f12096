"""What an engine submits: packed and checked once, with an error that names the value. And the
batch as kernels take it, against one token at a time."""

from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import PageStateError, RequestError, TokenError
from prefixkv.request import Hints, Request
from prefixkv.spi import page_table, slot_mapping

TOKENS: list[Any] = [
    [1, 2, 3], (1, 2, 3), range(1, 4), np.arange(1, 4), np.arange(1, 4, dtype=np.int32),
    RadixKey([1, 2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda tokens: f"{type(tokens).__name__}")
def test_tokens_of_any_kind_are_packed_alike(tokens: Any) -> None:
    assert Request("a", tokens, room=1).key.tokens().tolist() == [1, 2, 3]


def test_array_and_key_stay_the_callers() -> None:
    tokens, key = np.array([1, 2, 3], np.int32), RadixKey([1, 2, 3])
    requests = Request("a", tokens, room=1), Request("b", key, room=1)
    tokens[0] = 9
    key.append(4)
    assert [request.key.tokens().tolist() for request in requests] == [[1, 2, 3]] * 2


def test_the_namespace_is_the_keys() -> None:
    assert Request("a", [1], room=1, namespace="lora").key.namespace == "lora"
    assert Request("a", RadixKey([1], "lora"), room=1).key.namespace == "lora"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([1, -2], "-2"),
        ([2**31], "2147483648"),
        ([1.5], "1.5"),
        ([True], "bool"),
        (["a"], "'a'"),
        ("abc", "str"),
        (np.array([1.0]), "float64"),
        (np.array([[1]]), "shape"),
        (np.array([-1], np.int32), "-1"),
        (5, "int"),
        (torch.empty(3, dtype=torch.int64, device="meta"), "no data"),
    ],
)
def test_what_is_no_token_is_named(tokens: Any, text: str) -> None:
    with pytest.raises(TokenError, match=text):
        Request("a", tokens, room=1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": []}, "'a' has no tokens"),
        ({"max_new_tokens": 0}, r"max_new_tokens is 0, a whole number in \[1, "),
        ({"room": -1}, "room is -1"),
        ({"room": 2**64}, "room is 18446744073709551616"),
        ({"room": 1.5}, "room is 1.5"),
        ({"room": True}, "room is True"),
        ({"room": "7"}, "room is '7'"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"generation": None}, "generation is None"),
        ({"generation": -1}, "generation is -1"),
        ({"generation": 2**31}, "generation is 2147483648"),
        ({"namespace": ["unhashable"]}, "namespace"),
        ({"namespace": float("nan")}, "namespace is nan"),
        ({"priority": float("nan")}, "priority is nan"),
        ({"priority": None}, "priority is None"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"priority": True}, "priority is True"),
        ({"priority": 2**63}, "priority is 9223372036854775808"),
        ({"priority": -(2**63) - 1}, "priority is -9223372036854775809"),
        ({"prefill": None}, "prefill is None"),
        ({"prefill": b"tcp://a:1"}, "prefill is b'tcp"),
        ({"cacheable": "no"}, "cacheable is 'no'"),
        ({"cacheable": None}, "cacheable is None"),
        ({"tokens": RadixKey([1]), "namespace": "lora"}, "namespace"),
        ({"hints": {"ends": True}}, "hints is a dict"),
        ({"hints": Hints(session="x" * 257)}, "hints.session"),
        ({"hints": Hints(session="\ud800")}, "hints.session is"),
        ({"hints": Hints(ends=1)}, "hints.ends"),
        ({"hints": Hints(returns_after=45)}, "hints.returns_after"),
        ({"hints": Hints(shared="yes")}, "hints.shared"),
        ({"hints": Hints(demote=None)}, "hints.demote"),
        ({"hints": Hints(version=2)}, "hints.version"),
        ({"hints": Hints(ends=True, returns_after=30)}, "hints.ends is True, hints.returns_after"),
    ],
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Request("a", **{"tokens": [1], "room": 1, **fields})


@pytest.mark.parametrize("rid", [7, None, b"a", ["a"]])
def test_a_request_has_a_string_for_its_name(rid: Any) -> None:
    with pytest.raises(RequestError, match="rid is"):
        Request(rid, [1], room=1)


@pytest.mark.parametrize("deadline_s", [-1, -1e-9, float("nan"), "5", True, [1.0]])
def test_a_deadline_is_a_time_that_can_pass(deadline_s: Any) -> None:
    with pytest.raises(RequestError, match="deadline_s is"):
        Request("a", [1], room=1, deadline_s=deadline_s)


def test_the_ends_of_the_ranges_are_taken() -> None:
    for deadline_s in (None, 0, 0.5, np.float32(2.0), float("inf")):
        Request("a", [1], room=1, deadline_s=deadline_s)
    for fields in ({"room": 2**64 - 1, "generation": 2**31 - 1}, {"room": 0, "max_new_tokens": 1}):
        request = Request("a", [2**31 - 1, 0], **{"room": 1, **fields})
        assert len(request.key) == 2
    for priority in (-(2**63), 2**63 - 1):
        assert Request("a", [1], room=1, priority=priority).priority == priority
    request = Request("a", [1], room=1, priority=np.int16(-3), cacheable=np.bool_(False))  # type: ignore[arg-type]
    assert (type(request.priority), request.cacheable) == (int, False)
    request = Request("a", [1], room=np.uint64(7), max_new_tokens=np.int32(3))
    assert (type(request.room), type(request.max_new_tokens)) == (int, int), (
        "numpy's travel in no frame"
    )


def test_what_a_client_says_of_its_session_is_what_finish_takes() -> None:
    said = {"session": "s" * 256, "returns_after": 120, "of_later_versions": 1}
    hints = msgspec.convert(said, Hints)
    assert Request("a", [1], room=1, hints=hints).hints.continues == 120
    assert [Hints(ends=True).continues, Hints(demote=True, returns_after=30).continues] == [0, 0]
    assert Request("a", [1], room=1).hints.continues is None


def test_the_room_has_to_be_given() -> None:
    """Two requests that left it out would be in one room."""
    with pytest.raises(TypeError, match="room"):
        Request("r", [1, 2])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["rid", "prefill", "decode"])
def test_texts_of_a_request_are_bounded(name: str) -> None:
    """A client may have chosen them, and they are kept."""
    fields = {"rid": "r", "tokens": [1, 2], "room": 1}
    assert Request(**{**fields, name: "x" * 1024})
    with pytest.raises(RequestError, match=f"{name} has 1025 characters"):
        Request(**{**fields, name: "x" * 1025})
    # JSON's escapes make it. It would be in the log of rank 0, and no message carries it.
    with pytest.raises(RequestError, match=f"{name} is .*UTF-8 has no bytes"):
        Request(**{**fields, name: "x\ud800"})


@pytest.mark.parametrize(
    "namespace",
    ["x" * 70_000, b"x" * 70_000, ("a", "x" * 70_000), ("x" * 40_000, ("x" * 40_000,)),
     (1,) * 70_000, 1 << 600_000],
    ids=["str", "bytes", "in a tuple", "in tuples", "many", "a number"],
)  # fmt: skip
def test_a_namespace_is_bounded(namespace: object) -> None:
    with pytest.raises(RequestError, match="at most 65536 are taken"):
        Request("r", [1, 2], room=1, namespace=namespace)
    Request("r", [1, 2], room=1, namespace=("lora", "x" * 1024, ("image", 0, 500)))


@pytest.mark.parametrize("width", [1, 2])
def test_tuples_in_tuples_of_a_namespace_are_bounded(width: int) -> None:
    """Python hashes them on its stack, without a limit; and all of them, where two share parts."""
    namespace: Any = ("x",) * width
    for _ in range(3_000):
        namespace = (namespace,) * width
    with pytest.raises(RequestError, match=r"64 at most|at most 65536"):
        Request("r", [1, 2], room=1, namespace=namespace)


def test_the_parts_of_a_namespace_are_those_that_python_hashes() -> None:
    """Of a tuple that iterates otherwise, too: over more without an end, it was a hang."""

    class Endless(tuple[str, ...]):
        __slots__ = ()

        def __iter__(self) -> Any:
            return count()

    Request("r", [1, 2], room=1, namespace=Endless(["x"]))
    with pytest.raises(RequestError, match="at most 65536"):
        Request("r", [1, 2], room=1, namespace=Endless(["x" * 70_000]))


def rows_of(rng: np.random.Generator, num: int) -> list[np.ndarray]:
    return [rng.permutation(100)[: rng.integers(1, 9)].astype(np.int32) for _ in range(num)]


def test_a_page_table_has_each_row_and_then_the_pad() -> None:
    rows = rows_of(np.random.default_rng(0), 6)
    table = page_table(rows, pad=-1)
    assert table.dtype == np.int32
    assert table.shape == (6, max(map(len, rows)))
    for line, row in zip(table.tolist(), rows, strict=True):
        assert line == row.tolist() + [-1] * (len(line) - len(row))
    assert page_table(rows, width=2).tolist() == [([*row, 0])[:2] for row in rows]
    assert page_table([]).shape == (0, 0)


def test_a_slot_is_where_the_token_is_in_the_pool() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 3, 16):
        rows = rows_of(rng, 5)
        spans = [np.sort(rng.integers(0, len(row) * size + 1, 2)) for row in rows]
        starts, ends = zip(*(span.tolist() for span in spans), strict=True)
        slots = slot_mapping(rows, starts, ends, size)
        assert slots.dtype == np.int64
        assert slots.tolist() == [
            int(row[i // size]) * size + i % size
            for row, start, end in zip(rows, starts, ends, strict=True)
            for i in range(start, end)
        ]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 9)])
def test_tokens_that_the_pages_do_not_hold_are_refused(start: int, end: int) -> None:
    with pytest.raises(PageStateError, match="2 pages of 4 tokens"):
        slot_mapping([np.array([5, 6], np.int32)], [start], [end], 4)
