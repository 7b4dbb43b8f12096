"""Frames as messages: what is cut comes together again, and nothing else does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import ProtocolError
from prefixkv.protocol import messages
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import MAX_FRAME_BYTES
from prefixkv.runtime import fragments
from prefixkv.runtime.fragments import (
    FRAGMENT_BYTES,
    MAX_MESSAGE_BYTES,
    FragmentError,
    Joiner,
    cut,
)

SIZES = (0, 1, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 2 * FRAGMENT_BYTES)


def frame(size: int) -> bytes:
    return random.Random(size).randbytes(size).replace(b"\xc1", b"\xc0")


def joined(joiner: Joiner[str], sender: str, sent: list[bytes]) -> list[bytes]:
    return [raw for one in sent if (raw := joiner.join(sender, one)) is not None]


@pytest.mark.parametrize("size", [*SIZES, MAX_FRAME_BYTES])
def test_a_frame_comes_together_again(size: int) -> None:
    joiner: Joiner[str] = Joiner()
    sent = cut(frame(size))
    assert max(map(len, sent)) <= MAX_MESSAGE_BYTES
    for _ in range(2):
        assert joined(joiner, "a", sent) == [frame(size)]


def test_no_frame_begins_like_a_fragment() -> None:
    raw = messages.encode(PeerId("x", 1), 1, messages.Heartbeat())
    assert raw[0] != 0xC1


@given(order=st.lists(st.sampled_from("abc"), min_size=30, max_size=60))
def test_senders_do_not_disturb_each_other(order: list[str]) -> None:
    joiner: Joiner[str] = Joiner()
    size = 2 * FRAGMENT_BYTES + 7
    left = {name: cut(frame(size + number)) * 5 for number, name in enumerate("abc")}
    for name in order:
        if left[name]:
            raw = joiner.join(name, left[name].pop(0))
            assert raw is None or raw == frame(size + "abc".index(name))


@given(data=st.data())
def test_what_is_lost_loses_its_frame_alone(data: st.DataObject) -> None:
    joiner: Joiner[str] = Joiner()
    frames = [frame(3 * FRAGMENT_BYTES + number) for number in range(4)]
    sent = [(number, one) for number, raw in enumerate(frames) for one in cut(raw)]
    dropped = data.draw(st.sets(st.integers(0, len(sent) - 1)))
    whole = set(range(4)) - {sent[at][0] for at in dropped}
    got = []
    for at, (_, one) in enumerate(sent):
        if at not in dropped:
            try:
                raw = joiner.join("a", one)
            except FragmentError:
                continue
            if raw is not None:
                got.append(raw)
    assert got == [frames[number] for number in sorted(whole)]


WRONG = {
    "the second first": lambda sent: sent[1],
    "a byte is another": lambda sent: sent[0][:50] + b"x" + sent[0][51:],
    "one that is short": lambda sent: sent[0][:100],
    "one that is long": lambda sent: sent[0] + b"x",
}
JUNK = {
    "one of one": lambda sent: bytes([0xC1, 0, 0, 1, 0]) + bytes(19),
    "too many": lambda sent: bytes([0xC1, 0, 0, 255, 255]) + sent[0][5:],
    "beyond the last": lambda sent: bytes([0xC1, 3, 0, 3, 0]) + bytes(19),
    "a header alone": lambda sent: sent[0][:9],
    "half a header": lambda sent: sent[0][:2],
    "a mark": lambda sent: sent[0][:1],
}


@pytest.mark.parametrize("what", JUNK)
def test_what_only_begins_like_a_fragment_is_a_frame_that_is_none(what: str) -> None:
    joiner: Joiner[str] = Joiner()
    sent = cut(frame(3 * FRAGMENT_BYTES))
    joiner.join("a", sent[0])
    raw = joiner.join("a", JUNK[what](sent))
    assert raw is not None
    with pytest.raises(ProtocolError):
        messages.decode(raw)
    assert joiner._num_bytes == 0


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_fragment_is_refused_and_held_no_more(what: str) -> None:
    joiner: Joiner[str] = Joiner()
    sent = cut(frame(3 * FRAGMENT_BYTES))
    with pytest.raises(FragmentError):
        joined(joiner, "a", [WRONG[what](sent), *sent[1:]])
    joiner.forget("a")
    assert joiner._num_bytes == 0
    assert joined(joiner, "a", sent) == [frame(3 * FRAGMENT_BYTES)]


def test_another_total_is_another_frame() -> None:
    joiner: Joiner[str] = Joiner()
    short, long = cut(frame(2 * FRAGMENT_BYTES)), cut(frame(3 * FRAGMENT_BYTES))
    joiner.join("a", long[0])
    with pytest.raises(FragmentError):
        joiner.join("a", short[1])


def test_unfinished_frames_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one begun first is lost."""
    monkeypatch.setattr(fragments, "_BEGUN_BYTES", 4 * MAX_MESSAGE_BYTES)
    joiner: Joiner[str] = Joiner()
    sent = cut(frame(3 * FRAGMENT_BYTES))
    for sender in ("a", "b", "c"):
        for one in sent[:2]:
            joiner.join(sender, one)
        assert joiner._num_bytes <= 4 * MAX_MESSAGE_BYTES
    with pytest.raises(FragmentError):
        joiner.join("a", sent[2])
    assert (
        joined(joiner, "b", sent[2:])
        == joined(joiner, "c", sent[2:])
        == [frame(3 * FRAGMENT_BYTES)]
    )
    assert joiner._num_bytes == 0
