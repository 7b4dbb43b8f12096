"""What the backend for SGLang does without SGLang: keys that grow, slots, order, time, waiting,
pools and rows at addresses, runs of pages. The rest runs on SGLang's own pools:
`tests/integration/sglang`."""

from array import array
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv.cache.events import NO_PARENT, Inserted, PagePaths
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey
from prefixkv.engines.sglang.keys import FEW, Packer, RequestKey, namespace_of
from prefixkv.engines.sglang.memory import Rows, pool_of
from prefixkv.engines.sglang.plugin import build
from prefixkv.engines.sglang.slots import MAX_RUNS, SlotTable, packed_range, page_runs
from prefixkv.engines.sglang.waiting import (
    Depths,
    Joins,
    NewPagesFirst,
    RankClock,
    TimeMark,
    weight_order,
)
from prefixkv.errors import ConfigError, RequestError, TokenError
from tests.unit.engines.sglang.conftest import BUFFERS, PAGE, PAGE_BYTES, PAGES, Memory

# --- keys -----------------------------------------------------------------------------------------


def words(tokens: list[int], bigram: bool) -> list[int]:
    """A key's int32 words: pairs of tokens, or the two halves of each."""
    pairs = pairwise(tokens) if bigram else ((token & 0xFFFFFFFF, token >> 32) for token in tokens)
    return [word for pair in pairs for word in pair]


@given(
    bigram=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from("agn"), st.integers(0, 9) | st.integers(FEW, 3 * FEW)),
        max_size=12,
    ),
)
def test_a_key_that_grows_is_the_key_of_what_it_covers(
    bigram: bool, steps: list[tuple[str, int]]
) -> None:
    """Asked for more, for less, of an array that grew and of another one, by few and by many."""
    key, ids = RequestKey("lora", Packer(bigram)), array("q", [7, 8])
    for what, number in steps:
        if what == "g":
            ids.extend(range(number))
        elif what == "n":
            ids = ids[:number]
        else:
            number += 3
        covered = key.cover(ids, number)
        assert covered.tokens().tolist() == words(list(ids[:number]), bigram)
        assert covered.namespace == "lora"
        ids.append(5)  # nothing of the key still holds the array's memory


def test_only_added_tokens_are_packed_and_other_tokens_are_packed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[tuple[int, int]] = []
    words_of = Packer.words
    monkeypatch.setattr(
        Packer,
        "words",
        lambda packer, ids, *ends: (packed.append(ends), words_of(packer, ids, *ends))[1],
    )
    key, ids = RequestKey(None, Packer(False)), array("q", range(1000))
    for _ in range(3):
        key.cover(ids, 999)
    ids.extend(range(5))
    key.cover(ids, 1005)
    key.cover(ids, 100)
    longer = ids + array("q", [7])  # SGLang puts the prompt and what came after it together
    key.cover(longer, 1006)
    assert packed == [(0, 999), (999, 1005), (1005, 1006)]
    longer = longer[:]
    longer[500] = 3
    assert key.cover(longer, 1006).tokens()[1000:1002].tolist() == [3, 0]
    assert packed[3:] == [(0, 1006)]


@pytest.mark.parametrize("more", [0, 1, 100])
def test_pairs_of_tokens_that_no_int32_holds_are_refused_and_the_key_stays(more: int) -> None:
    key, ids = RequestKey(None, Packer(True)), array("q", [1, 2])
    key.cover(ids, 2)
    for bad in (-1, 1 << 31, 1 << 40):
        longer = ids[:]
        longer.extend([bad, *range(more)])
        with pytest.raises(TokenError, match=str(bad)):
            key.cover(longer, len(longer))
        assert key.cover(ids, 2).tokens().tolist() == [1, 2]
    ids.extend([(1 << 31) - 1, *range(more)])
    assert key.cover(ids, len(ids)).tokens().tolist() == words(list(ids), True)


def test_tokens_that_no_int32_holds_are_keys_of_their_own() -> None:
    """Two tokens with the same lower half are two."""
    tokens = [5, 5 + (1 << 32), -1, 1 << 31]
    packed = {Packer(False).words(array("q", [token]), 0, 1) for token in tokens}
    assert len(packed) == 4


