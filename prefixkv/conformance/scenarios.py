"""The scenarios of the conformance kit: what happens to an engine, and on which workers.

Each ends with a drain, after which nothing may be left. Sizes are in tokens, and small: a page has
4 of them where nothing else is said. `ScenarioSettings.factor` makes all of them larger.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from prefixkv import ComputeConfig, DecodeConfig, HostConfig, PrefillConfig
from prefixkv.conformance.interface import BRIEF, AnswerLog, ScenarioSettings, Side
from prefixkv.conformance.scenario_run import ScenarioRun

Play = Callable[[ScenarioRun], object]

_DEADLINE_S: Final = 5.0  # of prompts that a worker which goes away may have alone
_FAR_S: Final = 3600.0  # of prompts whose deadline has to be passed on, and never comes


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    settings: ScenarioSettings
    play: Play


SCENARIOS: dict[str, Scenario] = {}


def _scenario(
    name: str, settings: ScenarioSettings | None = None, about: str = ""
) -> Callable[[Play], Play]:
    """Enter a function into SCENARIOS; without `about` its docstring says what it does."""

    def enter(play: Play) -> Play:
        text = " ".join((about or play.__doc__ or "").split())
        SCENARIOS[name] = Scenario(name, text, settings or ScenarioSettings(), play)
        return play

    return enter


# --- hits -----------------------------------------------------------------------------------------


def _ask(
    run: ScenarioRun, tokens: list[int], num: int, hit: int, what: str, most: int = 0,
    **options: Any,
) -> AnswerLog:  # fmt: skip
    """Ask alone, and tell if other than `hit` tokens, or `hit` to `most`, are hit on decode."""
    before, most = run.stats()["skipped_tokens"], max(hit, most)
    answer = run.ask(tokens, num, **options)
    run.finish()
    found = run.stats()["skipped_tokens"] - before
    if not hit <= found <= most:
        bounds = f"{hit}" if hit == most else f"{hit} to {most}"
        what = f"{answer.prompt.rid}, {what}"
        run.tell("cache", f"{what}: {found} tokens hit on decode, {bounds} are right")
    return answer


def _whole_hit(run: ScenarioRun, num_tokens: int) -> int:
    """Return how many tokens of a prompt that is cached whole are hit: where the engine computes
    prompts (`DecodeConfig.compute`) it leaves the last page of one without a rest."""
    size = run.settings.page_size
    leaves_last = run.sides.decode.config.compute is not None and num_tokens % size == 0
    return num_tokens // size * size - size * leaves_last


@_scenario("one prompt")
def one_prompt(run: ScenarioRun) -> None:
    """Answer one prompt with several chunks, then one with a single token of prompt and answer."""
    run.ask(run.prompt(30), 7)
    run.finish()
    run.ask(run.prompt(1), 1)


@_scenario("turns of a chat")
def turns(run: ScenarioRun) -> None:
    """Let each of four turns begin with the turn before and its answer: what was finished hits."""
    size = run.settings.page_size
    tokens, has_kv = run.prompt(13), 0
    for _ in range(4):
        answer = _ask(run, tokens, 6, has_kv // size * size, "a later turn")
        # The token sampled last has no KV.
        has_kv = len(tokens) + len(answer.tokens) - 1
        tokens = [*tokens, *answer.tokens, *run.prompt(5)]


@_scenario("partial hit")
def partial_hit(run: ScenarioRun) -> None:
    """Ask for two prompts that part in the middle of a page."""
    first, size = run.prompt(22), run.settings.page_size
    _ask(run, first, 4, 0, "a first prompt")
    common = 14 * run.factor
    tokens, hit = [*first[:common], *run.prompt(9)], common // size * size
    _ask(run, tokens, 4, hit, f"a common prefix of {common}", hit + size)


@_scenario("full hit")
def full_hit(run: ScenarioRun) -> None:
    """Ask twice for a prompt of whole pages: no KV is sent, the first token still comes."""
    tokens = run.prompt(16)
    _ask(run, tokens, 5, 0, "a first prompt")
    _ask(run, tokens, 5, _whole_hit(run, len(tokens)), "a prompt that is cached whole")


@_scenario("shared prefix in flight")
def shared_in_flight(run: ScenarioRun) -> None:
    """Ask at once for prompts that begin alike, and for some of them twice."""
    prefix = run.prompt(33)
    for i in range(4):
        tokens = [*prefix[: (33 - 4 * i) * run.factor], *run.prompt(3 + i)]
        run.ask(tokens, 4)
        run.ask(tokens if i % 2 else [*prefix, *run.prompt(2)], 3 + i)
        run.steps(i)


_NAMESPACES: Final[tuple[Hashable, ...]] = (None, "a", ("b", 1))


@_scenario("namespaces")
def namespaces(run: ScenarioRun) -> None:
    """Ask for one prompt in three namespaces, and again in one of them: no other's KV is hit."""
    tokens = run.prompt(16)
    for namespace in _NAMESPACES:
        _ask(run, tokens, 4, 0, "the first request of a namespace", namespace=namespace)
    hit = _whole_hit(run, len(tokens))
    _ask(run, tokens, 4, hit, "the second request of a namespace", namespace="a")


