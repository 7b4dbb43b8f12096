"""The source of the part of a prompt that decode lacks: its own compute, or a prefill worker.

The rule: decode computes it if that is sooner, or no later since it sends nothing, within
`itl_share` of the steps beside it. Each way costs its measured rate:

- here for all tokens that are due, in chunks, each with a step of the running batch. The seconds
  count once more for each request that comes meanwhile, as it waits. Those that prefill takes for
  the same tokens count too, as likely as the next turn is asked of it: it computes them then.
- prefill for its open promises and the request, and what of its prefix decode has computed.

More than `below` tokens are always prefill's, `_ALWAYS` at most are never: a round trip costs more
than a step. A way that is not known is taken for one request at a time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from prefixkv.config import ComputeConfig
from prefixkv.decode.flights import Flight, Source
from prefixkv.decode.ledger import Ledger
from prefixkv.paging import Pages, pages_for
from prefixkv.protocol.ids import RoomKey

TRY_SHARE: Final = 0.02
"""By this part a rate seems to be less with each request that was decided against it since it was
measured. So what was dear once is tried again, at as much of the seconds that requests take."""

_KNOWN: Final = 3  # measures, before a rate counts: one of them may be a stall
_KEPT_MEASURES: Final = 7
_ALWAYS: Final = 64  # tokens
_UNMEASURED: Final = 2048  # most tokens of a prompt that is computed to measure what that costs
_LEAST_CHUNK: Final = 8  # tokens of a chunk, whatever `itl_share` says: else prompts never end
_MORE: Final = 2.0  # a chunk beside a batch is at most this many times as long as the last ones
_MOST_WITHOUT: Final = 16  # steps that go without after a chunk, for each measured one
_LOAD_FACTOR: Final = 2.0  # a load may take so many times as long as to have all sent
_LOAD_S: Final = 0.02  # and so much longer
_KEPT_REQUESTS: Final = 0.95
_MAX_WORKERS: Final = 256  # prefill workers that are remembered


class Rate:
    """Seconds per unit of work: the median of the last measures. Every call is O(1)."""

    def __init__(self) -> None:
        self._measures: deque[tuple[float, float]] = deque(maxlen=_KEPT_MEASURES)
        self.unit_s = 0.0
        self.declined = 0  # requests since the last measure that were decided against it

    def add(self, units: float, seconds: float, amends: bool = False) -> None:
        """Add a measure. `amends`: in place of the last one."""
        if amends and self._measures:
            self._measures.pop()
        self._measures.append((units, max(0.0, seconds) / units))
        self.unit_s = statistics.median_low(unit_s for _, unit_s in self._measures)
        self.declined = 0

    def __len__(self) -> int:
        return len(self._measures)

    @property
    def is_known(self) -> bool:
        return len(self._measures) >= _KNOWN

    @property
    def most_units(self) -> float:
        """The most units of one of the last measures."""
        return max((units for units, _ in self._measures), default=0.0)

    @property
    def price_s(self) -> float:
        """The rate, the less the longer it was not measured."""
        return self.unit_s / (1.0 + TRY_SHARE * self.declined)


@dataclass(slots=True)
class PrefillLoad:
    """The promises that a worker has to answer, one after the other."""

    promises: dict[AwaitedRoom, None] = field(default_factory=dict)  # the oldest first
    tokens: int = 0  # of all of them
    answered_s: float = -math.inf

    def took_s(self, promise: AwaitedRoom, now_s: float) -> float:
        return now_s - max(promise.time_s, self.answered_s)

    def backlog_s(self, token_s: float, now_s: float) -> float:
        """Return the seconds until it has answered what it was promised, at `token_s` a token. An
        answer that is late takes as long again as it has taken."""
        oldest = next(iter(self.promises), None)
        if oldest is None:
            return 0.0
        took_s = self.took_s(oldest, now_s)
        left_s = max(token_s * oldest.tokens - took_s, took_s)
        return left_s + token_s * (self.tokens - oldest.tokens)


@dataclass(slots=True, eq=False)
class AwaitedRoom:
    """When a worker was promised a room, and the tokens that it has to compute."""

    worker: PrefillLoad
    time_s: float
    tokens: int


class Sources:
    """Measurements, and the decision by them. Owned by the scheduler's thread. Every call is O(1).

    Args:
        config: None: everything comes from prefill.
        fails_over: whether up to `down_below` tokens of a request are computed where its prefill
            worker cannot be asked; else up to `below`.
        loads: whether there is host memory, whose loads are compared with what prefill takes.
    """

    def __init__(
        self, config: ComputeConfig | None = None, fails_over: bool = False, loads: bool = False
    ) -> None:
        self.config = config
        self.fails_over = fails_over
        self._measures = config is not None or loads
        self._step = Rate()  # of the running batch, without a chunk
        self._alone, self._beside = Rate(), Rate()  # a token of a chunk, what it adds to a step
        self._sent = Rate()  # a token that prefill sends
        self._workers: dict[str, PrefillLoad] = {}
        self._without = 0.0  # steps that have no chunk before the next one
        # Of requests: how many, and the seconds between them. Fading sums, that begin as if one had
        # come in a second: of a burst at the beginning nothing is known.
        self._requests, self._between_s, self._request_s = 0.0, 1.0, math.inf
        self._sent_on = 0.0  # part of requests that go on behind others and are asked of prefill
        self.unsent: set[int] = set()
        """Pages with KV that decode has computed, and prefill has not. Eviction leaves them alone:
        a page that is used again stays until prefill is next asked for it."""

    # --- measurements -----------------------------------------------------------------------------

    def chunk(self, num_tokens: int, seconds: float, running: int, goes_on: bool = False) -> None:
        """Note a pass that computed chunks.

        Args:
            num_tokens: of all chunks, at least 1.
            seconds: of the whole pass.
            running: requests that got a token in it, 0 if there was no batch.
            goes_on: the pass is that of the last call, and this is all of it by now.
        """
        if not running:
            self._alone.add(num_tokens, seconds, goes_on)
            return
        # Where no pass goes without a chunk, what a chunk alone does not explain is the step.
        step_s = seconds - num_tokens * self._alone.unit_s
        if len(self._alone) and step_s > 0 and not self._step.is_known:
            self._step.add(1, step_s, goes_on)
        self._beside.add(num_tokens, seconds - self._step.unit_s, goes_on)
        # Where the least chunk adds more than its share, the steps behind it make up for it; few at
        # first, as one measure may be a stall.
        share_s = self._share_s
        if share_s > 0 and num_tokens <= _LEAST_CHUNK and not goes_on:
            self._without += self._beside.unit_s * num_tokens / share_s
            self._without = min(self._without, _MOST_WITHOUT * len(self._beside))

    def step(self, seconds: float) -> None:
        """Note how long a step of the running batch took that computed no chunk."""
        self._step.add(1, seconds)

    def next_pass(self, running: int) -> None:
        """Note that a pass begins, with a step of `running` requests: it allows for more chunks."""
        if running:
            self._without = max(self._without - 1.0, -1.0)

    def promised(
        self, address: str, now_s: float, tokens: int, again: int = 0
    ) -> AwaitedRoom | None:
        """Note that a worker was promised a room: `tokens` that it sends, behind `again` ones that
        decode has computed, and prefill has not. Return what its end is told by."""
        if not self._measures:
            return None
        worker = self._workers.pop(address, None) or PrefillLoad()
        self._workers[address] = worker  # the one that was asked last is forgotten last
        room = AwaitedRoom(worker, now_s, max(1, tokens + again))
        worker.promises[room] = None
        worker.tokens += room.tokens
        if len(self._workers) > _MAX_WORKERS:
            del self._workers[next(iter(self._workers))]
        return room

    def arrived(self, room: AwaitedRoom | None, now_s: float) -> None:
        """Note that the KV of a room has arrived."""
        if room is not None:
            self.gave_up(room)
            self._sent.add(room.tokens, room.worker.took_s(room, now_s))
            room.worker.answered_s = now_s

    def gave_up(self, room: AwaitedRoom | None) -> None:
        """Note that a room has failed, or was aborted: its time says nothing."""
        if room is not None:
            del room.worker.promises[room]
            room.worker.tokens -= room.tokens

    # --- pages that prefill does not have ---------------------------------------------------------

    def computed_pages(self, pages: Pages) -> None:
        """Note that decode has computed what is in these pages."""
        if self._measures:
            self.unsent.update(pages.tolist())

    def sent_pages(self, path: Pages) -> None:
        """Note that prefill has computed a whole prompt, in these pages."""
        self.unsent.difference_update(path.tolist())

    def again_pages(self, path: Pages) -> int:
        """Count the pages that prefill has to compute again, from the first one on that it does not
        have. O(1) if it has all."""
        if not self.unsent:
            return 0
        unsent = (at for at, page in enumerate(path.tolist()) if page in self.unsent)
        return len(path) - next(unsent, len(path))

    # --- the decision -----------------------------------------------------------------------------

    @property
    def least_tokens(self) -> int:
        """As few tokens are always computed here; -1: none at all."""
        return -1 if self.config is None else min(_ALWAYS, self.config.below)

    def most_tokens(self, is_down: bool) -> int:
        """Return how many tokens of one request are computed here at most; -1: none. `is_down`: its
        prefill worker cannot be asked."""
        if self.config is None:
            return -1
        return self.config.down_below if is_down and self.fails_over else self.config.below

    def is_here(
        self,
        missing: int,
        due: int,
        running: int,
        address: str,
        now_s: float,
        num_sent: int | None = None,
        again: int = 0,
        goes_on: bool = False,
    ) -> bool:
        """Decide whether decode computes a request's missing tokens, by the module's rule.

        Args:
            missing: tokens that are neither here nor on their way.
            due: tokens that decode has to compute for other requests.
            running: requests that run, beside which the chunks are computed.
            num_sent: tokens that prefill would send; None: the missing ones. With extra state
                decode begins at a checkpoint, and computes again what is cached behind it.
            again: tokens before those that decode has computed, and prefill has not.
            goes_on: a part of its prompt is cached.
        """
        self._requests = self._requests * _KEPT_REQUESTS + 1
        self._between_s = self._between_s * _KEPT_REQUESTS + max(0.0, now_s - self._request_s)
        self._request_s = now_s
        sent = (missing if num_sent is None else num_sent) + again
        is_here = self._is_sooner_here(missing, due, running, sent, address, now_s)
        self._sent_on += ((goes_on and not is_here) - self._sent_on) * (1 - _KEPT_REQUESTS)
        return is_here

    def _is_sooner_here(
        self, missing: int, due: int, running: int, sent: int, address: str, now_s: float
    ) -> bool:
        # 1. By size alone.
        if missing > self.most_tokens(is_down=False):
            return False
        if missing <= self.least_tokens:
            return True
        # 2. One of the two ways is not known.
        worker = self._workers.get(address) or PrefillLoad()
        if not (self._alone.is_known or self._beside.is_known):
            return not due and missing <= _UNMEASURED
        if not self._sent.is_known:
            return bool(worker.promises) and due + missing <= _UNMEASURED
        # 3. Both are.
        here_s = self._here_s(due + missing, running)
        behind_s = (here_s - self._here_s(due, running)) * self._requests
        here_s *= 1.0 + behind_s / max(1e-3, self._between_s)
        later_s = self._sent_on * self._sent.price_s * missing
        is_here = here_s + later_s <= self._sent_s(sent, worker, now_s)
        for rate in (self._sent,) if is_here else (self._alone, self._beside):
            rate.declined += 1
        return is_here

    def worth_loading(
        self, missing: int, num_loaded: int, load_s: float, address: str, now_s: float
    ) -> bool:
        """Return whether to load `num_loaded` of the `missing` tokens from host memory, in `load_s`
        seconds (0: not known), rather than have all sent. Without own compute alone: with it both
        are about as good, and what is loaded makes prompts short enough to be computed here."""
        if not (load_s and self.config is None and self._sent.is_known):
            return True
        worker = self._workers.get(address) or PrefillLoad()
        sent_s = self._sent_s(missing, worker, now_s)
        loaded_s = max(load_s, self._sent_s(missing - num_loaded, worker, now_s))
        return loaded_s <= _LOAD_FACTOR * sent_s + _LOAD_S

    def chunk_tokens(self, running: int) -> int:
        """Return the most tokens of one prompt for the next step, beside `running` requests, to
        whose step it adds `itl_share` at most. 0 without a config, and in a step that has to go
        without: where even the least chunk adds more, only some steps have one.

        A chunk is at most `_MORE` times as long as the last ones, as the costs of longer ones are
        only guessed.
        """
        if self.config is None:
            return 0
        if not running:
            return self.config.chunk_tokens
        if self._without > 0.0:
            return 0
        last_tokens = max(self._alone.most_units, self._beside.most_units)
        return self._chunk_beside(self.config, max(_LEAST_CHUNK, _MORE * last_tokens))

    @property
    def _beside_or_alone(self) -> Rate:
        return self._beside if self._beside.is_known or not self._alone.is_known else self._alone

    def _chunk_beside(self, config: ComputeConfig, most: float) -> int:
        token_s = self._beside_or_alone.unit_s
        tokens = self._share_s / token_s if token_s > 0 else math.inf
        return int(min(config.chunk_tokens, most, max(_LEAST_CHUNK, tokens)))

    @property
    def _share_s(self) -> float:
        return 0.0 if self.config is None else self.config.itl_share * self._step.unit_s

    def _here_s(self, num_tokens: int, running: int) -> float:
        """Return the seconds to compute so many tokens: those of the chunks, and beside a batch of
        the steps that have them, or go without."""
        assert self.config is not None
        if not running:
            return (self._alone if self._alone.is_known else self._beside).price_s * num_tokens
        rate, share_s = self._beside_or_alone, self._share_s
        chunk = self._chunk_beside(self.config, math.inf)
        without = max(1.0, rate.unit_s * chunk / share_s) if share_s > 0 else 1.0
        steps = math.ceil(num_tokens / chunk) * without
        return rate.price_s * num_tokens + steps * self._step.unit_s

    def _sent_s(self, num_tokens: int, worker: PrefillLoad, now_s: float) -> float:
        token_s = self._sent.price_s
        return worker.backlog_s(token_s, now_s) + token_s * num_tokens


class MeasuringSource(Source):
    """A source that is compared with prefill, so that it measures what that takes."""

    def __init__(self, ledger: Ledger, rule: Sources) -> None:
        self._ledger, self.rule = ledger, rule
        self._awaited: dict[RoomKey, AwaitedRoom | None] = {}

    def _path(self, flight: Flight, end_pages: int) -> Pages:
        return self._ledger.pages.pages(flight.pages)[:end_pages]

    def asked(self, flight: Flight, end: int, now_s: float) -> None:
        page_size, start = self._ledger.page_size, flight.start_pages
        again = self.rule.again_pages(self._path(flight, start)) if self.rule.unsent else 0
        tokens, again = end - start * page_size, again * page_size
        self._awaited[flight.room_key] = self.rule.promised(flight.prefill, now_s, tokens, again)

    def answered(self, flight: Flight, end: int, now_s: float) -> None:
        self.rule.arrived(self._awaited.pop(flight.room_key, None), now_s)
        if self.rule.unsent:
            self.rule.sent_pages(self._path(flight, pages_for(end, self._ledger.page_size)))

    def unanswered(self, flight: Flight) -> None:
        self.rule.gave_up(self._awaited.pop(flight.room_key, None))
