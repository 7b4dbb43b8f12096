"""Path hashes in the tree: a digest worked out from them is the prompt's, whatever became of the
tree, and what they know of is not hashed again."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.cache.radix_key import RadixKey
from prefixkv.digest import prompt_digest
from prefixkv.errors import InternalError
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for

PAGE_SIZE, NUM_PAGES = 2, 24
NAMESPACES: list[Any] = [None, "a", ("a", 1)]


class Desk:
    """A page manager, and the requests that hold pages of it."""

    def __init__(self, every_pages: int = 1) -> None:
        self.pages = PageManager(NUM_PAGES, PAGE_SIZE, 8)
        self.pages.hash_every_pages = every_pages
        self.running: list[tuple[RequestPages, RadixKey]] = []
        self.known_pages = 0  # of what was hashed, how many were known

    def begin(self, tokens: list[int], namespace: Any = None, stale: bool = False) -> bool:
        """Take a request in, and lock what is cached of it, if it fits. `stale`: other pages go in
        between."""
        manager, key = self.pages, RadixKey(tokens, namespace)
        match = manager.match(key)
        assert match is not None
        self.known_pages += (manager.cache.hashed(match) or (0, None))[0]
        digest, hashes = manager.digest(key, match)
        assert digest == prompt_digest(tokens, namespace)
        if stale:
            self.evict(3)
            match = manager.match(key)
            assert match is not None
        missing = pages_for(len(key), PAGE_SIZE) - match.depth
        if not manager.can_open or missing > manager.available_pages - match.unprotected_pages:
            return False
        held = manager.open(match, missing, 0.0)
        held.hashes = hashes
        manager.keep_hashes(held)
        self.running.append((held, key))
        return True

    def commit(self, at: int) -> None:
        held, key = self.running[at % len(self.running)]
        self.pages.cache_unfinished(held, key, 0.0)

    def end(self, at: int, how: str) -> None:
        held, key = self.running.pop(at % len(self.running))
        if how == "drop":
            self.pages.drop(held)
        else:
            kept = key.prefix(len(key) // 2) if how == "half" else key
            self.pages.cache_finished(held, kept, 0.0)

    def evict(self, num_pages: int) -> None:
        evicted = self.pages.cache.evict(num_pages)
        self.pages.allocator.uncache(evicted)
        self.pages.allocator.free(evicted)

    def turn(self, tokens: list[int], namespace: Any = None) -> None:
        """A whole request."""
        if self.begin(tokens, namespace):
            self.commit(-1)
            self.end(-1, "finish")


# Most begin alike, so that paths part and go on everywhere.
_prompts = st.builds(
    lambda length, tail: [0] * length + tail,
    st.sampled_from([2, 4, 6, 8, 10, 3, 7]),
    st.sampled_from([[], [], [1], [1, 1], [1, 1, 1, 1]]),
)
_namespaces = st.sampled_from([None, None, *NAMESPACES])
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), _prompts, _namespaces),
        st.tuples(st.just("begin"), _prompts, _namespaces, st.booleans()),
        st.tuples(st.just("commit"), st.integers(0, 7)),
        st.tuples(st.just("end"), st.integers(0, 7), st.sampled_from(["finish", "half", "drop"])),
        st.tuples(st.just("evict"), st.integers(1, 9)),
        st.tuples(st.just("flush")),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=300)
@given(st.integers(1, 3), _steps)
def test_a_digest_is_the_prompt_s_whatever_became_of_the_tree(
    every_pages: int, steps: list[tuple[Any, ...]]
) -> None:
    desk = Desk(every_pages)
    for name, *arguments in steps:
        if name == "flush":
            desk.pages.flush()
        elif desk.running or name in ("turn", "begin", "evict"):
            getattr(desk, name)(*arguments)
        desk.pages.check_invariants()


def test_a_next_turn_hashes_only_what_is_new() -> None:
    desk = Desk(every_pages=4)
    system, answer = list(range(100, 116)), [7] * 6  # eight pages, and three
    desk.turn([*system, *answer])
    assert desk.known_pages == 0
    # The first is known to all of its whole pages; the second, which parts from it at page eight,
    # cannot use that, and leaves a hash where it parts.
    desk.turn([*system, 1, 2, 3])
    assert desk.known_pages == 0
    desk.turn([*system, 4, 5, 6])
    assert desk.known_pages == 8
    desk.turn([*system, *answer, 9, 9])
    assert desk.known_pages == 8 + 11
    # Their own two pages are fewer than four, so they left none there.
    depths = [depth for node in desk.pages.cache.nodes() for depth, _ in node.hashes or ()]
    assert sorted(depths) == [8, 11]
    # What is cut off takes its hash along, and no more.
    desk.evict(NUM_PAGES - desk.pages.allocator.free_pages - 9)
    desk.pages.check_invariants()
    depths = [depth for node in desk.pages.cache.nodes() for depth, _ in node.hashes or ()]
    assert depths == [8]


def test_a_hash_of_another_path_is_found() -> None:
    desk = Desk()
    desk.turn([1, 2, 3, 4])
    desk.turn([5, 6, 7, 8])
    first, second = desk.pages.cache.nodes()
    first.hashes, second.hashes = second.hashes, first.hashes
    with pytest.raises(InternalError, match="is another path's"):
        desk.pages.check_invariants()
