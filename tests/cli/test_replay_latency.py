"""First tokens beside a replay's hits: each queue by hand, and what the command says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from prefixkv.cli.main import run_command
from prefixkv.cli.replay import Speeds, Trace, make_trace, replay_curves
from prefixkv.cli.replay.latency import Latency, RequestTokens, latencies
from prefixkv.errors import ConfigError

SPEEDS = Speeds(
    prefill_tokens_per_s=1000, link_bytes_per_s=5000, host_bytes_per_s=20_000, own_tokens=50,
    own_tokens_per_s=100,
)  # fmt: skip
"""A second for a thousand tokens; with ten bytes a token two on the link, and half a second to load
them from the host."""


def trace_of(*requests: tuple[float, int]) -> Trace:
    """Blocks of 100 tokens, ten bytes a token."""
    entries = [
        {"timestamp": 1000 * at_s, "input_length": tokens, "hash_ids": [*range(-(-tokens // 100))]}
        for at_s, tokens in requests
    ]
    return replace(make_trace("t", entries, block_tokens=100), bytes_per_token=10)


def first_tokens(
    *requests: tuple[float, int, int, int], speeds: Speeds = SPEEDS
) -> dict[tuple[int, int], Latency]:
    """Of requests of (time, tokens, found by the device, found by the host behind that), by host
    blocks and own tokens."""
    trace = trace_of(*((at_s, tokens) for at_s, tokens, _, _ in requests))
    found = [
        RequestTokens(at_s, tokens, device, [host], counted=True)
        for at_s, tokens, device, host in requests
    ]
    return {(one.host_blocks, one.own_tokens): one for one in latencies(trace, found, [8], speeds)}


def test_one_request_passes_prefill_and_link() -> None:
    """1,000 tokens: computed after 1 s, sent after 2, which is later."""
    found = first_tokens((0.0, 1000, 0, 0))
    assert {one.ttft_s_p50 for one in found.values()} == {2.0}
    # On a faster link the last block of 100 tokens goes when all is computed.
    fast = replace(SPEEDS, link_bytes_per_s=10_000)
    assert first_tokens((0.0, 1000, 0, 0), speeds=fast)[0, 0].ttft_s_p50 == pytest.approx(1.1)


def test_what_the_device_has_is_neither_computed_nor_sent() -> None:
    """400 tokens missing: computed after .4 s, sent after .8."""
    assert first_tokens((0.0, 1000, 600, 0))[0, 0].ttft_s_p50 == pytest.approx(0.8)


def test_what_the_host_has_is_computed_but_not_sent() -> None:
    """Prefill lacks what decode's pool lacks: .4 s; 300 tokens are loaded in .15 s and 100 sent
    behind those .4 s."""
    found = first_tokens((0.0, 1000, 600, 300))
    assert found[0, 0].ttft_s_p50 == pytest.approx(0.8)
    assert found[8, 0].ttft_s_p50 == pytest.approx(0.6)
    slow = replace(SPEEDS, host_bytes_per_s=3000)
    assert first_tokens((0.0, 1000, 600, 300), speeds=slow)[8, 0].ttft_s_p50 == pytest.approx(1.0)


def test_what_is_little_is_computed_by_decode_behind_its_load() -> None:
    """50 tokens missing behind the host's: loaded after .15 s, computed in .5."""
    found = first_tokens((0.0, 1000, 650, 300))
    assert found[8, 50].ttft_s_p50 == pytest.approx(0.65)
    assert (found[8, 50].prefill_busy, found[8, 50].link_busy) == (0, 0)
    # Without the host 350 are missing: prefill's work with own compute too.
    assert found[0, 50] == replace(found[0, 0], own_tokens=50)
    # 51 are too many.
    assert first_tokens((0.0, 1000, 649, 300))[8, 50].own_busy == 0


