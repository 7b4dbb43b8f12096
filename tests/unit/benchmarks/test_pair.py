"""Pairs of processes, repetitions that others disturb, and pools that are aged."""

import os

import pytest

from benchmarks import transfer
from benchmarks.pair import WorkerError, run_pair
from prefixkv.errors import InternalError


def _ask(pipe, watch, number):
    pipe.send(number)
    return pipe.recv()


def _answer(pipe, watch, number):
    pipe.send(pipe.recv() + 1)


def _fail(pipe, watch, number):
    raise ValueError(f"number {number}")


def _die(pipe, watch, number):
    os._exit(3)


@pytest.mark.slow
def test_a_pair_runs_in_two_processes():
    assert run_pair(_ask, _answer, 4) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("serving", "why"), [(_fail, "number 4"), (_die, "_die died|EOFError|ConnectionResetError")]
)
def test_a_side_that_fails_ends_the_pair(serving, why):
    """Of a side that died the other one may hear first: its pipe has an end."""
    with pytest.raises(WorkerError, match=why):
        run_pair(_ask, serving, 4)


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
