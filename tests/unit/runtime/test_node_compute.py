"""Real nodes of which decode computes prompts: prefill hears in time, and may go."""

from __future__ import annotations

from typing import Any

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ComputeConfig, ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import AbortedError, TransferError
from prefixkv.request import Request
from tests.support.node_pair import left, make_pool, tokens_of
from tests.support.patience import until

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