def test_each_queue_is_first_come_first_served() -> None:
    """The second comes .1 s later: its link is free after 2 s, and ends after 4. A hit of 990
    passes both by own compute; where prefill computes it, it waits for the link behind them."""
    requests = ((0.0, 1000, 0, 0), (0.1, 1000, 0, 0), (0.2, 1000, 990, 0))
    found = first_tokens(*requests, speeds=replace(SPEEDS, prefill_tokens_per_s=100_000))
    assert found[0, 0].ttft_s_p50 == pytest.approx(4.02 - 0.2)
    assert found[0, 50].ttft_s_p50 == pytest.approx(2.0)
    assert found[0, 50].own_busy == pytest.approx(0.1 / 0.2)
    assert found[0, 0].link_busy == pytest.approx(4.02 / 0.2)


def test_as_many_prefill_workers_as_keep_them_seven_tenths_busy() -> None:
    """Eleven seconds of work in ten: 1.1 of a worker's time."""
    found = first_tokens(*((float(at), 1000, 0, 0) for at in range(11)))
    assert (found[0, 0].prefill_workers, found[0, 0].prefill_busy) == (2, pytest.approx(0.55))


@pytest.mark.parametrize(
    "settings",
    [{"link_bytes_per_s": 0}, {"host_bytes_per_s": -1}, {"own_tokens": 0}, {"own_tokens_per_s": -1},
     {"prefill_tokens_per_s": 0}],
)  # fmt: skip
def test_speeds_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        replace(SPEEDS, **settings)  # type: ignore[arg-type]


def test_the_size_of_a_token_is_needed_before_anything_is_replayed() -> None:
    seen: list[Any] = []
    trace = replace(trace_of((0, 100), (1, 100)), bytes_per_token=0)
    with pytest.raises(ConfigError, match="--bytes-per-token"):
        replay_curves(trace, "lru", [1], speeds=SPEEDS, each=seen.append)
    assert not seen
    (found,) = replay_curves(trace, "lru", [1], speeds=SPEEDS, bytes_per_token=10, hosts=[2])
    assert [(one.host_blocks, one.own_tokens) for one in found.latency] == [
        (0, 0), (0, 50), (2, 0), (2, 50),
    ]  # fmt: skip


def test_only_requests_that_count_and_fit_have_first_tokens() -> None:
    """The first only warms, and the long one is refused; both others are full hits."""
    trace = trace_of((0, 200), (10, 200), (20, 900), (30, 200))
    (found,) = replay_curves(trace, "lru", [2], speeds=SPEEDS, warm=0.25)
    assert found.too_long == 1
    alone, own = found.latency
    assert (alone.ttft_s_p50, alone.ttft_s_p99) == pytest.approx((0.001, 0.001))
    assert own.ttft_s_p99 == pytest.approx(0.01)
    # What only warms keeps the queues busy all the same.
    assert alone.link_busy == pytest.approx(0.4 / 30)
    assert replay_curves(trace_of((0, 900)), "lru", [2], speeds=SPEEDS)[0].latency == ()


def test_the_command_says_first_tokens_and_writes_them(tmp_path: Any, capsys: Any) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    entries = [
        {"timestamp": 1000 * at, "input_length": 512, "hash_ids": [at % 3]} for at in range(9)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    words = f"replay {path} --policy lru --capacity 2 --host 2x --prefill-rate 512 --json {out}"
    words += " --bytes-per-token 1000000 --link-rate 4.096 --own-compute 99 --host-rate 1.024"
    assert run_command(words.split()) == 0
    said = capsys.readouterr().out
    # Nine prompts of a second each: two workers; each is sent in a second behind its end.
    assert (
        "TTFT P50 2.000 s, P99 2.00 s (no host, no own compute; 2 prefill workers 56% busy" in said
    )
    assert "(host 4 blocks, own compute to 99 tokens; 2 prefill workers 19% busy" in said
    rows = json.loads(out.read_text(encoding="utf-8"))
    # Loaded in half a second, and a token computed at half of prefill's speed.
    assert rows[0]["latency"][3]["ttft_s_p50"] == pytest.approx(0.5 + 1 / 256)
