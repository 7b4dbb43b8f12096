"""Times and counts of a decode worker's requests, written down by the scheduler as it goes.

    arrived -- pages --> admitted -- transfer, or compute --> transferred -- flight --> committed
    committed -- engine --> first token

A request keeps the first time of each. The wait between two is named by its reason: "load" in place
of "flight" for a copy from host memory. A request that joined no flight has no "flight".
"""

from __future__ import annotations

from typing import Any

from prefixkv.decode.flights import Flight
from prefixkv.decode.request import DecodeRequest
from prefixkv.stats import Journal

REASONS = ("pages", "transfer", "compute", "flight", "load", "engine", "first_token")
"""Reasons of a wait; `first_token` is the sum of all."""


class DecodeJournal(Journal):
    """The steps that the module lists. No entry is made per token.

    `counters` count every admission, also after a retraction; `tokens` counts each request once.
    """

    def __init__(self) -> None:
        super().__init__(REASONS)
        self.pages_received = 0

    def admitted(
        self, req: DecodeRequest, now_s: float, new_pages: int, shared_tokens: int,
        host_tokens: int, computed_tokens: int,
    ) -> None:  # fmt: skip
        """Prefill is asked for `new_pages`. Of the locked prefix, `shared_tokens` are on their way
        with another flight, and `host_tokens` come from host memory; the engine computes
        `computed_tokens`."""
        counters = self.counters
        counters["admitted"] += 1
        counters["prompt_tokens"] += req.fill_len
        counters["skipped_tokens"] += req.prefix_len
        if shared_tokens:
            counters["shared_flights"] += 1
            counters["shared_tokens"] += shared_tokens
        if host_tokens:
            counters["host_hit_tokens"] += host_tokens
        req.new_pages += new_pages
        # An attempt that has failed, or was retracted, has brought nothing of the prompt.
        if req.first_token_s is None:
            req.hit_tokens = req.prefix_len - shared_tokens
            req.shared_tokens = shared_tokens
            req.host_tokens = host_tokens
            req.decode_computed_tokens = computed_tokens
        # Counters above are of admissions; what follows is of requests, so a second admission adds
        # nothing.
        if req.admitted_s is not None:
            return
        req.admitted_s = now_s
        self.waited("pages", req.arrived_s, now_s)
        self.found(req.request.key.namespace, req.fill_len, req.hit_tokens, shared_tokens)

    def transferred(self, flight: Flight, now_s: float) -> None:
        """All pages that a flight brings are there."""
        self.transfer_ended(flight.prefill, "success")
        self.pages_received += flight.pages.num_own
        req = flight.owner
        if req is not None and req.transferred_s is None:
            req.transferred_s = now_s
            self.waited("transfer", req.admitted_s, now_s)

    def computed(self, req: DecodeRequest, now_s: float) -> None:
        """The engine has computed what a request lacked."""
        self.counters["computed_requests"] += 1
        if req.transferred_s is None:
            req.transferred_s = now_s
            self.waited("compute", req.admitted_s, now_s)

    def committed(self, req: DecodeRequest, now_s: float) -> None:
        """A request's KV is whole in the tree."""
        if req.committed_s is not None:
            return
        req.committed_s = now_s
        if req.host_tokens or req.shared_tokens:
            self.waited("load" if req.host_tokens else "flight", req.transferred_s, now_s)

    def runs(self, req: DecodeRequest, now_s: float) -> None:
        """The engine has appended a request's first token. No-op after a retraction."""
        if req.first_token_s is None:
            req.first_token_s = now_s
            waits = req.host_tokens or req.shared_tokens
            self.waited("engine", req.committed_s if waits else req.transferred_s, now_s)
            self.waited("first_token", req.arrived_s, now_s)

    def ended(self, req: DecodeRequest, now_s: float) -> None:
        req.ended_s = now_s
        self.notify_ended(req, now_s)


def timeline(req: DecodeRequest, page_bytes: int, page_size: int) -> dict[str, Any]:
    """Return the history of a request for the log, with fields of this side alone:

    - `host_tokens`: Hit tokens that were loaded from host memory.
    - `shared_tokens`: Tokens that were on their way with the flight of another request.
    - `decode_computed_tokens`: Tokens that decode's engine was to compute. This, `hit_tokens`,
      `host_tokens` and `shared_tokens` are of the last admission before the first token.
    - `output_tokens`: Tokens that were generated.
    - `asked_bytes`: KV that prefill was asked for.
    - `retractions`: How often its pages were taken back.
    - `retries`: How often prefill was asked again after a failure.
    - `admitted_s`: Its pages are taken and prefill is told. The wait before it is for pages.
    - `transferred_s`: Its own KV is here.
    - `committed_s`: All its KV is in the tree.
    - `first_token_s`: The engine appended a token.
    """
    return req.timeline(
        "decode",
        req.state.value,
        req.prefill,
        prompt_tokens=req.prompt_len,
        hit_tokens=req.hit_tokens,
        host_tokens=req.host_tokens,
        shared_tokens=req.shared_tokens,
        decode_computed_tokens=req.decode_computed_tokens,
        output_tokens=len(req.output),
        asked_bytes=req.new_pages * page_bytes,
        skipped_bytes=(req.hit_tokens + req.shared_tokens) // page_size * page_bytes,
        retractions=req.retractions,
        retries=req.retries,
    )
