"""Two nodes of one process over real NIXL: every request path that works, every byte verified;
prompts that decode computes, of which prefill hears in time, and may go."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import ComputeConfig, ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import AbortedError, PromptMismatchError, TransferError, WeightsVersionError
from prefixkv.request import Request
from tests.support.gates import Gate
from tests.support.node_pair import NodePair, first_token, left, make_pool, tokens_of
from tests.support.patience import NEVER_S, SkippableClock, until
from tests.unit.runtime.conftest import QUICK, MakePair

PAGE_SIZE = 4


def sent_bytes(pair: NodePair) -> int:
    return pair.prefill.stats()["bytes_sent"]


def page_bytes(pair: NodePair, pages: int) -> int:
    return pages * pair.prefill.pool.layout.page_bytes


@pytest.mark.usefixtures("_any_wire")
def test_a_miss_a_partial_hit_and_a_full_hit(pair: NodePair) -> None:
    """Bytes are sent for what decode lacks only; for a full hit of whole pages, none and no write
    at all."""
    prompt = tokens_of(1, 40)
    pair.submit("miss", prompt, max_new_tokens=1)
    pair.run("miss")
    assert pair.d.prefix_lens["miss"] == [0]
    assert sent_bytes(pair) == page_bytes(pair, 10)

    longer = tokens_of(1, 54)
    pair.submit("partial", longer, max_new_tokens=1)
    pair.run("partial")
    assert pair.d.prefix_lens["partial"] == [40]
    assert sent_bytes(pair) == page_bytes(pair, 10 + 4)  # the last page is not full, and travels

    before = pair.prefill.stats()
    pair.submit("full", longer[:52], max_new_tokens=1)
    pair.run("full")
    after = pair.prefill.stats()
    assert pair.d.prefix_lens["full"] == [52]
    assert (after["writes_done"], after["bytes_sent"]) == (
        before["writes_done"],
        before["bytes_sent"],
    )
    assert after["decode_hit_tokens"] == 40 + 52
    assert after["bytes_skipped"] == page_bytes(pair, 10 + 13)
    assert pair.p.sent == ["miss", "partial", "full"]


@pytest.mark.parametrize("order", ["layer_major", "page_major"])
@pytest.mark.parametrize(
    ("attention", "heads", "dim", "dtype"),
    [
        ("mha", 4, 16, "bfloat16"), ("mha", 1, 8, "float32"), ("mha", 3, 8, "float16"),
        ("mha", 2, 24, "float8_e4m3fn"), ("mla", 1, 36, "uint8"), ("mla", 1, 576, "bfloat16"),
    ],
)  # fmt: skip
def test_turns_of_a_conversation(
    make_pair: MakePair, order: str, attention: str, heads: int, dim: int, dtype: str
) -> None:
    """Each turn's prompt is the whole conversation: decode has it all but the new user's text."""
    pair = make_pair(
        pool={
            "order": order,
            "attention": attention,
            "num_kv_heads": heads,
            "head_dim": dim,
            "dtype": dtype,
        }
    )
    history, kv_len = tokens_of(2, 21), 0
    for turn in range(3):
        rid = f"turn {turn}"
        pair.submit(rid, history, max_new_tokens=5)
        pair.run(rid)
        expected = history
        for token in pair.d.outputs[rid]:  # what the stand-in says follows from all before it
            assert token == first_token(expected)
            expected = np.append(expected, np.int32(token))
        assert pair.d.prefix_lens[rid] == [kv_len // PAGE_SIZE * PAGE_SIZE]
        kv_len = len(expected) - 1  # the token sampled last has none
        history = np.append(expected, tokens_of(3 + turn, 7))
    assert sent_bytes(pair) < page_bytes(
        pair, 14
    )  # 37 tokens of users' text, and the pages they share


@pytest.mark.usefixtures("_any_wire")
def test_many_at_once_in_a_small_pool(make_pair: MakePair) -> None:
    """More requests than the pool holds: admission waits, cached pages are evicted, runners are
    retracted."""
    pair = make_pair(pool={"num_pages": 40}, decode={"reserve_tokens": 0, "max_running": 8})
    pair.d.together = True
    rng = np.random.default_rng(5)
    system = tokens_of(7, 16)
    rids = []
    for i in range(14):
        own = tokens_of(100 + i % 6, int(rng.integers(1, 30)))
        rids.append(f"r{i}")
        pair.submit(
            rids[-1], np.concatenate([system, own]), max_new_tokens=int(rng.integers(1, 40))
        )
    pair.run(*rids)
    assert set(pair.d.ended.values()) == {None}
    stats = pair.decode.stats()
    assert stats["evicted_pages"] > 0
    assert stats["retracted"] > 0
    assert stats["retracted"] == len(pair.d.retracted)
    assert stats["finished"] == 14
    assert stats["skipped_tokens"] > 14 * 8
    for rid in rids:  # nothing was sampled twice, nor left out, by a retraction
        tokens = pair.d.prompts[rid]
        for token in pair.d.outputs[rid]:
            assert token == first_token(tokens)
            tokens = np.append(tokens, np.int32(token))


# --- the payload ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, QUICK.max_aux_bytes])
def test_aux_arrives_as_it_was_sent(pair: NodePair, size: int) -> None:
    payload = np.random.default_rng(size).bytes(size)
    pair.p.aux = lambda req: payload
    pair.d.hold_running = True
    req = pair.submit("r", tokens_of(1, 9))
    pair.until(lambda: "r" in pair.d.running)
    assert req.aux == payload
    pair.d.wrong_aux = 0  # it is not what the stand-in sends
    pair.d.hold_running = False
    pair.run("r")


# --- calls return at once, and what they refuse ---------------------------------------------------


def test_no_call_waits_for_a_write(make_pair: MakePair) -> None:
    """While nothing can be written yet, all of a prompt is handed over."""
    pair = make_pair(pool={"num_pages": 1200})
    pair.p.hold = True
    tokens = tokens_of(1, 4000)
    pair.submit("r", tokens)
    pair.until(lambda: "r" in pair.p.computing)
    req = pair.p.computing.pop("r")
    gate = Gate()
    for end in range(100, 4001, 100):
        aux = first_token(tokens).to_bytes(4, "little") if end == 4000 else b""
        pair.prefill.send_chunk(req, end, end == 4000, aux, ready=gate)
    assert sent_bytes(pair) == 0
    pair.p.fill(req, 0, len(tokens))
    gate.answer = True
    pair.run("r")


# --- what an operator sees ------------------------------------------------------------------------


def test_idle_nodes_keep_each_other_alive(clock: SkippableClock, make_pair: MakePair) -> None:
    """Heartbeats go both ways: whoever is suspect after a silence is so until the next one."""
    pair = make_pair(control=replace(QUICK, suspect_after_s=NEVER_S / 2))
    pair.submit("r", tokens_of(1, 10))
    pair.run("r")
    for _ in range(3):
        clock.skip(NEVER_S, [])
        pair.until(
            lambda: pair.decode.peers() == {pair.prefill.endpoint: (pair.prefill.peer_id, "ready")}
        )
        pair.until(lambda: pair.prefill.peers() == {pair.decode.peer_id: "ready"})


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "namespace"),
    [(tokens_of(2, 30), "lora"), (tokens_of(1, 29), "lora"), (tokens_of(1, 30), "another")],
    ids=["tokens", "length", "namespace"],
)
def test_another_prompt_fails_on_both_sides_and_its_pages_are_free_at_once(
    pair: NodePair, theirs: Any, namespace: str
) -> None:
    ours: Any = RadixKey(tokens_of(1, 30), "lora")
    pair.submit("r", ours, room=7, tell=False)
    pair.p.add("r", RadixKey(theirs, namespace), 7)  # type: ignore[arg-type]
    pair.until(lambda: "r" in pair.d.ended and "r" in pair.p.failed)
    errors = pair.d.ended["r"], pair.p.failed["r"]
    assert [type(error) for error in errors] == [PromptMismatchError] * 2
    stats = pair.decode.stats()
    assert stats["pages_held"] == stats["pages_owned"] == 0
    assert (sent_bytes(pair), pair.p.chunks) == (0, {})


# No deadline here is shorter than a test may take: what ends, ends for another reason.
PATIENT = ControlConfig(bootstrap_timeout_s=300.0, waiting_timeout_s=300.0, parked_timeout_s=300.0)


def moved(error: Exception | None) -> tuple[str, str]:
    assert isinstance(error, WeightsVersionError), repr(error)
    return error.versions


def works(pair: NodePair, rid: str) -> None:
    pair.submit(rid, tokens_of(1, 21))
    pair.run(rid)
    assert pair.d.ended[rid] is None
    pair.check_at_rest()


def test_what_runs_and_what_is_on_its_way_ends_on_both_sides(make_pair: MakePair) -> None:
    """By name, at once, by `flush(weights_version=)`; the pair works again when both have it."""
    pair = make_pair(decode={"reserve_tokens": 0}, control=PATIENT)
    pair.d.hold_running = True
    pair.submit("runs", tokens_of(1, 21))
    pair.until(lambda: "runs" in pair.d.running)
    pair.p.hold = True
    for rid in ("way", "joins"):
        pair.submit(rid, tokens_of(2, 21))
    joined = "shared_flights"
    pair.until(lambda: "way" in pair.p.computing and pair.decode.stats()[joined] == 1)
    pair.decode.flush(weights_version="v2")
    pair.until(lambda: {"runs", "way", "joins"} <= pair.d.ended.keys())
    assert {moved(pair.d.ended[rid]) for rid in ("runs", "way", "joins")} == {("0", "v2")}
    pair.until(lambda: {"way", "joins"} <= pair.p.failed.keys())
    assert {moved(pair.p.failed[rid]) for rid in ("way", "joins")} == {("0", "v2")}
    pair.d.hold_running = pair.p.hold = False
    pair.prefill.flush(weights_version="v2")
    works(pair, "after")


NEAR = DecodeConfig(compute=ComputeConfig(), reserve_tokens=0)


def _request(prefill: str, number: int = 1, **more: Any) -> Request:
    tokens = tokens_of(number, 21)
    return Request(f"r{number}", tokens, 4, room=number, prefill=prefill, decode="decode-0", **more)


def test_what_both_sides_were_told_is_refused_at_prefill_before_it_computes() -> None:
    with (
        PrefillNode(make_pool(64), PrefillConfig()) as prefill,
        DecodeNode(make_pool(64), NEAR) as decode,
    ):
        request = _request(prefill.endpoint)
        prefill.add(request)
        decode.add(request)
        found: list[Any] = []

        def admit() -> None:
            assert prefill.pop_bootstrapped() == []
            decode.pop_preallocated()
            found.extend(decode.pop_local())

        until(lambda: found, step=admit)
        (req,) = found
        assert decode.chunk_tokens == 256
        decode.computed(req, 10)
        decode.computed(req, 21, b"first")
        assert decode.wait(0.0)
        assert decode.pop_transferred() == [req]
        assert req.aux == b"first"
        assert decode.pop_needs_prefill() == []
        refused: list[Any] = []
        until(lambda: refused, step=lambda: (admit(), refused.extend(prefill.pop_failed())))
        assert isinstance(refused[0].error, TransferError | AbortedError)
        assert "is brought by decode itself" in str(refused[0].error)
        decode.append_many([req], [7])
        decode.finish(req)
        until(lambda: not left(decode) and not left(prefill), step=admit)
        decode.audit()
        prefill.audit()
        stats = decode.stats()
        assert (stats["computed_requests"], stats["computed_tokens"]) == (1, 21)
        assert stats["pages_cached"] > 0


def test_prefill_closes_and_what_it_had_is_computed_here() -> None:
    config = DecodeConfig(
        compute=ComputeConfig(below=0, ask="late"), failure_policy="local", reserve_tokens=0,
        control=ControlConfig(heartbeat_s=0.2, suspect_after_s=60.0),  # its farewell counts
    )  # fmt: skip
    prefill = PrefillNode(make_pool(64), PrefillConfig())
    with DecodeNode(make_pool(64), config) as decode:
        asks: list[Any] = []
        local: list[Any] = []

        def step() -> None:
            decode.pop_preallocated()
            asks.extend(decode.pop_needs_prefill())
            local.extend(decode.pop_local())
            decode.wait(0.01)

        try:
            decode.add(_request(prefill.endpoint))
            until(lambda: asks, step=step)
            assert local == []
        finally:
            prefill.close()
        until(lambda: local, step=step)
        decode.add(_request(prefill.endpoint, 2))
        decode.add(_request("", 3))
        until(lambda: len(local) == 3, step=step)
        assert len(asks) == 1
        for req in local:
            decode.computed(req, req.fill_len)
        assert len(decode.pop_transferred()) == 3
        assert decode.pop_failed() == []
        for req in local:
            decode.append_many([req], [7])
            decode.finish(req)
        until(lambda: not left(decode), step=step)
        assert decode.drain(0.0) or not decode.stats()["requests"]
        decode.audit()
