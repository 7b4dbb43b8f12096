"""What a retraction asks of prefill when nothing was evicted, as docs/integrate/endings.md says."""

from __future__ import annotations

import pytest

from prefixkv.digest import prompt_digest
from tests.unit.decode.desk import PAGE_SIZE, Desk


@pytest.mark.parametrize("num_tokens", range(2 * PAGE_SIZE, 3 * PAGE_SIZE))
def test_a_retracted_request_asks_for_its_partial_page_and_for_nothing_else(
    num_tokens: int,
) -> None:
    """The tree keeps whole pages; the tail is freed."""
    desk = Desk(32)
    desk.start("old", 4, outputs=1)
    req = desk.start("a", num_tokens, outputs=1)
    assert req.kv_len == num_tokens
    desk.commands()
    desk.retract(req)
    assert desk.admit() == ["a"]
    asks = desk.scheduler.pop_needs_prefill()
    assert desk.pages.evicted_pages == 0
    if num_tokens % PAGE_SIZE == 0:
        assert asks == []
        assert desk.transferred() == ["a"]
        return
    assert [ask.rid for ask in asks] == ["a"]
    promise = desk.commands()[-1].promise
    assert (promise.prefix_len, len(promise.page_ids())) == (2 * PAGE_SIZE, 1)


def test_a_promise_after_some_output_is_of_the_prompt_and_the_output() -> None:
    """The tree has hashes of the prompt's path, from which the digest of both is worked out."""
    desk = Desk(32)
    desk.start("old", 4, outputs=1)
    req = desk.start("a", 10, max_new=9, outputs=6)
    first = desk.commands()[-1]
    assert first.promise.digest == prompt_digest(req.request.key)
    desk.retract(req)
    assert desk.admit() == ["a"]
    again = desk.commands()[-1]
    assert again.promise.digest == prompt_digest(req.tokens[:-1])
    assert again.promise.digest != first.promise.digest
    match = desk.pages.match(req.key)
    assert match is not None
    assert desk.pages.cache.hashed(match) is not None
