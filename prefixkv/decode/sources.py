"""The source of the part of a prompt that decode lacks: its own compute, or a prefill worker.

The choice falls at admission, when the cache, the flights and the batch are known:

    1. more than `below` tokens: prefill
    2. at most `_ALWAYS` of them: here, since a round trip costs more than a step
    3. never measured: here, while little is due here; prefill if that lacks a measurement and has
       no promise to answer
    4. else the least of `seconds * weight + later` (`fair`)
    5. the other way, if it was not measured lately, and takes longer by at most `TRY_SHARE` of the
       seconds that all requests took since the last such try

`seconds` is backlog + service. Here it is less the error of the estimate, so that what is wrongly
thought slow is tried again. Prefill answers its promises in turn; a line through the last services
gives the cost of a token. `weight` counts here only: a long prompt delays all behind it, by 1 +
`OTHERS` * requests per second * service * seconds / typical. `later` counts here too: prefill
computes these tokens again (`Lack.again`) when a later prompt goes on behind them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixkv.config import ComputeConfig
from prefixkv.decode.costs import PassCosts
from prefixkv.decode.services import FRESH_S, AwaitedRoom, PrefillLoad, ServiceLine
from prefixkv.protocol.ids import RoomKey

FAIR_FACTOR: Final = 2.0
FAIR_S: Final = 0.02
"""Of the ways that send, one may take `FAIR_FACTOR` times as long as the fastest, and `FAIR_S`
seconds more, if it sends less."""

OTHERS: Final = 8.0
"""How much more a second counts that others wait than one of the request itself: those that wait
are mostly the shorter ones. On traces 4 to 12 do about as well."""

TRY_SHARE: Final = 0.02
"""What it may cost to measure again the way that seems slower, as a part of the seconds that
requests take."""

_ALWAYS: Final = 64  # tokens
_UNMEASURED: Final = 2048  # most tokens due here while a rate is not known
_AGAIN: Final = 512  # most tokens due here with a prompt that is computed only to measure that
_LEAST_CHUNK: Final = 8  # tokens of a chunk, whatever `itl_share` says: else prompts never end
_MORE: Final = 2.0  # a chunk beside a batch is at most this many times as long as the last ones
_MOST_WITHOUT: Final = 16  # steps that go without after a chunk that is dear for the first time
_LEAST_TOKENS: Final = 128  # tokens that have to be computed before the costs count as measured
_MOST_DOUBT: Final = 0.5  # of what is computed here, so much of the seconds may be taken off
_SURE: Final = 8  # passes with chunks; of fewer measured ones the seconds count as a part of them
_LONG_SURE: Final = 32  # the same: after fewer, what was measured is old sooner
_LEAST_TRANSFERS: Final = 3
_KEPT_REQUESTS: Final = 0.98
_MAX_WORKERS: Final = 256  # prefill workers that are remembered


class Source(enum.Enum):
    """Where the missing part of a prompt comes from."""

    HERE = "here"
    PREFILL = "prefill"


class Lack(NamedTuple):
    """What a request lacks, in one of the ways to get it: `missing` tokens, to be computed or sent,
    and `loaded` ones, here in `load_s` seconds. Before these are `again` tokens, computed here,
    which prefill, where it is asked, has to compute as well."""

    missing: int
    loaded: int = 0
    load_s: float = 0.0
    again: int = 0


class Way(NamedTuple):
    """One way to get what a request lacks: seconds until it is here, and tokens that are sent.

    `weight`: how much more than its own these seconds cost, as others wait for it; at least 1.
    `later_s`: seconds that it is likely to cost a request that comes later.
    """

    source: Source
    seconds: float
    sent_tokens: int
    weight: float = 1.0
    loaded: int = 0
    later_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.seconds * self.weight + self.later_s


def fair(ways: Sequence[Way]) -> Way:
    """Return the way to take of those to get what a request lacks; see the module's rule.

    All that send share one link, so one of these is looked at: that which sends least, unless it
    takes more than `FAIR_FACTOR` times as long as the fastest, and `FAIR_S`.

    >>> here, sent = Way(Source.HERE, 0.4, 0), Way(Source.PREFILL, 0.5, 400)
    >>> fair([here, sent]).source
    <Source.HERE: 'here'>
    >>> fair([here._replace(weight=1.5), sent]).source
    <Source.PREFILL: 'prefill'>
    """
    send = [way for way in ways if way.sent_tokens]
    if len(send) > 1:
        most_s = FAIR_FACTOR * min(way.seconds for way in send) + FAIR_S
        least = min(
            (way for way in send if way.seconds <= most_s),
            key=lambda way: (way.sent_tokens, way.seconds),
        )
        ways = [least, *(way for way in ways if not way.sent_tokens)]
    return min(ways, key=lambda way: (way.cost_s, way.sent_tokens))


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
        self.asks_late = config is not None and config.ask == "late"
        """True if decode's engine submits a request to prefill only once `pop_needs_prefill` has
        returned it."""
        self._measures = config is not None or loads
        self._costs = PassCosts()
        self._tokens = 0  # that decode has computed, ever
        self._computed_s = -math.inf
        self._line = ServiceLine()
        self._answered_s = -math.inf  # when the last transfer of any worker arrived
        self._workers: dict[str, PrefillLoad] = {}
        # Of requests: how many, and the seconds between them. Fading sums.
        # At first as if one had come in a second: of a burst at the beginning nothing is known.
        self._requests, self._between_s = 0.0, 1.0
        self._request_s = -math.inf
        self._log_s: float | None = None  # mean of the logarithm of what requests take
        self._sent_on = 0.5  # part of requests that go on behind others and are asked of prefill
        self._try_s = 0.0  # what the next try of the way that seems slower may cost
        # Seconds by which chunks that break `itl_share` have made steps longer than it allows.
        self._over_s = 0.0
        self._added_s = 0.0  # by the chunks of the last pass
        self._last_added_s = 0.0  # by those of the pass before

    # --- measurements -----------------------------------------------------------------------------

    def chunk(
        self, num_tokens: int, seconds: float, running: int, now_s: float, prompts: int = 1,
        goes_on: bool = False,
    ) -> None:  # fmt: skip
        """Note a pass that computed chunks.

        Args:
            num_tokens: of all chunks, at least 1.
            seconds: of the whole pass.
            running: requests that got a token in it, 0 if there was no batch.
            prompts: that the chunks are of, at least 1.
            goes_on: the pass is that of the last call, and this is all of it by now.
        """
        if now_s - self._computed_s > FRESH_S:
            self._costs.fade()
        self._tokens += num_tokens
        self._costs.add(running, prompts, num_tokens, seconds, goes_on)
        self._computed_s = now_s
        if running and self.config is not None:
            if not goes_on:
                self._last_added_s, self._added_s = self._added_s, 0.0
            # One slow pass may be a stall, and says nothing of the chunks to come: so what they
            # have to wait for grows as these do that are measured.
            allowed_s = self._share_s(self.config, running)
            most_s = max(_MOST_WITHOUT * allowed_s, _MORE * self._last_added_s)
            added_s = min(self._costs.seconds(0, 0, prompts, num_tokens), most_s)
            self._over_s = min(self._over_s + added_s - self._added_s, most_s)
            self._added_s = added_s

    def step(self, seconds: float, running: int = 1) -> None:
        """Note how long a step of `running` requests took that computed no chunk."""
        self._costs.add(running, 0, 0, seconds)

    def next_pass(self, running: int) -> None:
        """Note that a pass begins, with a step of `running` requests: it allows for more chunks."""
        if self.config is not None and self._over_s and running:
            allowed_s = self._share_s(self.config, running)
            self._over_s = max(self._over_s - allowed_s, -allowed_s) if allowed_s > 0 else 0.0

    def promised(
        self, address: str, key: RoomKey, now_s: float, tokens: int, loaded: int = 0,
        again: int = 0,
    ) -> None:  # fmt: skip
        """Note that a worker was promised a room: `tokens` that it sends, `loaded` ones that
        decode loads meanwhile, `again` that decode has computed, and prefill has not."""
        if not self._measures:
            return
        worker = self._workers.pop(address, None) or PrefillLoad()
        self._workers[address] = worker  # the one that was asked last is forgotten last
        worker.add(key, AwaitedRoom(now_s, tokens, loaded, again))
        if len(self._workers) > _MAX_WORKERS:
            del self._workers[next(iter(self._workers))]

    def arrived(self, address: str, key: RoomKey, num_tokens: int, now_s: float) -> None:
        """Note that the KV of a room has arrived."""
        worker = self._workers.get(address)
        if worker is None or (promise := worker.remove(key)) is None:
            return
        took_s = max(0.0, now_s - worker.began_s(promise))
        weight, by_line_s = self._line.add(num_tokens, promise.loaded, took_s, promise.again)
        worker.answered(weight, took_s, by_line_s, now_s)
        self._answered_s = now_s

    def gave_up(self, address: str, key: RoomKey) -> None:
        """Note that a room has failed, or was aborted: its time says nothing."""
        if (worker := self._workers.get(address)) is not None:
            worker.remove(key)

    @property
    def is_measured(self) -> bool:
        """True if enough was computed here to say what that costs."""
        return self._tokens >= _LEAST_TOKENS

    def chunk_s(self, num_tokens: int, prompts: int = 1) -> float:
        """Return the seconds that chunks of `num_tokens` add to a step; 0 if none was measured."""
        return self._costs.seconds(0, 0, prompts, num_tokens)

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
        if is_down and self.fails_over:
            return self.config.down_below
        return self.config.below

    def choose(
        self,
        missing: int,
        due: int,
        running: int,
        address: str,
        now_s: float,
        num_sent: int | None = None,
        again: int = 0,
        goes_on: bool = False,
    ) -> Source:
        """Choose the source of a request's missing tokens, by the module's rule.

        Args:
            missing: tokens that are neither here nor on their way.
            due: tokens that decode has to compute for other requests.
            running: requests that run, beside which the chunks are computed.
            num_sent: tokens that prefill would send; None: the missing ones. With extra state
                decode begins at a checkpoint, and computes again what is cached behind it.
            again: tokens of its prompt that decode has computed, and prefill has not.
        """
        lack = Lack(missing, again=again)
        sent = None if num_sent is None or num_sent == missing else Lack(num_sent, again=again)
        return self.choose_way([lack], due, running, address, now_s, sent, goes_on).source

    def choose_way(
        self,
        lacks: Sequence[Lack],
        due: int,
        running: int,
        address: str,
        now_s: float,
        sent_lack: Lack | None = None,
        goes_on: bool = False,
    ) -> Way:
        """Choose the way to get what a request lacks. Its `seconds` are 0 if not chosen by them.

        Args:
            lacks: at least one; the first lacks least, and is taken while nothing is measured.
            due, running, address, goes_on: as for `choose`.
            sent_lack: what prefill sends, where that is something else than is computed here.
        """
        self._note_request(now_s)
        way = self._choose_way(lacks, due, running, address, now_s, sent_lack)
        is_sent_on = goes_on and way.source is Source.PREFILL
        self._sent_on += (is_sent_on - self._sent_on) * (1 - _KEPT_REQUESTS)
        return way

    def _choose_way(
        self, lacks: Sequence[Lack], due: int, running: int, address: str, now_s: float,
        sent_lack: Lack | None,
    ) -> Way:  # fmt: skip
        config, first = self.config, lacks[0]
        here = Way(Source.HERE, 0.0, 0, loaded=first.loaded)
        sent = Way(Source.PREFILL, 0.0, first.missing, loaded=first.loaded)
        # 1. and 2.: by size alone.
        if config is None:
            return sent
        if first.missing <= self.least_tokens:
            return here
        # 3. One of the two ways is not known.
        worker = self._workers.get(address) or PrefillLoad()
        knows_prefill = self._line.num >= _LEAST_TRANSFERS
        if first.missing <= config.below and not (self.is_measured and knows_prefill):
            # One request at a time says what prefill takes, and little what it takes here.
            if self.is_measured and not worker.promises:
                return sent
            return here if due + first.missing <= min(_UNMEASURED, config.below) else sent
        if not knows_prefill:
            return sent
        # 4. Both are, or at least all that may be taken.
        by_prefill = lacks if sent_lack is None else [sent_lack]
        ways = [self._by_prefill(lack, worker, now_s) for lack in by_prefill]
        ways += [self._here(one, due, running) for one in lacks if one.missing <= config.below]
        way = fair(ways)
        # 5. The other one, to measure it again.
        others = [one for one in ways if one.source is not way.source]
        if others and self._is_old(way.source, worker, due + first.missing, now_s):
            other = fair(others)
            if other.cost_s - way.cost_s <= self._try_s:
                way, self._try_s = other, 0.0
        self._try_s += TRY_SHARE * way.seconds
        self._note_seconds(way.seconds)
        return way

    def _is_old(self, chosen: Source, worker: PrefillLoad, due: int, now_s: float) -> bool:
        """True if the source that was not chosen was not measured lately, and this request may
        measure it."""
        if chosen is Source.HERE:
            return not worker.promises and now_s - self._answered_s > FRESH_S
        # After few passes what was measured is old sooner.
        fresh_s = FRESH_S * min(1.0, self._costs.num_chunks / _LONG_SURE)
        return due <= _AGAIN and now_s - self._computed_s > fresh_s

    def worth_loading(self, sent: Lack, loaded: Lack, address: str, now_s: float) -> bool:
        """Return whether to load what host memory has (`loaded`), rather than have all sent
        (`sent`). Without own compute alone: with it both are about as good, and what is loaded
        makes prompts short enough to be computed here."""
        # Without own compute, and where the time of prefill workers is known.
        is_known = self.config is None and self._line.num >= _LEAST_TRANSFERS
        if not (loaded.load_s and is_known and now_s - self._answered_s <= FRESH_S):
            return True
        worker = self._workers.get(address) or PrefillLoad()
        ways = [self._by_prefill(lack, worker, now_s) for lack in (loaded, sent)]
        return fair(ways).loaded > 0

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
        tokens, steps = self._chunk_beside(self.config, running)
        return 0 if steps > 1.0 and self._over_s > 0.0 else tokens

    def _chunk_beside(self, config: ComputeConfig, running: int) -> tuple[int, float]:
        """Return the tokens of a chunk, and in how many steps there may be one: more than 1 where
        even the least chunk adds more to a step than `itl_share`."""
        costs, share_s = self._costs, self._share_s(config, running)
        tokens = min(costs.tokens_within(share_s), _MORE * costs.most_tokens)
        if tokens >= _LEAST_CHUNK:
            return int(min(config.chunk_tokens, tokens)), 1.0
        least = min(config.chunk_tokens, _LEAST_CHUNK)
        added_s = costs.seconds(0, 0, 1, least)
        return least, max(1.0, added_s / share_s) if share_s > 0 else 1.0

    def _share_s(self, config: ComputeConfig, running: int) -> float:
        return config.itl_share * self._costs.seconds(1, running, 0, 0)

    def further_prompt_tokens(self, running: int) -> int:
        """Return as many tokens as each prompt after the first counts for besides its own: the
        engine reads its KV too."""
        if self.config is None or not running:
            return 0
        return math.ceil(min(self.config.chunk_tokens, self._costs.prompt_tokens))

    def _here(self, lack: Lack, due: int, running: int) -> Way:
        backlog_s = self._compute_s(due, running)
        service_s = max(0.0, self._compute_s(due + lack.missing, running) - backlog_s)
        seconds = max(backlog_s, lack.load_s) + service_s
        waits_s = self._requests_per_s * service_s * (backlog_s + service_s)
        weight = 1.0 + OTHERS * waits_s / self._typical_s(seconds)
        again_s = self._line.per_again_s * (lack.again + lack.missing)
        return Way(Source.HERE, seconds, 0, weight, lack.loaded, self._sent_on * again_s)

    def _compute_s(self, num_tokens: int, running: int) -> float:
        """By passes with as many tokens as they may have, less the doubt of that: no less than the
        steps without."""
        if not num_tokens or self.config is None:
            return 0.0
        costs, steps = self._costs, 1.0
        chunk_tokens = longest = self.config.chunk_tokens
        if running:
            chunk_tokens, steps = self._chunk_beside(self.config, running)
            # Chunks are short where they seem dear; if that is wrong they become longer on the way.
            # But where even the least is too dear, that takes many steps.
            if steps == 1.0 and longest > chunk_tokens:
                perhaps = costs.perhaps_within(self._share_s(self.config, running), longest)
                chunk_tokens = max(chunk_tokens, perhaps)
        chunks = math.ceil(num_tokens / chunk_tokens)
        passes = chunks * steps
        all_s = costs.seconds(passes, passes * running, chunks, num_tokens)
        error_s = costs.error(passes, passes * running, chunks, num_tokens)
        steps_s = costs.seconds(passes, passes * running, 0, 0)
        sure_s = max(all_s - error_s, (1 - _MOST_DOUBT) * all_s)
        return max(steps_s, sure_s * min(1.0, costs.num_chunks / _SURE))

    def _by_prefill(self, lack: Lack, worker: PrefillLoad, now_s: float) -> Way:
        seconds = worker.backlog_s(self._line, now_s)
        line_s = self._line.at(1, lack.missing, lack.loaded, lack.again)
        seconds += worker.factor(now_s) * line_s
        return Way(Source.PREFILL, max(seconds, lack.load_s), lack.missing, loaded=lack.loaded)

    def _note_request(self, now_s: float) -> None:
        if self._request_s > -math.inf:
            self._requests = self._requests * _KEPT_REQUESTS + 1
            self._between_s = self._between_s * _KEPT_REQUESTS + now_s - self._request_s
        self._request_s = now_s

    @property
    def _requests_per_s(self) -> float:
        return self._requests / max(1e-3, self._between_s)

    def _note_seconds(self, seconds: float) -> None:
        log_s, kept = math.log(seconds + 1e-3), _KEPT_REQUESTS
        self._log_s = log_s if self._log_s is None else self._log_s * kept + log_s * (1 - kept)

    def _typical_s(self, seconds: float) -> float:
        """A mean in which a few long ones count little, at least `FAIR_S`. `seconds`: as long as
        there is none."""
        found_s = seconds if self._log_s is None else math.exp(self._log_s)
        return max(FAIR_S, found_s)
