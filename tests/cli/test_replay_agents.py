"""Traces of agents: their times and block ids by hand, and what is wrong with a line."""

from __future__ import annotations

import json

import pytest

from prefixkv.cli.replay import read_trace, replay_policy
from prefixkv.cli.replay.agents import OUTPUT_TOKEN_S
from prefixkv.errors import TraceError


def session(requests, tools=0, system=0, size=64):
    return {"block_size": size, "tool_tokens": tools, "system_tokens": system, "requests": requests}


def call(t, ids, more=0, size=64):
    return {"t": t, "type": "n", "in": size * len(ids) + more, "out": 9, "hash_ids": ids}


def blocks(trace):
    return [request.whole_key.tokens().tolist() for request in trace.requests]


def times(trace):
    return [round(request.time_s, 6) for request in trace.requests]


def write(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# --- sessions -------------------------------------------------------------------------------------


def test_ids_are_a_sessions_own_but_for_tools_and_system_prompt(tmp_path):
    """Two sessions with the same lengths of tools and system prompt share these two blocks, and the
    third session nothing, though all have the same ids."""
    path = write(
        tmp_path / "t.jsonl",
        session([call(0, [1, 2, 3])], tools=100, system=60),
        session([call(0, [1, 2, 3], more=5)], tools=100, system=60),
        session([call(0, [1, 2, 3])], tools=101, system=60),
    )
    trace = read_trace(path)
    assert trace.block_tokens == 64
    first, second, third = sorted(blocks(trace), key=lambda key: [key[2], *key])
    assert first[:2] == second[:2]
    assert len({first[2], second[2], *third}) == 5
    assert first[:2] != third[:2]


def test_times_run_from_a_start_that_is_drawn_and_sub_agents_have_either_clock(tmp_path):
    relative = {"t": 10.0, "type": "subagent", "requests": [call(0.0, [5]), call(3.0, [6])]}
    absolute = {"t": 10.0, "type": "subagent", "requests": [call(10.0, [5]), call(13.0, [6])]}
    for inner in (relative, absolute):
        path = tmp_path / "t.json"
        path.write_text(json.dumps(session([call(0, [1]), inner, call(40.5, [1, 2])])))
        begin, *rest = times(read_trace(path, spread_s=1000.0))
        assert 0 < begin < 1000
        assert [round(at - begin, 6) for at in rest] == [10, 13, 40.5]
        assert times(read_trace(path, spread_s=0.0))[0] == 0
        # A session shares its ids with its sub-agents.
        assert blocks(read_trace(path)) == [[0], [1], [2], [0, 3]]


def test_a_folder_of_sessions_and_a_file_of_them_are_one_trace(tmp_path):
    sessions = [session([call(at, [1, at + 2]), call(at + 5, [1, at + 2, 9])]) for at in range(4)]
    folder = tmp_path / "t"
    folder.mkdir()
    for at, one in enumerate(sessions):
        (folder / f"s{at}.json").write_text(json.dumps(one, indent=1))
    file = read_trace(write(tmp_path / "t.jsonl", *sessions))
    assert blocks(read_trace(folder)) == blocks(file)
    assert times(read_trace(folder)) == times(file)
    assert times(file) == sorted(times(file))
    assert len(read_trace(folder, limit=2).requests) == 4
    assert replay_policy(file, "lru", 100).block_hit_ratio == 8 / 20


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (session(7), "list of objects"),
        (session([7]), "list of objects"),
        (session([{"t": 0, "in": 64}]), "hash_ids"),
        (session([call(-1, [1])]), "t is -1"),
        (session([call(0, [1], more=64)]), "1 hash_ids for 128"),
        (session([{**call(0, [1]), "in": "64"}]), "in is '64'"),
        (session([call(0, [1])], size=0), "block_size"),
        (session([call(0, [1, 2], size=32)], size=32), "is different"),
        (session([{"t": 0, "requests": None}]), "NoneType"),
        ({"timestamp": 0, "input_length": 512, "hash_ids": [1]}, "hash ids in a trace of sessions"),
    ],
)
def test_a_bad_session_is_named(tmp_path, entry, why):
    path = write(tmp_path / "t.jsonl", session([call(0, [1])]), entry)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{why}"):
        read_trace(path)
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(session([call(0, [1])])))
    (folder / "b.json").write_text(json.dumps(entry))
    with pytest.raises(TraceError, match=rf"b\.json: .*{why}"):
        read_trace(folder)


def test_a_folder_without_sessions_or_with_a_broken_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"no \*\.json"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text('{"block_size": 64,\n "requests": [')
    with pytest.raises(TraceError, match=r"a\.json:1"):
        read_trace(tmp_path)


