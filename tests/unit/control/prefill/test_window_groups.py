"""Prefill's control object where layers keep a window, or extra state: what decode may promise,
what its Hello may say, and what is written where."""

from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.errors import TransferError
from prefixkv.memory.kv_layout import PageGroup, Slab
from prefixkv.memory.state_layout import StateBlock, StateEntry, StateLayout, StateLink, StateTensor
from prefixkv.protocol.commands import GroupChunk, SendChunk
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.messages import GroupDigest, Hello, ModelDigest, Outcome, Promise
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
    kinds,
    of,
)
from tests.unit.protocol.rooms import promise

_changed = msgspec.structs.replace
WINDOW, HAS = 6, 8
BASE = 4096 + 64 * NUM_PAGES
LAST = _changed(
    LAYOUT, num_pages=HAS, slabs=(Slab(BASE, 32, 8, 8), Slab(BASE + 32 * HAS, 32, 8, 8)),
    regions=((BASE, 64 * HAS),),
)  # fmt: skip
GROUP = PageGroup("last", WINDOW, LAST)
GROUPED = _changed(LAYOUT, groups=(GROUP,), regions=((4096, 64 * NUM_PAGES), (BASE, 64 * HAS)))
OURS: ModelDigest = _changed(DIGEST, groups=(GroupDigest.of(GROUP),))
OF_GROUPS = _changed(HELLO, digest=OURS, layout=GROUPED)
STATE = StateLayout(4, (StateEntry(1 << 20, 16, 8),), ((1 << 20, 64),))
OF_STATE = _changed(
    HELLO, digest=_changed(DIGEST, state=(StateTensor("a", 0, 1, (8,), "uint8"),)), state=STATE
)


def promised(groups: Any = ((5, 2),), **more: Any) -> Promise:
    """Of 10 tokens; what comes behind sees 5 to 9, in pages 1 and 2."""
    packed = tuple(one if isinstance(one, bytes) else ids(one) for one in groups)
    return _changed(promise(**more), groups=packed)


BAD = {
    "no group": (OF_GROUPS, (), "pages of 0 groups of 1"),
    "a group more": (OF_GROUPS, ((5, 2), (1,)), "pages of 2 groups of 1"),
    "too few pages": (OF_GROUPS, ((5,),), "1 pages where 2 are needed in group 'last'"),
    "too many pages": (OF_GROUPS, ((5, 2, 3),), "3 pages where 2 are needed in group 'last'"),
    "a page beyond": (OF_GROUPS, ((5, HAS),), f"page ids 5 to {HAS}, group 'last' has {HAS}"),
    "a negative page": (OF_GROUPS, ((5, -1),), "page ids -1 to 5"),
    "a page twice": (OF_GROUPS, ((5, 5),), "twice"),
    "half a page id": (OF_GROUPS, (b"\x05\x00\x00",), "3 bytes"),
    "no state": (OF_STATE, (), "pages of 0 groups of 1"),
    "a negative slot": (OF_STATE, ((-1,),), "page ids -1 to -1, the extra state has 4"),
    "a slot beyond": (OF_STATE, ((4,),), "page ids 4 to 4, the extra state has 4"),
    "two slots": (OF_STATE, ((1, 2),), "2 pages where 1 are needed in the extra state"),
    "no slot": (OF_STATE, ((),), "0 pages where 1 are needed in the extra state"),
    "state that nobody has": (HELLO, ((0,),), "pages of 1 groups of 0"),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("hello", "groups", "text"), BAD.values(), ids=BAD)
def test_a_bad_promise_is_refused_and_writes_nothing(
    hello: Hello, groups: Any, text: str, added: bool
) -> None:
    peer = DecodePeer(hello=hello).known()
    if added:
        peer.on(add_room())
    (refused,) = peer.say(promised(groups))
    assert isinstance(refused, Outcome)
    assert text in refused.error
    assert peer.control.num_rooms == added


def test_groups_in_one_memory_have_no_page_in_common() -> None:
    group = PageGroup("last", WINDOW, LAYOUT)
    digest = _changed(DIGEST, groups=(GroupDigest.of(group),))
    layout = _changed(LAYOUT, groups=(group,))
    peer = DecodePeer(hello=_changed(HELLO, digest=digest, layout=layout)).known()
    (refused,) = peer.say(promised(((5, 9),)))
    assert "two groups of one memory" in refused.error
    assert peer.control.num_rooms == 0
    peer.say(_changed(promised(((5, 2),)), ticket=1))
    assert peer.control.num_rooms == 1


