"""One run of one scenario: prompts go to an engine, its passes are made, laws are checked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Final

import numpy as np

from prefixkv import DecodeConfig, PrefillConfig
from prefixkv.conformance.interface import (
    AnswerLog,
    EngineSides,
    Finding,
    Prompt,
    ScenarioSettings,
    Side,
    check_sides,
)
from prefixkv.conformance.witness import DecodeWitness, Notes, PrefillWitness
from prefixkv.errors import InternalError

MakeSides = Callable[[ScenarioSettings], EngineSides]

_PAUSE_S: Final = 0.0005  # after a pass that had nothing to do
_LEAST_PASSES: Final = 50  # without progress, before an engine counts as stalled
# Fields of a node's config.
_ENGINES_OWN: Final = (
    "model", "reserved_pages", "compute", "host_memory", "failure_policy", "checkpoints",
    "checkpoint_tokens",
)  # fmt: skip
_LIVELOCK: Final = 10  # times the patience, for passes that do something and bring no token


class ScenarioOverError(Exception):
    """The engine cannot go on in this scenario: it stalled, or it raised."""


class ScenarioRun:
    """An engine in one scenario, from its start to its rest. Owned by one thread.

    Args:
        name, seed: of the scenario; every choice of `random` follows from them.
        patience_s: how long nothing at all may happen before the engine counts as stalled.
        probe: read and write bytes of pages, see `witness`.
    """

    def __init__(
        self, name: str, seed: int, settings: ScenarioSettings, make: MakeSides,
        patience_s: float, probe: bool,
    ) -> None:  # fmt: skip
        self.name, self.seed, self.settings = name, seed, settings
        self.factor = settings.factor
        self.random = np.random.default_rng([zlib.crc32(name.encode()), seed])
        self.findings: list[Finding] = []
        self.answers: list[AnswerLog] = []
        self._patience_s = patience_s
        self._notes = Notes(self.tell, self.random, probe, settings.tokens_per_step == 1)
        self._decode: DecodeWitness
        self._witnesses: dict[Side, DecodeWitness | PrefillWitness] = {}
        self.sides = make(settings)
        try:
            check_sides(self.sides)
            self._meet()
        except BaseException:
            with suppress(Exception):  # the error that says what is wrong matters
                self.sides.close()
            raise

    def _meet(self) -> None:
        """Put a witness around each node of this process that has none, and look at what was made
        of the settings."""
        sides, settings, met = self.sides, self.settings, [*self._witnesses.values()]
        if all(one.node is not sides.decode for one in met):
            self._witnesses["decode"] = self._decode = DecodeWitness(sides.decode, self._notes)
            self._check_node(self._decode, settings.decode, settings.decode_pages)
        if sides.prefill is not None and all(one.node is not sides.prefill for one in met):
            prefill = self._witnesses["prefill"] = PrefillWitness(sides.prefill, self._notes)
            self._check_node(prefill, settings.prefill, settings.prefill_pages)

    def _check_node(
        self, witness: DecodeWitness | PrefillWitness, wanted: DecodeConfig | PrefillConfig,
        pages: int,
    ) -> None:  # fmt: skip
        side, node = witness.side, witness.node
        # A node that is not what the settings say would show something else.
        for field in fields(wanted):
            got, given = getattr(node.config, field.name), getattr(wanted, field.name)
            if field.name not in _ENGINES_OWN and got != given:
                self.tell("calls", f"{side}'s node has {field.name}={got!r}, the settings say "
                          f"{given!r}; an engine may set {', '.join(_ENGINES_OWN)}")  # fmt: skip
        has = node.pool.layout.num_pages - node.config.reserved_pages
        if has != pages:
            self.tell("calls", f"{side}'s pool has {has} pages besides the reserved, the settings "
                      f"say {pages}")  # fmt: skip

    # --- what a scenario does ---------------------------------------------------------------------

    def prompt(self, num_tokens: int) -> list[int]:
        """Return `num_tokens` times `factor` tokens by chance, out of the engine's vocabulary."""
        words = self.sides.vocabulary
        num = num_tokens * self.factor
        found: list[int] = self.random.integers(words.start, words.stop, num).tolist()
        return found

    def ask(
        self, tokens: Sequence[int], max_new_tokens: int, *, end_at: int | None = None,
        namespace: Hashable = None, cacheable: bool = True, deadline_s: float | None = None,
    ) -> AnswerLog:  # fmt: skip
        """Submit a prompt. `end_at`: the position of a token of the answer that is to end it.
        `factor` multiplies both lengths of the answer."""
        max_new_tokens *= self.factor
        expected = self.sides.expected(tokens, max_new_tokens)
        end_token = None
        if end_at is not None:
            end_token = expected[end_at * self.factor]
            expected = expected[: expected.index(end_token) + 1]
        rid = f"r{len(self.answers)}"
        prompt = Prompt(
            rid, list(tokens), max_new_tokens, end_token, namespace, cacheable, deadline_s
        )
        answer = AnswerLog(prompt, expected)
        self.answers.append(answer)
        self._guarded(lambda: self.sides.submit(prompt, answer))
        return answer

    def abort(self, answer: AnswerLog, side: Side = "decode") -> None:
        """Abort a prompt on one side, wherever it is."""
        answer.may_fail = True
        if side == "decode" and not answer.ended:
            answer.aborted_at = len(answer.tokens)
        self._guarded(lambda: self.sides.abort(answer.prompt.rid, side))

    def restart(self, side: Side, may_fail: bool = True) -> None:
        """End one worker at once, and start it again. `may_fail`: answers may end with an error."""
        for answer in self.answers:
            if not answer.ended:
                answer.may_fail |= may_fail
                answer.lost |= side == "decode"
        self._guarded(lambda: self.sides.restart(side))
        # What was to be asked again was the former life's.
        self._notes.asks.clear()
        self._notes.added.clear()
        self._meet()

    def step(self) -> bool:
        """Make one pass of the engine's loops, and look at what they did."""
        busy = bool(self._guarded(self.sides.step))
        self._look("the end of a pass")
        return busy

    def steps(self, num: int) -> None:
        for _ in range(num):
            if not self.step():
                time.sleep(_PAUSE_S)

    def finish(self, *answers: AnswerLog) -> None:
        """Make passes until these answers have ended; all of them by default."""
        waited = answers or tuple(self.answers)
        self.until(lambda: all(one.ended or one.lost for one in waited), "law 7")

    def stats(self, side: Side = "decode") -> dict[str, int]:
        """Return a node's counters; none of a node in another process."""
        return witness.node.stats() if (witness := self._witnesses.get(side)) else {}

    # --- passes -----------------------------------------------------------------------------------

    def until(self, done: Callable[[], bool], law: str) -> None:
        """Make passes until `done`. Raises ScenarioOverError if nothing happens any more: `law`."""
        last: object = None
        since_s = answered_s = time.monotonic()
        passes, tokens = 0, -1
        while not done():
            busy = self.step()
            now_s = time.monotonic()
            said = sum(len(one.tokens) + one.num_ends for one in self.answers)
            if said != tokens:
                tokens, answered_s = said, now_s
            progress = self._progress()
            if progress != last:
                last, since_s, passes = progress, now_s, 0
            passes += 1
            idle = now_s - since_s > self._patience_s and passes > _LEAST_PASSES
            if idle or now_s - answered_s > _LIVELOCK * self._patience_s:
                self._stalled(law)
            if not busy:
                time.sleep(_PAUSE_S)

    def _progress(self) -> object:
        said = tuple(len(one.tokens) + one.num_ends for one in self.answers)
        names = ("requests", "transferred", "pages_free", "pages_held", "admitted", "finished",
                 "sent", "bytes_sent", "failed")  # fmt: skip
        stats = [self.stats("decode"), self.stats("prefill")]
        rooms = self.sides.decode.num_rooms
        return said, rooms, [one.get(name) for one in stats for name in names]

    def _stalled(self, law: str) -> None:
        why = [found for one in self._witnesses.values() for found in one.explain()]
        # Everything is one way or another a consequence of what comes first.
        for found in why[:4]:
            self.tell(*found)
        if not why:
            self._tell_open(law)
        raise ScenarioOverError

    def _tell_open(self, law: str) -> None:
        """Tell of the answers that are open while no request of the nodes waits."""
        waiting = [one.prompt.rid for one in self.answers if not (one.ended or one.lost)]
        decode, prefill = self._left("decode"), self._left("prefill")
        if not waiting or decode or prefill:
            open_ones = ", ".join(waiting) or "rooms"
            sides = f"decode still has {decode}, prefill {prefill}"
            self.tell(law, f"nothing happens any more; open: {open_ones}; {sides}")
            return
        for rid in waiting:
            request = self._decode.requests.get(rid)
            what = "it was never added on decode, and its answer never ended"
            if request is not None:
                what = (f"the nodes are done with it ({request.state.value} on decode), and the "
                        "engine never ended its answer")  # fmt: skip
            self.tell(law, f"{rid}: {what}")

    def _left(self, side: Side) -> dict[str, int]:
        names = ("requests", "rooms", "locks", "protected_pages", "pages_owned", "pages_held",
                 "pages_quarantined", "slots_held")  # fmt: skip
        stats = self.stats(side)
        return {name: stats[name] for name in names if stats.get(name)}

    def _guarded(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except (NotImplementedError, ScenarioOverError):
            raise
        except Exception as error:
            if not any(error is one.blamed for one in self._witnesses.values()):
                self.tell("calls", f"a loop raised {type(error).__name__}: {error}")
            raise ScenarioOverError from error

    def _look(self, when: str) -> None:
        """Let the witnesses look, and take over what the clients have seen."""
        for witness in self._witnesses.values():
            witness.look(when)
        self._check_given()
        for answer in self.answers:
            for law, what in answer.faults:
                self.tell(law, what)
            answer.faults.clear()

    def _check_given(self) -> None:
        """Tell if a request on a node is not as its prompt is."""
        prompts = {one.prompt.rid: one.prompt for one in self.answers}
        rooms, added = self._decode.rooms, [*self._notes.added]
        # Decode alone knows whose a room is, and may get the request after prefill.
        self._notes.added[:] = [one for one in added if one[1].room not in rooms]
        for side, request in added:
            prompt = prompts.get(rooms.get(request.room, ""))
            if prompt is None:  # the engine has names of its own
                continue
            wrong = []
            # What prefill is asked for again is compared with the ask.
            if not request.generation:
                if request.key.namespace != prompt.namespace:
                    wrong.append("another namespace than")
                if request.cacheable != prompt.cacheable:
                    wrong.append("another cacheable than")
            if prompt.deadline_s is not None and request.deadline_s is None:
                wrong.append("no deadline_s, which")
            again = f" (generation {request.generation})" if request.generation else ""
            for what in wrong:
                self.tell("order", f"{prompt.rid}: {side} was given {what} its prompt has{again}")

    def tell(self, law: str, what: str) -> None:
        """Note a broken law, once for each text."""
        finding = Finding(law, self.name, self.seed, what)
        if finding not in self.findings:
            self.findings.append(finding)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            self.sides.close()
        except Exception as error:
            self.tell("calls", f"close raised {type(error).__name__}: {error}")

    def rest(self) -> None:
        """Drain both nodes, and check what has to hold then."""
        self.finish()
        nodes = {side: witness.node for side, witness in self._witnesses.items()}
        self.until(lambda: sum(node.drain() for node in nodes.values()) == len(nodes), "law 2")
        for side, node in nodes.items():
            try:
                node.audit()
            except InternalError as error:
                self.tell("law 1", f"{side}: {error}")
            if left := self._left(side):
                self.tell("law 2", f"{side} is at rest, and still has {left}")
        # What a step had sampled already may still come.
        most = 2 * self.settings.tokens_per_step
        for answer in self.answers:
            at = answer.aborted_at
            if at is not None and len(answer.tokens) - at > most:
                self.tell("law 7", f"{answer.prompt.rid}: {len(answer.tokens) - at} tokens came "
                          "after it was aborted on decode")  # fmt: skip