@_scenario("not cacheable")
def not_cacheable(run: ScenarioRun) -> None:
    """Ask for prompts that may be neither matched nor kept."""
    tokens = run.prompt(16)
    for _ in range(2):
        _ask(run, tokens, 4, 0, "a prompt that is not cacheable", cacheable=False)
    if run.stats()["pages_cached"]:
        run.tell("cache", f"{run.stats()['pages_cached']} pages of them are cached on decode")


# --- small pools, and all of it -------------------------------------------------------------------


def _many(run: ScenarioRun, num: int, *, cacheable: bool = True) -> list[AnswerLog]:
    """Ask for prompts of up to 16 tokens at once, some with a common beginning, most in a
    namespace, some with a deadline that is far away."""
    common = run.prompt(10)
    answers = []
    for i in range(num):
        shared = int(run.random.integers(0, 11)) if i % 3 == 0 else 0
        tokens = [*common[: shared * run.factor], *run.prompt(int(run.random.integers(1, 7)))]
        # Of those with the common beginning two in a row are in one namespace.
        namespace = _NAMESPACES[i // 6 % 3 if i % 3 == 0 else i % 3]
        answers.append(run.ask(
            tokens, int(run.random.integers(12, 25)), namespace=namespace, cacheable=cacheable,
            deadline_s=None if i % 4 else _FAR_S,
        ))  # fmt: skip
    return answers


def _mixed(run: ScenarioRun, num: int, *, aborts: bool = True) -> None:
    """Ask over time: new prompts, later turns, repeated ones, in three namespaces; abort some."""
    for i in range(num):
        namespace = _NAMESPACES[i % 3]
        done = [one for one in run.answers if one.ended and one.error is None]
        kind = run.random.random()
        if done and kind < 0.5:
            one = done[int(run.random.integers(len(done)))]
            before, namespace = [*one.prompt.tokens, *one.tokens], one.prompt.namespace
            tokens = before[: 24 * run.factor] + run.prompt(int(run.random.integers(1, 6)))
        else:
            tokens = run.prompt(int(run.random.integers(1, 25)))
        early = int(run.random.integers(0, 6)) if run.random.random() < 0.3 else None
        answer = run.ask(tokens, int(run.random.integers(6, 14)), end_at=early, namespace=namespace)
        run.steps(int(run.random.integers(0, 8)))
        if aborts and run.random.random() < 0.2:
            run.abort(answer, "decode" if run.random.random() < 0.7 else "prefill")


_TINY = ScenarioSettings(decode_pages=14, prefill_pages=24, chunk_tokens=5)
_SINGLE = ScenarioSettings(
    page_size=1, prefill_page_size=1, decode_pages=48, prefill_pages=60, chunk_tokens=7
)
_UNEQUAL = ScenarioSettings(
    page_size=2, prefill_page_size=8, decode_pages=40, prefill_pages=14, chunk_tokens=7
)
_HOST = ScenarioSettings(
    decode_pages=14, decode=DecodeConfig(reserve_tokens=0, host_memory=HostConfig(num_pages=96))
)

for _name, _settings, _play, _about in (
    ("tiny decode pool", _TINY, lambda run: _many(run, 9),
     "Answer nine prompts where decode has pages for two: it runs out, and retracts."),
    ("tiny pools, page by page", _SINGLE, lambda run: _many(run, 8),
     "The same with pages of one token: every token takes one, a retraction loses none."),
    ("tiny pools, not cacheable", _TINY, lambda run: _many(run, 6, cacheable=False),
     "Retract requests that may not be kept: all of their KV is asked for again."),
    ("larger pages on prefill", ScenarioSettings(prefill_page_size=8, prefill_pages=32),
     lambda run: _mixed(run, 10, aborts=False),
     "Send from pages of 8 tokens to pages of 4, with hits on either side."),
    ("larger pages on decode", ScenarioSettings(page_size=8, decode_pages=24),
     lambda run: _mixed(run, 10, aborts=False),
     "Send from pages of 4 tokens to pages of 8, with hits on either side."),
    ("host memory, all of it", _HOST, lambda run: _mixed(run, 40),
     "Mix new prompts, later turns, early ends and aborts in a pool that is too small, beside "
     "copies to and from host memory."),
    ("all of it", ScenarioSettings(decode_pages=20, prefill_pages=28, chunk_tokens=6),
     lambda run: _mixed(run, 40),
     "Mix new prompts, later turns, early ends and aborts on workers that are too small."),
    ("all of it, unequal pages", _UNEQUAL, lambda run: _mixed(run, 40),
     "Mix the same with pages of 2 tokens on decode, and of 8 on prefill."),
):  # fmt: skip
    _scenario(_name, _settings, _about)(_play)


@_scenario("tiny prefill pool", ScenarioSettings(prefill_pages=9, chunk_tokens=5))
def tiny_prefill(run: ScenarioRun) -> None:
    """Compute eight prompts where prefill has pages for little more than one."""
    for _ in range(8):
        run.ask(run.prompt(int(run.random.integers(20, 34))), 3)


@_scenario("several tokens per step", ScenarioSettings(tokens_per_step=4, decode_pages=14))
def several_tokens(run: ScenarioRun) -> None:
    """Let steps give up to four tokens, in a pool that is too small, with ends in their middle."""
    for i in range(10):
        run.ask(run.prompt(int(run.random.integers(1, 12))), 22, end_at=5 if i % 3 == 0 else None)


@_scenario("host memory", _HOST)
def host_memory(run: ScenarioRun) -> None:
    """Let three chats take turns in a pool that holds one: each comes back from host memory."""
    chats = [run.prompt(21) for _ in range(3)]
    for _ in range(3):
        for i, tokens in enumerate(chats):
            answer = run.ask(tokens, 6)
            run.finish()
            # What is copied behind an end is to be there for the next turn.
            run.until(lambda: not run.stats()["host_copies"], "law 2")
            chats[i] = [*tokens, *answer.tokens, *run.prompt(2)]
    stats = run.stats()
    for name, what in (
        ("host_written_pages", "nothing of what was finished was copied to host memory"),
        ("host_hit_tokens", "no later turn has found anything in host memory"),
    ):
        if not stats[name]:
            run.tell("cache", f"{what}: {name} is 0")


# --- ends -----------------------------------------------------------------------------------------


@_scenario("early finish")
def early_finish(run: ScenarioRun) -> None:
    """End answers by a token before their length: at the first one, and at any other."""
    for at in (0, 1, 4, 7, int(run.random.integers(2, 10))):
        run.ask(run.prompt(int(run.random.integers(1, 20))), 12, end_at=at)
        run.steps(2)
    run.finish()
    # The pages that the rest of the answer would have taken are free.
    run.ask(run.prompt(30), 20)


@_scenario("aborts on decode")
def aborts_on_decode(run: ScenarioRun) -> None:
    """Abort requests after any number of passes, from before the first to after the last."""
    common = run.prompt(9)
    for passes in range(18):
        gone = run.ask([*common, *run.prompt(14)], 6)
        stays = run.ask([*common, *run.prompt(5)], 4)
        run.steps(passes)
        run.abort(gone)
        if passes % 3 == 0:
            run.finish(gone, stays)
        if passes % 5 == 0:
            run.abort(gone)  # once more: it has ended, or is about to


@_scenario("aborts on prefill", ScenarioSettings(chunk_tokens=3))
def aborts_on_prefill(run: ScenarioRun) -> None:
    """Abort requests at prefill while it computes and sends them."""
    for passes in range(12):
        gone = run.ask(run.prompt(16), 4)
        stays = run.ask(run.prompt(7), 3)
        run.steps(passes)
        run.abort(gone, "prefill")
        run.finish(gone, stays)


@_scenario("aborts in tiny pools", _TINY)
def aborts_in_tiny_pools(run: ScenarioRun) -> None:
    """Abort every other request while pages are short and others are retracted."""
    answers = _many(run, 10)
    for answer in answers[::2]:
        run.steps(int(run.random.integers(0, 20)))
        run.abort(answer)


# --- workers that go away -------------------------------------------------------------------------

_GOING = ScenarioSettings(
    decode=DecodeConfig(reserve_tokens=0, control=BRIEF, waiting_timeout_s=20.0),
    prefill=PrefillConfig(control=BRIEF), chunk_tokens=3,
)  # fmt: skip


def _restart(run: ScenarioRun, side: Side) -> None:
    for passes in (1, 4, 9):
        for _ in range(3):
            run.ask(run.prompt(15), 8, deadline_s=_DEADLINE_S)
        run.steps(passes)
        run.restart(side)
        run.finish()
        run.ask(run.prompt(12), 5)
        run.finish()


_scenario("prefill restarts", _GOING, (
    "End prefill while requests wait, are computed and run; the next ones are answered."
))(lambda run: _restart(run, "prefill"))  # fmt: skip
_scenario("decode restarts", _GOING, (
    "End decode while requests wait, are computed and run: prefill is rid of them, and the next "
    "ones are answered."
))(lambda run: _restart(run, "decode"))  # fmt: skip


_LOCAL = ScenarioSettings(
    decode=DecodeConfig(
        reserve_tokens=0, control=BRIEF, compute=ComputeConfig(below=0, chunk_tokens=5),
        failure_policy="local",
    ),
    prefill=PrefillConfig(control=BRIEF), chunk_tokens=3,
)  # fmt: skip


@_scenario("decode carries on alone", _LOCAL)
def carries_on(run: ScenarioRun) -> None:
    """End prefill while requests wait, are computed, sent and run: decode computes what is missing,
    and no answer fails."""
    common = run.prompt(10)
    for passes in (1, 4, 9):
        run.ask([*common, *run.prompt(14)], 8)
        run.ask(run.prompt(15), 8)
        run.ask([*common, *run.prompt(3)], 5, end_at=2)
        run.steps(passes)
        run.restart("prefill", may_fail=False)
        run.finish()