def test_pages_of_all_groups_count_against_what_the_worker_has() -> None:
    peer = DecodePeer(hello=OF_GROUPS).known()
    rank = peer.control._peers.all()[0]
    peer.say(promised())
    assert rank.num_promised == 2 + 2
    many = promised((b"\x00" * 4 * (NUM_PAGES + HAS),), room=8)
    (refused,) = peer.say(many)
    assert "the pool has 24" in refused.error


def of_layout(**changes: Any) -> Hello:
    return _changed(OF_GROUPS, layout=_changed(GROUPED, **changes))


def of_group(**changes: Any) -> Hello:
    return of_layout(groups=(_changed(GROUP, layout=_changed(LAST, **changes)),))


def of_state(num_slots: int, *entries: StateEntry) -> Hello:
    return _changed(OF_STATE, state=StateLayout(num_slots, entries, STATE.regions))


LIES = {
    "another window": (OF_GROUPS, of_layout(groups=(_changed(GROUP, window=7),)), "window"),
    "other heads": (
        OF_GROUPS,
        of_group(head_dim=4, slabs=(Slab(BASE, 16, 4, 4), Slab(BASE + 128, 16, 4, 4))),
        "group",
    ),
    "no group": (OF_GROUPS, of_layout(groups=()), "group"),
    "memory that is not registered": (OF_GROUPS, of_layout(regions=LAYOUT.regions), "region"),
    "memory of the first group": (
        OF_GROUPS,
        of_group(
            slabs=(Slab(4096, 32, 8, 8), Slab(4096 + 32 * HAS, 32, 8, 8)),
            regions=((4096, 64 * NUM_PAGES),),
        ),
        "",
    ),
    "groups inside a group": (
        OF_GROUPS, of_layout(groups=(_changed(GROUP, layout=GROUPED),)), "group",
    ),
    "no state": (OF_STATE, _changed(OF_STATE, state=None), "on one side only"),
    "a state of other bytes": (OF_STATE, of_state(4, StateEntry(1 << 20, 16, 9)), "not the share"),
    "a state twice": (OF_STATE, of_state(4, *STATE.entries * 2), "not the share"),
    "a slot too many": (OF_STATE, of_state(5, *STATE.entries), "not inside one region"),
    "a model without state": (OF_STATE, _changed(OF_STATE, digest=DIGEST), "state[0]"),
    "state of a model without": (HELLO, _changed(HELLO, state=STATE), "on one side only"),
}  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "text"), LIES.values(), ids=LIES)
def test_memory_that_is_not_what_its_digest_says_is_refused(
    ours: Hello, theirs: Hello, text: str
) -> None:
    peer = DecodePeer(hello=ours)
    (reply,) = peer.say(theirs)
    assert reply.refused
    assert text in reply.refused
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
        (one.route, one.src_pages.tolist(), one.dst_pages.tolist()) for one in of(effects, WriteJob)
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
    (outcome,) = of(peer.ended(4), Outcome)
    assert (outcome.ok, outcome.num_pages, outcome.num_units, outcome.num_chunks) == (True, 4, 4, 4)


def test_state_goes_behind_the_last_pages_and_is_waited_for() -> None:
    peer = DecodePeer(hello=OF_STATE)
    added = peer.say(OF_STATE)[0]
    assert added.memory.state == StateLink(STATE, (StateBlock(0, 0, 0, 0, 8),))
    peer.say(promised(((3,),)))
    peer.on(add_room())
    pages, state = peer.on(chunk(1, [30, 31], (0, [2]), last=True))
    assert jobs([pages, state]) == [("pages", [30, 31], [3, 9]), ("state", [2], [3])]
    assert [post.tag.chunk for post in (pages, state)] == [0, 1]
    assert peer.ended(pages.job_id) == []
    (ended,) = of(peer.ended(state.job_id), RoomEnded)
    assert ended.poll is KVPoll.SUCCESS


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
    assert "PromiseAck" in kinds(peer.say(promised()))
    assert "PromiseAck" not in kinds(peer.say(promised(((5, 3),))))