def test_extra_keys_and_salts_make_namespaces() -> None:
    names = [namespace_of(key, salt) for key in (None, "", "a") for salt in (None, "b")]
    assert len(set(names)) == 6
    assert namespace_of(None, "") is None


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_become_slots_and_slots_pages(page_size: int) -> None:
    table = SlotTable(50, page_size, "cpu")
    pages = np.array([49, 0, 7], np.int32)
    slots = table.slots(pages)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [p * page_size + i for p in (49, 0, 7) for i in range(page_size)]
    assert table.pages(slots.to(torch.int32)).tolist() == [49, 0, 7]
    rows = torch.stack([torch.zeros_like(slots), slots]).to(torch.int32)
    found = table.pages_of_row(rows, 1, page_size, 3 * page_size)
    assert (found.tolist(), found.dtype) == ([0, 7], np.dtype(np.int32))
    assert not len(table.pages_of_row(rows, 1, page_size, page_size))
    rows[1] += 3 * page_size
    assert table.pages_of_row(rows, 1, page_size, 3 * page_size).tolist() == [3, 10]
    assert table.pages_of_row(rows.flip(0), 1, 0, page_size).tolist() == [0]  # of another pool
    slots += 1  # the caller's
    assert table.slots(pages)[0] == 49 * page_size
    assert len(table.slots(pages[:0])) == 0
    assert table.on_device(pages).tolist() == [49, 0, 7]


# --- order ----------------------------------------------------------------------------------------


def test_the_branch_that_most_are_on_comes_first_and_equals_stay_in_order() -> None:
    tree = RadixCache(page_size=1)
    prompts = [[1, 10], [2, 20], [2, 21], [3, 30], [1, 11], [2, 20, 5], [4]]
    for page, prompt in enumerate(prompts):
        tree.insert(prompt, range(10 * page, 10 * page + len(prompt)))
    ends = [tree.match_prefix(prompt).node for prompt in prompts]
    assert weight_order([*ends, None]) == [1, 5, 2, 0, 4, 3, 6, 7]
    assert weight_order([]) == []
    assert weight_order([None, None]) == [0, 1]


# --- time -----------------------------------------------------------------------------------------


def test_time_is_sent_with_requests_and_now_and_then_without() -> None:
    clock = RankClock()
    assert clock.mark(["a"], 1.0) == ["a", TimeMark(1.0)]
    assert clock.mark([], 1.01) == []
    assert clock.mark([], 1.06) == [TimeMark(1.06)]
    assert clock.now_s == 0.0  # until it has come back
    assert clock.take([TimeMark(3.0), "b", TimeMark(2.0)]) == ["b"]
    assert clock.now_s == 3.0
    clock.take([TimeMark(2.5)])
    assert clock.now_s == 3.0


# --- waiting --------------------------------------------------------------------------------------


def ask(*tokens: int) -> SimpleNamespace:
    return SimpleNamespace(key=RadixKey(tokens))


def test_prompts_are_matched_again_only_when_pages_came_or_went() -> None:
    tree = RadixCache(page_size=1)
    asked: list[object] = []

    def key_of(request: SimpleNamespace) -> RadixKey:
        asked.append(request)
        return request.key

    order = NewPagesFirst(Depths(tree, key_of), patience_s=5.0)
    long, short = (SimpleNamespace(req=ask(*words)) for words in ((1, 2, 3, 4), (9, 9)))
    queue = [long, short]
    for _ in range(3):
        order.order(queue, 0.0)
    assert queue == [short, long]
    assert len(asked) == 2
    tree.insert([1, 2, 3, 4], range(4))
    order.order(queue, 4.9)
    assert queue == [long, short]
    assert len(asked) == 4
    late = SimpleNamespace(req=ask(7))
    queue.append(late)
    order.order(queue, 5.0)
    assert queue == [long, short, late]
    queue.remove(long)
    order.order(queue, 5.0)
    queue.append(long)  # as another would that has its place in memory
    order.order(queue, 6.0)
    assert queue == [short, long, late]


