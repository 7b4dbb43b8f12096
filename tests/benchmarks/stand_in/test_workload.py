"""Traces become workloads, and clients keep to their schedule."""

import json

import numpy as np
import pytest

from benchmarks.stand_in.workload import Clients, arrival_times, trace
from prefixkv.cli.chats.workload import Run, Turn, Workload, chat
from prefixkv.errors import TraceError

CHAT = {"system_tokens": 40, "user_tokens": 10, "output_tokens": 6}


def prompt(workload: Workload, session: int) -> np.ndarray:
    return np.concatenate([run.tokens() for run in workload.sessions[session][0].text])


def play(workload: Workload, concurrency: int = 100, due=None, service_s: float = 1.0):
    """Every call of a workload with its answer, each taking `service_s`: [(time sent, call)]."""
    clients = Clients(workload, due or arrival_times(workload, 1, None), concurrency)
    now, sent, running = 0.0, [], []
    while not clients.done:
        calls = clients.take(now)
        sent += [(now, call) for call in calls]
        running += [(now + service_s, call) for call in calls]
        assert clients.open == len(running) <= concurrency
        ends = [end for end, _ in running]
        arrival = clients.next_arrival_s()
        now = min([*ends, *([arrival] if arrival is not None else [])])
        for end, call in list(running):
            if end <= now:
                running.remove((end, call))
                clients.answer(call, [len(call.tokens) % 1000] * call.output_len, now)
    return clients, sent


def test_a_prompt_is_all_that_was_said_before_and_the_new_text():
    workload = chat(1, 3, 4, **CHAT)
    clients, sent = play(workload)
    assert clients.finished == 12
    for session, turns in enumerate(workload.sessions):
        said = np.empty(0, dtype=np.int32)
        for number, turn in enumerate(turns):
            call = next(c for _, c in sent if (c.session, c.turn) == (session, number))
            said = np.concatenate([said, *(run.tokens() for run in turn.text)])
            assert np.array_equal(call.tokens, said)
            assert call.tokens.dtype == np.int32
            said = np.append(said, [len(said) % 1000] * turn.output_len)
    assert max(len(c.tokens) + c.output_len for _, c in sent) == workload.max_request_tokens
    assert len({c.room for _, c in sent}) == 12


def test_concurrency_bounds_the_open_calls_but_not_the_arrivals():
    workload = chat(1, 7, 2, **CHAT)
    clients, sent = play(workload, concurrency=2)
    assert clients.finished == 14
    assert [c.arrival_s for t, c in sent if c.turn == 0] == [0.0] * 7
    assert max(t for t, _ in sent) == 6.0  # 14 calls, two at once, a second each


def test_a_turn_waits_for_the_answer_before_it():
    workload = Workload(((Turn((Run(1, 4),), 2), Turn((Run(2, 4),), 2), Turn((Run(3, 4),), 2)),))
    _, sent = play(workload, due=[np.array([0.5, 0.6, 9.0])], service_s=2.0)
    assert [(t, c.arrival_s) for t, c in sent] == [(0.5, 0.5), (2.5, 2.5), (9.0, 9.0)]


def test_arrivals_keep_to_the_offered_rate():
    workload = chat(1, 40, 25, **CHAT)
    due = arrival_times(workload, 9, rate=20.0)
    assert all(np.all(np.diff(times) > 0) for times in due)
    every = np.sort(np.concatenate(due))
    assert 1000 / every[-1] == pytest.approx(20, rel=0.1)
    gaps = np.diff(every)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # as Poisson arrivals have it
    # The more recent half of the conversations is never picked: while 40 go on, 20 arrivals lie
    # between turns.
    early = np.concatenate([np.diff(times) for times in due])
    assert np.quantile(early, 0.05) > 0.5
    assert np.array_equal(every, np.sort(np.concatenate(arrival_times(workload, 9, rate=20.0))))


def test_a_failed_call_ends_its_session():
    workload = chat(1, 2, 3, **CHAT)
    clients = Clients(workload, arrival_times(workload, 1, None), 8)
    first, second = clients.take(0.0)
    clients.fail(first)
    assert clients.failed == 3
    assert clients.answer(second, [1], 1.0)
    (again,) = clients.take(1.0)
    assert (again.session, again.turn) == (second.session, 1)
    clients.fail(again)
    assert (clients.failed, clients.finished, clients.done) == (5, 1, True)


# --- traces -------------------------------------------------------------------------------------


def line(**changed):
    entry = {"timestamp": 0, "input_length": 1030, "output_length": 100, "hash_ids": [0, 4, 9]}
    return json.dumps(entry | changed)


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_trace_blocks_become_equal_runs(tmp_path):
    path = write(
        tmp_path,
        line(),
        line(timestamp=3000, hash_ids=[0, 4, 7, 8], input_length=2048),
        line(timestamp=6000, input_length=5, hash_ids=[0]),
    )
    workload = trace(path, None, 32)
    first, second, third = (prompt(workload, i) for i in range(3))
    assert [len(first), len(second), len(third)] == [
        65,
        128,
        1,
    ]  # 6 of 512 tokens scale to 1, rounded up
    assert np.array_equal(first[:64], second[:64])
    assert first[64] != second[64]
    assert third[0] == first[0]
    assert [s[0].output_len for s in workload.sessions] == [7, 7, 7]
    assert workload.arrival_shape == (0.0, 3.0, 6.0)
    assert [float(t[0]) for t in arrival_times(workload, 0, 0.5)] == [0.0, 3.0, 6.0]
    assert [float(t[0]) for t in arrival_times(workload, 0, 1.5)] == [0.0, 1.0, 2.0]
    assert trace(path, 2, 32).num_requests == 2


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON|Expecting"),
        ("[1]", "not an object"),
        ("[" * 100_000, "line 2"),
        (line(timestamp=None), "timestamp is None"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        (line(input_length=0), r"input_length is 0, must be in \[1"),
        (line(input_length=True), "input_length is True"),
        (line(output_length=-1), "output_length is -1"),
        (line(hash_ids=[0, 1]), "2 hash_ids, an input_length of 1030 has 3"),
        (line(hash_ids=[0, 1, "a"]), "hash_ids is not a list of integers"),
        (line(hash_ids=[0, 1, -3]), "hash_ids is not a list of integers"),
        (line(timestamp=-5), "timestamp is -5"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, bad, why):
    path = write(tmp_path, line(), bad)
    with pytest.raises(TraceError, match=why) as raised:
        trace(path, None, 32)
    assert "line 2" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert trace(path, 1, 32).num_requests == 1  # what is cut off is not read


def test_time_that_falls_is_malformed(tmp_path):
    with pytest.raises(TraceError, match="line 2: timestamp 1 ms is before"):
        trace(write(tmp_path, line(timestamp=5), line(timestamp=1)), None, 32)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\n"])
def test_an_unreadable_trace_is_named(tmp_path, content):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.jsonl"):
        trace(path, None, 32)
