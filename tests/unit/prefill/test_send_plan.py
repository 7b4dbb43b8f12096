"""Which pages each chunk sends, against the list of what decode lacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import RequestError
from prefixkv.prefill.request import SendPlan, Span

CASES = st.integers(1, 8).flatmap(
    lambda page_size: st.integers(1, 60).flatmap(
        lambda num_tokens: st.tuples(
            st.just(page_size),
            st.just(num_tokens),
            st.integers(0, num_tokens // page_size).map(lambda pages: pages * page_size),
            st.lists(st.integers(0, num_tokens), max_size=8).map(sorted),
        )
    )
)


@given(CASES)
def test_every_page_that_decode_lacks_is_sent_once_in_order_and_only_when_it_is_whole(
    case: tuple[int, int, int, list[int]],
) -> None:
    page_size, num_tokens, prefix_len, ends = case
    lacking = [
        page for page in range(-(-num_tokens // page_size)) if page >= prefix_len // page_size
    ]
    plan = SendPlan(num_tokens, prefix_len, page_size)
    sent: list[int] = []
    for end in ends:
        span = plan.send(end)
        sent += range(*span)
        assert sent == [page for page in lacking if (page + 1) * page_size <= end], (
            "all that is whole, nothing else"
        )
    last = plan.send(num_tokens, last=True)
    assert sent + list(range(*last)) == lacking
    assert plan.ended


def test_a_full_hit_sends_once_and_nothing() -> None:
    plan = SendPlan(32, 32, 16)
    assert [plan.send(16), plan.send(32), plan.send(32, last=True)] == [Span(2, 2)] * 3


@pytest.mark.parametrize(
    ("end", "last", "text"),
    [
        (9, False, r"lie in \[10, 30\]"),
        (31, False, "token 31"),
        (29, True, "last chunk ends at token 29"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(end: int, last: bool, text: str) -> None:
    plan = SendPlan(30, 8, 4)
    plan.send(10)
    with pytest.raises(RequestError, match=text):
        plan.send(end, last)
    assert (plan.computed, plan.cursor_page, plan.ended) == (10, 2, False)
    assert plan.send(30, last=True) == Span(2, 8)
    with pytest.raises(RequestError, match="after the last"):
        plan.send(30)


@pytest.mark.parametrize("prefix_len", [-4, 12])
def test_a_prefix_that_is_no_prefix_is_refused(prefix_len: int) -> None:
    with pytest.raises(
        RequestError, match=f"decode_prefix_len is {prefix_len}, the request has 10"
    ):
        SendPlan(10, prefix_len, 4)


def test_a_page_that_decode_has_in_part_is_handed_over() -> None:
    """Its own pages are smaller, say."""
    plan = SendPlan(num_tokens=10, decode_prefix_len=6, page_size=4)
    assert [plan.send(4), plan.send(8), plan.send(10, last=True)] == [
        Span(1, 1),
        Span(1, 2),
        Span(2, 3),
    ]
