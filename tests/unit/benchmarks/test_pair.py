"""Pairs of processes, repetitions that others disturb, and pools that are aged."""

import os
from collections.abc import Callable

import pytest

from benchmarks import transfer
from benchmarks.pair import Watch, WorkerError, run_pair
from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import InternalError, OutOfPagesError
from prefixkv.pages.manager import PageManager

# --- ageing ---------------------------------------------------------------------------------------


def test_an_aged_pool_is_full_and_scattered():
    case = transfer.small("layer_major", "aged")
    pages = PageManager(case.num_pages, case.page_size, 16)
    transfer._age(pages, case, 1)
    pages.check_invariants()
    assert pages.allocator.cached_pages > case.num_pages // 2
    with pytest.raises(OutOfPagesError):
        pages.open(RadixKey(range(16)), None, case.num_pages + 1, 0.0)


# --- processes ------------------------------------------------------------------------------------


def _ask(pipe, watch, number):
    pipe.send(number)
    return pipe.recv(), os.environ.get("PREFIXKV_TEST_OF_ENV")


def _answer(pipe, watch, number):
    pipe.send(pipe.recv() + 1)


def _fail(pipe, watch, number):
    raise ValueError(f"number {number}")


def _die(pipe, watch, number):
    os._exit(3)


@pytest.mark.slow
def test_a_pair_runs_in_two_processes_with_the_environment_given():
    assert run_pair(_ask, _answer, 4, env={"PREFIXKV_TEST_OF_ENV": "x"}) == (5, "x")
    assert "PREFIXKV_TEST_OF_ENV" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize(
    ("serving", "why"), [(_fail, "number 4"), (_die, "_die died|EOFError|ConnectionResetError")]
)
def test_a_side_that_fails_ends_the_pair(serving, why):
    """Of a side that died the other one may hear first: its pipe has an end."""
    with pytest.raises(WorkerError, match=why):
        run_pair(_ask, serving, 4)


# --- repetitions ----------------------------------------------------------------------------------


class _Disturbed(Watch):
    """Others use as many cores during repetition n as `foreign[n]` says, the last ever after."""

    def __init__(self, foreign):
        super().__init__(os.getpid())
        self._foreign = foreign
        self._s = self._used = 0.0
        self._looks = 0

    def _now(self):
        self._looks += 1
        if self._looks % 2 == 0:
            self._s += 1.0
            self._used += self._foreign[min(self._looks // 2, len(self._foreign)) - 1]
        return self._s, self._used


def _numbers() -> Callable[[int], dict[str, float]]:
    return lambda number: {"number": number}


def test_it_goes_on_until_enough_repetitions_were_left_alone():
    watch = _Disturbed([1.0, 0.0, 0.5, 0.05, 1.0])
    rows = watch.least_disturbed(_numbers(), 2, patience_s=1e9)
    assert [(row["number"], row["foreign_cores"], row["taken"]) for row in rows] == [
        (1, 0.0, 4),
        (3, 0.05, 4),
    ]


def test_bytes_that_differ_are_an_error() -> None:
    case = transfer.small("page_major", "fresh")
    ours, theirs = case.pool(1), case.pool(2)

    class Pipe:
        send = staticmethod(lambda asked: None)
        recv = staticmethod(lambda: transfer.digest(theirs, [1]))

    decode = transfer.Decode(Pipe(), case, None, None, "")
    decode._pages = [1]
    decode.check_bytes(theirs)
    with pytest.raises(InternalError, match="other bytes"):
        decode.check_bytes(ours)
