"""A decode node's record of its own traffic: what is in it, how it is bounded, and what happens
when it cannot be written. The limits are real."""

import errno
import os
import re
import threading
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cli.replay import read_trace, replay_policy
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.runtime import record
from prefixkv.runtime.record import Recorder
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import lines_of


def make(path, max_bytes=1 << 20, page_size=16, now_s=100.0, block_tokens=512) -> Recorder:
    config = DecodeConfig(record=path, record_bytes=max_bytes, record_block_tokens=block_tokens)
    return Recorder(config, page_size, 2048, now_s)


def request(tokens, arrived_s=101.0, namespace=None, output=5, admitted_s=101.5, cacheable=True):
    key = RadixKey(tokens, namespace)
    return SimpleNamespace(
        arrived_s=arrived_s, admitted_s=admitted_s, output=[0] * output,
        request=SimpleNamespace(key=key, cacheable=cacheable),
    )  # fmt: skip


def write(recorder: Recorder, *requests: Any) -> None:
    for one in requests:
        recorder.ended(one, 102.0)
    recorder.close()


def test_a_line_has_lengths_a_time_and_an_id_a_block(tmp_path):
    path = tmp_path / "r.jsonl"
    recorder = make(path)
    write(recorder, request(tokens_of(1, 1200), arrived_s=101.25))
    (line,) = lines_of(path)
    assert len(line.pop("hash_ids")) == 3
    assert line == {
        "timestamp": 1250, "input_length": 1200, "output_length": 5, "block_size": 512,
        "bytes_per_token": 2048,
    }  # fmt: skip
    assert (recorder.recorded, recorder.lost) == (1, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_equal_prefixes_have_equal_ids_and_no_others(tmp_path):
    one, other = tokens_of(1, 2048), tokens_of(2, 2048)
    late = np.concatenate([one[:1536], other[1536:]])
    early = np.concatenate([other[:512], one[512:]])
    asked = [request(tokens) for tokens in (one, one[:1100], late, early)]
    asked += [request(one, namespace=namespace) for namespace in ("a", 7, (7,))]
    path = tmp_path / "r.jsonl"
    write(make(path), *asked)
    first, short, second, third, *apart = [line["hash_ids"] for line in lines_of(path)]
    assert short[:2] == first[:2]
    assert short[2] != first[2]  # partial
    assert second[:3] == first[:3]
    assert second[3] != first[3]
    assert not set(third) & set(first)  # an id stands for all before it too
    ids = [*first, *third, *chain(*apart)]
    assert len(set(ids)) == len(ids)
    assert max(ids) < 2**52


def test_a_file_has_a_salt_of_its_own_and_nothing_tells_it(tmp_path, monkeypatch):
    """Two recordings of one prompt have nothing in common, and the salt is in neither."""
    salts: list[bytes] = []
    draw = record.secrets.token_bytes

    def drawn(size: int) -> bytes:
        salts.append(draw(size))
        return salts[-1]

    monkeypatch.setattr(record.secrets, "token_bytes", drawn)
    found = []
    for name in ("a", "b"):
        path = tmp_path / name
        write(make(path), request(tokens_of(1, 1024)))
        found.append(set(lines_of(path)[0]["hash_ids"]))
        raw = path.read_bytes()
        assert salts[-1] not in raw
        assert salts[-1].hex().encode() not in raw
    assert len(salts[0]) >= 16
    assert salts[0] != salts[1]
    assert not found[0] & found[1]


def test_no_token_is_in_the_file(tmp_path):
    tokens = tokens_of(3, 600) + 1_000_000  # seven digits each
    path = tmp_path / "r.jsonl"
    write(make(path), request(tokens, namespace="secret tenant"))
    raw = path.read_text()
    assert "secret" not in raw
    told = {int(number) for number in re.findall(r"\d+", raw)}
    assert not told & set(tokens.tolist())


@pytest.mark.parametrize(
    ("page_size", "asked", "block"),
    [(1, 512, 512), (48, 512, 480), (512, 512, 512), (1000, 512, 1000), (16, 16, 16), (16, 40, 32),
     (16, 1, 16), (1, 1, 1)],
)  # fmt: skip
def test_a_block_is_whole_pages_and_the_replay_reads_its_size(tmp_path, page_size, asked, block):
    path = tmp_path / "r.jsonl"
    write(
        make(path, page_size=page_size, block_tokens=asked),
        *[request(tokens_of(1, 3000)) for _ in range(2)],
    )
    trace = read_trace(path)
    assert (trace.block_tokens, trace.bytes_per_token) == (block, 2048)
    result = replay_policy(trace, "lru", 5000)
    assert result.hit_tokens == 3000 // block * block


def test_what_never_asked_the_cache_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    recorder = make(path)
    write(recorder, request([1], admitted_s=None), request([2], cacheable=False))
    assert lines_of(path) == []
    assert (recorder.recorded, recorder.lost) == (0, 0)


def test_files_are_bounded_in_size_and_number(tmp_path):
    path = tmp_path / "r.jsonl"
    recorder = make(path, max_bytes=4096)
    write(recorder, *[request(tokens_of(at, 5000), arrived_s=100.0 + at) for at in range(80)])
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2", "r.jsonl.3"]
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    stamps = [[line["timestamp"] for line in lines_of(file)] for file in reversed(files)]
    assert list(chain(*stamps)) == [1000 * at for at in range(80 - sum(map(len, stamps)), 80)]
    assert recorder.recorded == 80


def test_a_recording_that_is_there_is_kept_and_the_oldest_goes(tmp_path):
    path = tmp_path / "r.jsonl"
    for at in range(5):
        write(make(path), request(tokens_of(1, 100 + at)))
    kept = [lines_of(file)[0]["input_length"] for file in sorted(tmp_path.iterdir())]
    assert kept == [104, 103, 102, 101]


@pytest.mark.parametrize("where", ["missing/r.jsonl", "", "pipe"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, where):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        make(tmp_path / where)


def test_a_line_longer_than_a_file_is_lost_and_no_other(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    recorder = make(path, max_bytes=4096)
    write(recorder, request([1]), request([1] * 300_000), request([2]))
    assert [line["input_length"] for line in lines_of(path)] == [1]
    assert (recorder.recorded, recorder.lost) == (2, 1)
    assert "4096" in caplog.text


def test_what_the_thread_cannot_keep_up_with_is_lost_and_nothing_waits(
    tmp_path, monkeypatch, caplog
):
    gate = threading.Event()
    monkeypatch.setattr(record, "MAX_WAITING", 4)
    recorder = make(tmp_path / "r.jsonl")
    line = recorder._line
    monkeypatch.setattr(recorder, "_line", lambda ended: gate.wait(PATIENCE_S) and line(ended))
    for at in range(50):
        recorder.ended(request([at]), 0.0)
    gate.set()
    recorder.close()
    assert recorder.lost >= 45
    assert recorder.recorded + recorder.lost == 50
    assert caplog.text.count("not recorded") == 1
    recorder.ended(request([1]), 0.0)  # closed
    recorder.close()
    assert recorder.recorded + recorder.lost == 51


def test_a_line_that_does_not_fit_on_the_disk_is_in_no_part_of_the_file(
    tmp_path, monkeypatch, caplog
):
    path, full = tmp_path / "r.jsonl", [True]
    recorder, real = make(path), os.write

    def write_some(file: int, line: bytes) -> int:
        """As a full disk has it: a part fits, and the rest says why it does not."""
        if not full[0]:
            return real(file, line)
        if len(line) > 10:
            return real(file, line[: len(line) - 10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record.os, "write", write_some)
    for at in range(3):
        recorder.ended(request(tokens_of(at, 600)), 102.0)
    until(lambda: recorder.lost == 3)
    full[0] = False  # there is room again
    write(recorder, request(tokens_of(7, 1200)))
    assert [line["input_length"] for line in lines_of(path)] == [1200]
    assert (recorder.recorded, recorder.lost) == (1, 3)
    assert caplog.text.count("not recorded: No space left") == 1


# --- through nodes --------------------------------------------------------------------------------


def test_a_nodes_record_replays_to_the_hits_it_had(tmp_path):
    """Two conversations of three turns each."""
    path = tmp_path / "own.jsonl"
    config = DecodeConfig(record=path, policy="lru")
    pool = {"num_pages": 64, "page_size": 256}
    with (
        DecodeNode(make_pool(**pool), config) as decode,
        PrefillNode(make_pool(**pool), PrefillConfig()) as prefill,
    ):
        pair = NodePair(decode, prefill)
        for turn in range(3):
            for seed in (1, 2):
                rid = f"{seed}.{turn}"
                pair.submit(rid, tokens_of(seed, 1024 * (turn + 1)))
                pair.run(rid)
        pair.check_at_rest()
        pair.until(lambda: decode.stats()["recorded"] == 6)
        assert decode.stats()["record_lost"] == 0
        had = decode.stats()["skipped_tokens"]
        node_bytes = decode.pool.layout.kv_bytes_per_token
    assert "prefixkv-record" not in {thread.name for thread in threading.enumerate()}
    trace = read_trace(path)
    assert trace.bytes_per_token == node_bytes
    assert [request.num_tokens for request in trace.requests] == [
        1024,
        1024,
        2048,
        2048,
        3072,
        3072,
    ]
    result = replay_policy(trace, "lru", 64)
    # The node keeps what was generated, too, which the next prompts here do not go on from.
    assert result.hit_tokens == had == 2 * (1024 + 2048)


def test_where_no_thread_starts_the_file_is_closed(tmp_path, monkeypatch):
    opened, os_open = [], os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(os_open(*args)) or opened[-1])

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        make(tmp_path / "record.jsonl")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(opened[-1])
