"""Which lives are over: what is kept, what is forgotten first, and what a Hello has to prove."""

from __future__ import annotations

import pytest

from prefixkv.control import lives as module
from prefixkv.control.lives import IncarnationHistory, nonce
from prefixkv.errors import FormerLifeError
from prefixkv.protocol.ids import PeerId

A, B, C = PeerId("d0", 0x3F2A), PeerId("d0", 0x77B1), PeerId("d0", 0x1)
OTHER = PeerId("d1", 0x3F2A)


def over(lives: IncarnationHistory, life: PeerId) -> bool:
    try:
        lives.check(life)
    except FormerLifeError:
        return True
    return False


def test_how_a_life_ended_first_is_what_is_said_of_it() -> None:
    lives = IncarnationHistory()
    lives.end(A, "was fenced")
    lives.supersede(A, B)
    with pytest.raises(FormerLifeError, match="was fenced"):
        lives.check(A)


def test_of_a_name_the_lives_heard_of_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_NAME", 2)
    lives = IncarnationHistory()
    lives.end(A, "has left")
    lives.end(B, "has left")
    assert over(lives, A), "it speaks, so it is kept"
    lives.end(C, "has left")
    assert [over(lives, life) for life in (A, B, C)] == [True, False, True]


def test_the_names_heard_of_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    lives = IncarnationHistory()
    names = [PeerId(name, 1) for name in "abc"]
    for life in names[:2]:
        lives.end(life, "has left")
    assert over(lives, names[0])
    lives.end(names[2], "has left")
    assert [over(lives, life) for life in names] == [True, False, True]
    for life in names:
        lives.silent(life)
    assert [lives.last_silent(name) for name in "abc"] == [None, *names[1:]]


def test_a_life_that_was_silent_may_come_back_until_another_comes() -> None:
    lives = IncarnationHistory()
    lives.silent(A)
    lives.begin(A)
    assert not over(lives, A)
    lives.silent(A)
    lives.begin(B)
    assert over(lives, A)
    assert lives.last_silent("d0") is None


def test_a_nonce_is_of_two_lives_and_of_the_one_that_is_known() -> None:
    all_lives = (A, B, C)
    nonces = {
        nonce(me, them, known) for me in all_lives for them in all_lives
        for known in (None, *all_lives)
    }  # fmt: skip
    assert len(nonces) == 36
    assert all(0 < number < 2**64 for number in nonces)
    assert nonce(A, B, None) == nonce(A, B, None)