class Queue:
    """Requests by name, a letter a page of their prompt; `come` puts one's prompt into the tree."""

    def __init__(self) -> None:
        self.tree = RadixCache(page_size=2)
        self.asked = 0
        self.requests: dict[str, SimpleNamespace] = {}
        self.joins = Joins(Depths(self.tree, self._key_of), 2 * TOKEN_BYTES)
        self.coming: list[SimpleNamespace] = []

    def _key_of(self, request: SimpleNamespace) -> RadixKey:
        self.asked += 1
        return request.key

    def add(self, name: str, pages: str, namespace: str = "", rest: int = 0) -> None:
        tokens = [ord(page) for page in pages for _ in range(2)] + [0] * rest
        self.requests[name] = SimpleNamespace(key=RadixKey(tokens, namespace or None))

    def held(self, *names: str) -> list[str]:
        held = self.joins.requests_to_hold([self.requests[name] for name in names], self.coming)
        return [name for name in names if id(self.requests[name]) in held]

    def admit(self, *names: str) -> None:
        admitted = [self.requests[name] for name in names]
        self.joins.begin(admitted)
        self.coming += admitted

    def come(self, name: str) -> None:
        key = self.requests[name].key
        whole = len(key) // 2 * 2
        start = self.tree.num_pages
        matched = self.tree.match_prefix(key)
        new = range(start, start + whole // 2 - matched.depth)
        self.tree.insert(key, [*matched.pages, *new])
        self.fail(name)

    def fail(self, name: str) -> None:
        self.coming.remove(self.requests[name])


def test_what_another_request_brings_is_waited_for() -> None:
    queue = Queue()
    for name in ("first", "second", "third"):
        queue.add(name, "abcdef", rest=1)
    queue.add("other", "xbcdef")
    queue.add("salted", "abcdef", namespace="salt")
    assert queue.held("first", "second", "other", "third", "salted") == ["second", "third"]
    queue.admit("first")
    assert queue.held("second", "third", "other") == ["second", "third"]
    queue.come("first")
    assert queue.held("second", "third") == []
    assert queue.joins.num_joined == 2


def test_when_what_was_to_bring_it_fails_the_next_one_does() -> None:
    queue = Queue()
    for name in ("first", "second", "third"):
        queue.add(name, "abcdef")
    queue.admit("first")
    assert queue.held("second", "third") == ["second", "third"]
    queue.fail("first")
    assert queue.held("second", "third") == ["third"]
    assert queue.held("third") == []  # nobody brings it


def test_a_small_part_is_not_waited_for() -> None:
    """Of pages that are not in the tree; half of them is enough."""
    queue = Queue()
    queue.add("known", "st")
    queue.coming.append(queue.requests["known"])
    queue.come("known")
    queue.add("first", "stabcd")
    queue.add("less", "stabcdwxyz12345")
    queue.add("half", "stabcdwxyz")
    queue.add("one page", "stauvw")
    queue.add("shorter", "stab")
    queue.add("cached", "st")
    queue.admit("first")
    assert queue.held("less", "half", "one page", "shorter", "cached") == ["half", "shorter"]


def test_prompts_that_begin_alike_are_told_apart() -> None:
    """Two that go on differently behind the same page lead, each those that go on as it does."""
    queue = Queue()
    for name, pages in {
        "a": "pqabcdef",
        "b": "pqABCDEF",
        "a2": "pqabcdef",
        "b2": "pqABCDEF",
    }.items():
        queue.add(name, pages)
    assert queue.held("a", "b", "b2", "a2") == ["b2", "a2"]
    for name in ("pq", "zq"):
        queue.add(name, name)
        queue.coming.append(queue.requests[name])
        queue.come(name)
    queue.add("same page, other path", "zqabcdef")
    queue.admit("a")
    assert queue.held("same page, other path", "a2") == ["a2"]


# --- events ---------------------------------------------------------------------------------------


def test_pages_are_hashed_as_the_listener_says_and_runs_are_still_runs() -> None:
    """Two namespaces whose first pages follow another hash; parents stay prefixkv's own."""
    tree = RadixCache(page_size=2)
    log = tree.record()
    log.take()
    tree.insert([1, 2, 3, 4], [0, 1], namespace="s")
    tree.insert([1, 2, 3, 4], [2, 3])
    paths = PagePaths(
        2,
        hash_page=lambda before, tokens: before + bytes(tokens[::4]),
        before_first=lambda namespace: b"" if namespace is None else b"salt",
    )
    for change in log.take():
        assert isinstance(change, Inserted)
        paths.inserted(change)
    told = [[(place.parent, place.key) for place in run] for run in paths.runs()]
    assert told == [
        [(NO_PARENT, b"salt\1\2"), (b"salt\1\2", b"salt\1\2\3\4")],
        [(NO_PARENT, b"\1\2"), (b"\1\2", b"\1\2\3\4")],
    ]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["soon", "nan", "-1"])
def test_a_patience_that_is_no_time_is_refused_as_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PREFIXKV_PATIENCE_S", text)
    with pytest.raises(ConfigError, match=f"PREFIXKV_PATIENCE_S is '{text}'"):
        build(None)


