"""Times and counts of a prefill worker's requests, written down by the scheduler as it goes.

arrived -- decode --> promised -- pages --> started -- compute --> computed -- send --> sent
"""

from __future__ import annotations

from typing import Any

from prefixkv.errors import AbortedError
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.stats import Journal

REASONS = ("decode", "pages", "compute", "send")
"""Reasons of a wait: decode's promise, pages of its own, the engine, and the writes with their
acknowledgement."""


class PrefillJournal(Journal):
    """The steps that the module lists."""

    def __init__(self) -> None:
        super().__init__(REASONS)

    def promised(self, req: PrefillRequest, peer: str, now_s: float) -> None:
        """Decode (`peer`) has named the pages."""
        req.peer = peer
        req.promised_s = now_s
        self.waited("decode", req.arrived_s, now_s)

    def started(self, req: PrefillRequest, cut_tokens: int, now_s: float) -> None:
        """The engine may compute a request; KV of `cut_tokens` is cached behind its checkpoint."""
        if cut_tokens:
            self.counters["cut_tokens"] += cut_tokens
        self.counters["prompt_tokens"] += req.num_tokens
        self.counters["hit_tokens"] += req.prefix_len
        self.counters["decode_hit_tokens"] += req.decode_prefix_len
        req.started_s = now_s
        self.waited("pages", req.promised_s, now_s)
        self.found(req.key.namespace, req.num_tokens, req.prefix_len)

    def chunk(self, req: PrefillRequest, pages: int, last: bool, now_s: float) -> None:
        req.num_chunks += 1
        req.sent_pages += pages
        if last:
            req.computed_s = now_s
            self.waited("compute", req.started_s, now_s)

    def ended(self, req: PrefillRequest, now_s: float) -> None:
        req.ended_s = now_s
        if req.state is PrefillState.SENT:
            self.waited("send", req.computed_s, now_s)
        if req.peer:
            self.transfer_ended(
                req.peer, "success" if req.state is PrefillState.SENT else outcome(req)
            )
        self.notify_ended(req, now_s)


def outcome(req: PrefillRequest) -> str:
    """Return how a request ended, as a label of metrics."""
    if req.state is PrefillState.FAILED and isinstance(req.error, AbortedError):
        return "aborted"
    return req.state.value


def timeline(req: PrefillRequest, page_bytes: int, page_size: int) -> dict[str, Any]:
    """Return the history of a request for the log, with fields of this side alone:

    - `decode_hit_tokens`: Tokens that decode had already.
    - `chunks`: Chunks that the engine handed over.
    - `sent_bytes`: KV that was sent.
    - `promised_s`: Decode has named its pages. The wait before it is for decode.
    - `started_s`: The engine may compute it. The wait before it is for pages, or for a prefix
      that another request computes.
    - `computed_s`: The last chunk was handed over.
    """
    return req.timeline(
        "prefill",
        outcome(req),
        req.peer,
        prompt_tokens=req.num_tokens,
        hit_tokens=req.prefix_len,
        decode_hit_tokens=req.decode_prefix_len,
        chunks=req.num_chunks,
        sent_bytes=req.sent_pages * page_bytes,
        skipped_bytes=req.decode_prefix_len // page_size * page_bytes,
    )