# --- Dynamo's agentic Mooncake --------------------------------------------------------------------

HEADER = {
    "schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local",
    "source": {"format": "weka", "digest": "d"},
}  # fmt: skip


def row(name, ids, **more):
    return {
        "request_id": name, "input_length": 64 * len(ids), "output_length": 100, "hash_ids": ids,
        **more,
    }  # fmt: skip


def test_rows_without_a_header_wait_for_others(tmp_path):
    """c waits for both, and the later of them counts; tools and delay come on top. The order of
    lines does not matter."""
    path = write(
        tmp_path / "t.jsonl",
        row("c", [1, 2, 3], wait_for=["a", "b"], delay=250, tool_wait_ms=750.0, output_length=None),
        row("a", [1], timestamp=1000, session_id="s"),
        row("b", [1, 2], wait_for=["a"], delay_ms=1000),
        row("d", [7], created_time=0, hash_ids=[7], tool_events=[{}]),
    )
    lasts_s = 100 * OUTPUT_TOKEN_S
    b_s = 1.0 + lasts_s + 1.0
    trace = read_trace(path, block_tokens=64)
    assert times(trace) == [0, 1.0, b_s, round(b_s + lasts_s + 1.0, 6)]
    assert [len(key) for key in blocks(trace)] == [1, 1, 2, 3]
    assert replay_policy(trace, "lru", 9).block_hit_ratio == 3 / 7


def test_rows_behind_a_header_wait_for_starts_or_ends(tmp_path):
    def after(name, trigger, delay_ms):
        return {
            "request_id": name, "trigger": trigger, "delay_ms": delay_ms, "relation": "sequence",
        }  # fmt: skip

    path = write(
        tmp_path / "t.jsonl",
        HEADER,
        row("a", [1], play_id="p", not_before_ms=500.0, recorded_api_time_ms=3000.0),
        row("b", [1], play_id="q", not_before_ms=0.0, dependencies=[after("a", "dispatch", 100)]),
        row("c", [1], play_id="p", not_before_ms=0, dependencies=[after("a", "completion", 100),
                                                                 after("b", "dispatch", 0)]),
        row("d", [1], play_id="p", not_before_ms=9000, dependencies=[after("a", "dispatch", 1)]),
    )  # fmt: skip
    trace = read_trace(path)
    assert times(trace) == [0.5, 0.6, 3.6, 9.0]
    assert trace.block_tokens == 64
    assert blocks(trace) == [[0], [1], [0], [0]]  # ids of a play, since it was made of sessions
    text = path.read_text().replace("weka", "dynamo.request.trace.v1")
    path.write_text(text)
    assert blocks(read_trace(path)) == [[0]] * 4


def test_a_long_chain_is_followed(tmp_path):
    rows = [row(f"r{at}", [at], wait_for=[f"r{at - 1}"]) for at in range(3000, 0, -1)]
    path = write(tmp_path / "t.jsonl", *rows, row("r0", [0], timestamp=0))
    assert blocks(read_trace(path, block_tokens=64))[-1] == [0]  # named in the order of lines


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([row("a", [1], timestamp=0), row("a", [1], timestamp=0)], ":2: .*twice"),
        ([row(7, [1], timestamp=0)], ":1: .*no text"),
        ([row("a", [1])], ":1: .*timestamp"),
        ([row("a", [1], timestamp=0, input_length=65)], ":1: .*1 hash_ids"),
        ([row("a", [1], wait_for="b")], ":1: .*list"),
        ([row("a", [1], wait_for=["b"])], ": request 'a' waits for 'b', which is not there"),
        ([row("a", [1], wait_for=["b"]), row("b", [1], wait_for=["a"])], ": .*waits for itself"),
        ([row("a", [1], wait_for=["a"])], ": .*waits for itself"),
        ([HEADER | {"version": 3}], ":1: .*header"),
        ([HEADER | {"schema": "x"}], ":1: .*header"),
        ([HEADER, row("a", [1])], ":2: .*not_before_ms"),
        ([HEADER, row("a", [1], not_before_ms=0, dependencies=[{}])], ":2: .*no dependency"),
        ([HEADER, {"tokens": [1]}], ":2: tokens in a trace of agentic requests"),
    ],
)
def test_a_bad_row_is_named(tmp_path, entries, why):
    path = write(tmp_path / "t.jsonl", *entries)
    with pytest.raises(TraceError, match=rf"t\.jsonl{why}"):
        read_trace(path, block_tokens=64)
