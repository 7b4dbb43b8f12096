"""Prompts that decode's engine computes: how far each is, and how long its passes take.

A prompt is *new* until `begin` hands it out, then computed until `advance` brings it to its end. A
prompt that ends before is *left*: the device may write its pages until the engine says it is done.
A pass is a forward of the batch, of chunks of prompts, or both. It begins where the pass before
ended, or when there was work, so it is measured without a call of the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prefixkv.decode.inflight import Flight
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.sources import Sources
from prefixkv.errors import RequestError, check_laws, shown
from prefixkv.pages.windows import WindowGroup


class Computing:
    """The prompts that the engine computes. Owned by the scheduler's thread.

    `sources` is told how long chunks and steps take. The rows in `windows` bound a chunk, by the
    `step_tokens` of each.
    """

    def __init__(self, sources: Sources, windows: Iterable[WindowGroup] = ()) -> None:
        self._sources = sources
        self._step_tokens = min((group.step_tokens for group in windows), default=math.inf)
        self._done: dict[DecodeRequest, int] = {}  # tokens with KV, of those handed out
        self._left: list[DecodeRequest] = []
        self.pass_s = 0.0  # when the engine's last pass ended
        # The prompts that have a chunk in this pass, its tokens and seconds.
        self._chunked: set[DecodeRequest] = set()
        self._tokens, self._seconds = 0, 0.0

    # --- prompts ----------------------------------------------------------------------------------

    def new(self, flights: Iterable[Flight]) -> list[DecodeRequest]:
        """Return the requests of these flights that the engine may begin: those that wait for no
        other flight."""
        return [
            flight.owner
            for flight in flights
            if flight.joined is None and flight.owner is not None and flight.owner not in self._done
        ]

    def begin(self, flights: Iterable[Flight], running: int, now_s: float) -> list[DecodeRequest]:
        """Hand out the prompts that are new. Once per pass, beside `running` requests."""
        found = self.new(flights)
        for req in found:
            self._done[req] = req.prefix_len
        self.has_work(now_s)  # what the engine did before is no part of it
        self._chunked.clear()
        self._sources.next_pass(running)
        return found

    def advance(self, req: DecodeRequest, end: int, running: int, now_s: float) -> int:
        """Note that a prompt has KV up to token `end`, beside `running` requests; at its `fill_len`
        it is computed no more. Return how many tokens that are; 0, with nothing noted, if it has
        ended meanwhile.

        Raises RequestError, with nothing changed, for a prompt that is not computed here, or an
        `end` that is not behind the last one, or beyond the prompt, or too far on for its rows in
        window groups.
        """
        done = self._done.get(req)
        if done is None:
            if req.state.ended:
                return 0
            raise RequestError(f"request {req.rid!r} is not computed here")
        if end - done > self._step_tokens:
            most = self._step_tokens
            what = f"{shown(end - done)} tokens, step_tokens of its window groups is {most}"
            raise RequestError(f"request {req.rid!r} has a chunk of {what}")
        # With extra state it may lack nothing else: then its end is where it begins.
        if not (done < end <= req.fill_len or done == end == req.fill_len):
            least, most = done + 1, req.fill_len
            raise RequestError(
                f"request {req.rid!r}: end is {shown(end)}, not in [{least}, {most}]"
            )
        if end < req.fill_len:
            self._done[req] = end
        else:
            del self._done[req]
        if end == done:
            return 0
        # An engine may compute chunks of several prompts in one pass, and tells of one after the
        # other: what a pass costs is known of all of it.
        if req in self._chunked:
            self._chunked.clear()
        goes_on = bool(self._chunked)
        if not goes_on:
            self._tokens, self._seconds = 0, 0.0
        self._chunked.add(req)
        self._tokens += end - done
        self._seconds += max(0.0, now_s - self.pass_s)
        self._sources.chunk(
            self._tokens, self._seconds, running, now_s, len(self._chunked), goes_on
        )
        self.pass_s = now_s
        return end - done

    def done(self, req: DecodeRequest) -> int | None:
        """Return how many tokens have KV of a prompt that is being computed; None for another."""
        return self._done.get(req)

    def give_up(self, req: DecodeRequest) -> bool:
        """Stop computing a prompt, and return True if its pages may still be written: they are to
        be kept, by `leave`, until `take_left`."""
        return self._done.pop(req, None) is not None

    def leave(self, req: DecodeRequest) -> None:
        self._left.append(req)

    @property
    def left(self) -> list[DecodeRequest]:
        """Requests that ended while computed, and hold pages. Any thread may ask."""
        return self._left.copy()

    def take_left(self) -> list[DecodeRequest]:
        """Return those that are left, to be released once the device is done with them."""
        left, self._left = self._left, []
        return left

    def due_tokens(self, flights: Iterable[Flight]) -> int:
        owners = [flight.owner for flight in flights if flight.owner is not None]
        return sum(req.fill_len - self._done.get(req, req.prefix_len) for req in owners)

    # --- passes -----------------------------------------------------------------------------------

    def has_work(self, now_s: float) -> None:
        """Note that the engine gets something to do: its next pass begins no earlier."""
        self.pass_s = max(self.pass_s, now_s)

    def step(self, reqs: Sequence[DecodeRequest], now_s: float) -> None:
        """Note the tokens of a step of the batch. Measured, unless it computed a chunk too, or only
        first tokens have come."""
        # A first token came with the KV: no step gave it.
        if any(len(req.output) > 1 for req in reqs):
            if not self._chunked and not self._done:
                self._sources.step(max(0.0, now_s - self.pass_s), len(reqs))
            self._chunked.clear()
        self.pass_s = now_s

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self, flights: Sequence[Flight]) -> None:
        """Check the prompts against the flights that are computed here. Raises InternalError."""
        local = {flight.owner: flight for flight in flights}
        laws = {
            "what the engine computes has a flight of its own, and waits for none": all(
                req in local and local[req].joined is None for req in self._done
            ),
            "what is computed lies in its request": all(
                req.prefix_len <= done < req.fill_len or done == req.prefix_len == req.fill_len
                for req, done in self._done.items()
            ),
            "what failed while it was computed has ended, and holds its pages": all(
                req.state.ended and req.pages_held is not None for req in self._left
            ),
        }
        check_laws(laws, list(self._done), self._left)
