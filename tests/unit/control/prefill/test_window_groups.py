"""Prefill's control object where layers keep a window: what decode may promise there, and what is
written where."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.errors import TransferError
from prefixkv.memory.kv_layout import PageGroup, Slab
from prefixkv.protocol import messages
from prefixkv.protocol.commands import GroupChunk, SendChunk
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.messages import GroupDigest, ModelDigest
from prefixkv.transport.base import WriteJob
from tests.unit.control.wire import (
    DIGEST,
    HELLO,
    LAYOUT,
    NUM_PAGES,
    SENT,
    DecodePeer,
    add_room,
    ids,
)
from tests.unit.protocol.rooms import promise

WINDOW, HAS = 6, 8
BASE = 4096 + 64 * NUM_PAGES
LAST = msgspec.structs.replace(
    LAYOUT, num_pages=HAS, slabs=(Slab(BASE, 32, 8, 8), Slab(BASE + 32 * HAS, 32, 8, 8)),
    regions=((BASE, 64 * HAS),),
)  # fmt: skip
GROUP = PageGroup("last", WINDOW, LAST)
GROUPED = msgspec.structs.replace(
    LAYOUT, groups=(GROUP,), regions=((4096, 64 * NUM_PAGES), (BASE, 64 * HAS))
)
OURS: ModelDigest = msgspec.structs.replace(DIGEST, groups=(GroupDigest.of(GROUP),))
OF_GROUPS = msgspec.structs.replace(HELLO, digest=OURS, layout=GROUPED)


def promised(windows: Any = ((5, 2),), **more: Any) -> messages.Promise:
    """Of 10 tokens; what comes behind sees 5 to 9, in pages 1 and 2."""
    packed = tuple(one if isinstance(one, bytes) else ids(one) for one in windows)
    return msgspec.structs.replace(promise(**more), groups=packed)


BAD = {
    "no group": ((), "pages of 0 groups of 1"),
    "a group more": (((5, 2), (1,)), "pages of 2 groups of 1"),
    "too few pages": (((5,),), "1 pages where 2 are needed in group 'last'"),
    "too many pages": (((5, 2, 3),), "3 pages where 2 are needed in group 'last'"),
    "a page beyond the group": (((5, HAS),), f"page ids 5 to {HAS}, group 'last' has {HAS}"),
    "a negative page": (((5, -1),), "page ids -1 to 5"),
    "a page twice": (((5, 5),), "twice"),
    "half a page id": ((b"\x05\x00\x00",), "3 bytes"),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("windows", "text"), BAD.values(), ids=BAD)
def test_a_bad_promise_is_refused_and_writes_nothing(windows: Any, text: str, added: bool) -> None:
    peer = DecodePeer(hello=OF_GROUPS).known()
    if added:
        peer.on(add_room())
    (refused,) = peer.say(promised(windows))
    assert text in refused.error
    assert peer.control.num_rooms == added


def test_groups_in_one_memory_have_no_page_in_common() -> None:
    group = PageGroup("last", WINDOW, LAYOUT)
    digest = msgspec.structs.replace(DIGEST, groups=(GroupDigest.of(group),))
    layout = msgspec.structs.replace(LAYOUT, groups=(group,))
    peer = DecodePeer(hello=msgspec.structs.replace(HELLO, digest=digest, layout=layout)).known()
    (refused,) = peer.say(promised(((5, 9),)))
    assert "two groups of one memory" in refused.error
    assert peer.control.num_rooms == 0
    peer.say(msgspec.structs.replace(promised(((5, 2),)), ticket=1))
    assert peer.control.num_rooms == 1


def test_pages_of_all_groups_count_against_what_the_worker_has() -> None:
    peer = DecodePeer(hello=OF_GROUPS).known()
    rank = peer.control._peers.all()[0]
    peer.say(promised())
    assert rank.num_promised == 2 + 2
    many = promised((b"\x00" * 4 * (NUM_PAGES + HAS),), room=8)
    (refused,) = peer.say(many)
    assert "the pool has 24" in refused.error


LIES = {
    "another window": {"groups": (msgspec.structs.replace(GROUP, window=7),)},
    "other heads": {
        "groups": (
            msgspec.structs.replace(
                GROUP,
                layout=msgspec.structs.replace(
                    LAST, head_dim=4, slabs=(Slab(BASE, 16, 4, 4), Slab(BASE + 128, 16, 4, 4))
                ),
            ),
        )
    },
    "no group": {"groups": ()},
    "memory that is not registered": {"regions": LAYOUT.regions},
    "memory of the first group": {
        "groups": (
            msgspec.structs.replace(
                GROUP,
                layout=msgspec.structs.replace(
                    LAST,
                    slabs=(Slab(4096, 32, 8, 8), Slab(4096 + 32 * HAS, 32, 8, 8)),
                    regions=((4096, 64 * NUM_PAGES),),
                ),
            ),
        )
    },
    "groups inside a group": {
        "groups": (msgspec.structs.replace(GROUP, layout=GROUPED),),
    },
}


@pytest.mark.parametrize("changes", LIES.values(), ids=LIES)
def test_a_layout_that_is_not_what_its_digest_says_is_refused(changes: dict[str, Any]) -> None:
    peer = DecodePeer(hello=OF_GROUPS)
    layout = msgspec.structs.replace(GROUPED, **changes)
    (reply,) = peer.say(msgspec.structs.replace(OF_GROUPS, layout=layout))
    assert reply.refused
    assert not peer.control.peers(peer.now_s)


def chunk(
    first: int, src: list[int], window: tuple[int, list[int]] | None, last: bool = False
) -> SendChunk:
    groups = ()
    if window is not None:
        groups = (GroupChunk(window[0], np.array(window[1], np.int32)),)
    return SendChunk(SENT, first, np.array(src, np.int32), last, b"", None, False, groups)


def jobs(effects: list[Any]) -> list[tuple[str, list[int], list[int]]]:
    return [
        (one.route, one.src_pages.tolist(), one.dst_pages.tolist())
        for one in effects
        if isinstance(one, WriteJob)
    ]


def test_each_page_goes_where_its_group_was_promised_and_the_outcome_counts_all() -> None:
    peer = DecodePeer(hello=OF_GROUPS).bootstrapped(promised())
    assert jobs(peer.on(chunk(1, [30], (0, [7])))) == [
        ("pages", [30], [3]), ("window 0", [7], [5]),
    ]  # fmt: skip
    assert jobs(peer.on(chunk(2, [31], (1, [6]), last=True))) == [
        ("pages", [31], [9]), ("window 0", [6], [2]),
    ]  # fmt: skip
    for job_id in (1, 2, 3):
        assert not peer.ended(job_id)
    said = peer.ended(4)
    (outcome,) = [one for one in said if isinstance(one, messages.Outcome)]
    assert (outcome.ok, outcome.num_pages, outcome.num_units, outcome.num_chunks) == (True, 4, 4, 4)


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([chunk(1, [30, 31], None, last=True)], r"\[0\] of \[2\] pages of groups"),
        ([chunk(1, [30, 31], (0, [7]), last=True)], r"\[1\] of \[2\] pages of groups"),
        ([chunk(1, [30], (1, [7]))], "pages 1 to 2 of group 0 .* page 0 of 2 is next"),
        ([chunk(1, [30], (0, [7, 6, 5]))], "pages 0 to 3 of group 0"),
        (
            [chunk(1, [30], (0, [7])), chunk(2, [31], (0, [7]))],
            "pages 0 to 1 of group 0 .* page 1 of 2 is next",
        ),
    ],
)
def test_a_chunk_that_is_not_the_next_one_fails_the_room(
    chunks: list[SendChunk], text: str
) -> None:
    peer = DecodePeer(hello=OF_GROUPS).bootstrapped(promised())
    for one in chunks:
        peer.on(one)
    (machine,) = peer.control.rooms()
    assert machine.poll is KVPoll.FAILED
    with pytest.raises(TransferError, match=text):
        raise machine.error or AssertionError


def test_a_promise_with_other_window_pages_is_no_repeat() -> None:
    peer = DecodePeer(hello=OF_GROUPS).bootstrapped(promised())
    assert "PromiseAck" in [type(one).__name__ for one in peer.say(promised())]
    said = peer.say(promised(((5, 3),)))
    assert "PromiseAck" not in [type(one).__name__ for one in said]