def test_a_pool_is_sglangs_memory_and_no_copy() -> None:
    memory = Memory(filled=True)
    layout = memory.pool.layout
    assert (layout.num_pages, layout.page_size, layout.opaque) == (PAGES, PAGE, "test")
    assert layout.num_layers == BUFFERS
    assert layout.regions == tuple(
        sorted((buffer.ctypes.data, buffer.nbytes) for buffer in memory.buffers)
    )
    before = memory.pool.read_pages([7]).reshape(BUFFERS, PAGE_BYTES).numpy()
    assert [row.tolist() for row in before] == [buffer[7].tolist() for buffer in memory.buffers]
    memory.buffers[2][7] = 9
    assert memory.pool.read_pages([7]).reshape(BUFFERS, PAGE_BYTES)[2].eq(9).all()


def test_what_is_behind_the_last_whole_page_is_not_the_pools() -> None:
    buffer = np.zeros(10 * 64 + 16, np.uint8)
    pool = pool_of([buffer.ctypes.data], [buffer.nbytes], [64], page_size=4, device="cpu", tag="t")
    assert pool.layout.num_pages == 10
    assert pool.layout.regions == ((buffer.ctypes.data, 640),)


@pytest.mark.parametrize(
    ("lengths", "page_bytes", "told"),
    [
        ([640, 640], [64, 32], "10 pages of 64 bytes, 20 pages of 32 bytes"),
        ([640, 320], [64, 64], "5 pages of 64 bytes, 10 pages of 64 bytes"),
        ([], [], "no pages"),
    ],
)
def test_buffers_that_differ_are_refused_by_what_they_have(
    lengths: list[int], page_bytes: list[int], told: str
) -> None:
    buffers = [np.zeros(length, np.uint8) for length in lengths]
    addresses = [buffer.ctypes.data for buffer in buffers]
    with pytest.raises(ConfigError, match=told):
        pool_of(addresses, lengths, page_bytes, page_size=4, device="cpu", tag="t")


def test_rows_go_over_as_they_are() -> None:
    sizes, rng = [64, 512, 8], np.random.default_rng(1)
    both = [[np.zeros((5, size), np.uint8) for size in sizes] for _ in range(2)]
    for buffer in both[0]:
        buffer[:] = rng.integers(0, 255, buffer.shape)
    source, target = (
        Rows([one.ctypes.data for one in side], [one.nbytes for one in side], sizes)
        for side in both
    )
    target.write(3, source.read(1))
    for mine, theirs in zip(*both, strict=True):
        assert theirs[3].tolist() == mine[1].tolist()
        assert not theirs[[0, 1, 2, 4]].any()
    with pytest.raises(RequestError, match="583 bytes, decode's rows have 584"):
        target.write(0, bytes([1] * 583))
    assert not any(buffer[0].any() for buffer in both[1])


POOL = 300
RUN = st.tuples(st.integers(-3, POOL + 3), st.integers(1, 40))
IDS = st.lists(RUN, max_size=MAX_RUNS + 2).map(
    lambda runs: [id for first, length in runs for id in range(first, first + length)]
)


def pack(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def naive_runs(ids: list[int]) -> list[tuple[int, int]]:
    """Ids that are not in the pool are runs of their own; a negative one reads as a large one."""
    runs: list[tuple[int, int]] = []
    for id in (one % 2**32 for one in ids):
        if runs and id == runs[-1][1] < POOL:
            runs[-1] = runs[-1][0], id + 1
        else:
            runs.append((id, id + 1))
    return runs


@example([POOL - 2, POOL - 1, 5, 6])
@given(IDS)
def test_runs_are_those_of_a_naive_look(ids: list[int]) -> None:
    expected = naive_runs(ids)
    found = page_runs(pack(ids), packed_range(POOL))
    # It may give up where the first runs of many pages are short.
    many = len(expected) > MAX_RUNS
    assert (found is None) if many else (found in (expected, None))
    if len(ids) <= 64:
        assert (found is None) == many


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, POOL])
def test_neighbours_are_one_run(length: int) -> None:
    assert page_runs(pack([*range(length)]), packed_range(POOL)) == [(0, length)]


def test_very_many_runs_are_left_after_the_first() -> None:
    pool = 2000
    ids = packed_range(pool)
    assert page_runs(pack([5, *range(7, pool)]), ids) == [(5, 6), (7, pool)]
    assert page_runs(pack([5, 7, *range(9, pool)]), ids) is None
    assert page_runs(pack([*range(0, pool, 2)]), ids) is None
