"""The conformance kit passes an engine that is right, and names the law that each wrong one breaks.

The engine is the toy (`prefixkv.conformance.toy`); each faulty one differs from it in one method.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest

from prefixkv import KVPool, conformance
from prefixkv.config import ComputeConfig, HostConfig
from prefixkv.conformance.__main__ import main
from prefixkv.conformance.interface import LAWS, AnswerLog, Prompt
from prefixkv.conformance.toy import ToyDecode, ToyPrefill, ToySides, toy_answer
from prefixkv.errors import AbortedError, OutOfPagesError
from tests.support.patience import PATIENCE_S

LOCAL = {"backend": "shm", "patience_s": PATIENCE_S}
STALLS = {"backend": "shm", "patience_s": 5.0}


class ComputingSides(ToySides):
    """A toy whose decode worker computes what lacks at most 9 tokens."""

    ask: Any = "late"
    more: dict[str, Any] = {}

    def __init__(self, settings: Any) -> None:
        compute = ComputeConfig(below=9, chunk_tokens=5, ask=self.ask)
        decode = replace(settings.decode, compute=compute, **self.more)
        super().__init__(replace(settings, decode=decode))


class ComputingSidesThatTellBoth(ComputingSides):
    ask = "both"


class SidesWithBoth(ComputingSides):
    """With host memory, and it carries on alone, of its own accord in every scenario."""

    more = {"failure_policy": "local", "host_memory": HostConfig()}


class Kept:
    """Makes sides, and keeps those that it made last."""

    def __init__(self, make: type[ToySides], engine: type = ToyDecode) -> None:
        self._make, self._engine = make, engine
        self.made: Any = None

    def __call__(self, settings: Any) -> ToySides:
        kind = type("Sides", (self._make,), {"make_decode": self._engine})
        self.made = kind(settings)
        return self.made


@pytest.mark.slow
@pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
@pytest.mark.parametrize(
    ("make", "page_size"),
    [
        (ToySides, 4), (ComputingSides, 4), (ComputingSidesThatTellBoth, 4), (SidesWithBoth, 4),
        (ToySides, 16),  # for engines that have kernels for large pages only
    ],
)  # fmt: skip
def test_the_toy_keeps_every_law(
    make: type[ToySides], page_size: int, case: conformance.Case
) -> None:
    case.check(make, patience_s=PATIENCE_S, page_size=page_size)


TINY = "tiny decode pool"
HOST, ALONE = "host memory", "decode carries on alone"
SHOWN = [
    (ToySides, "turns of a chat", "skipped_tokens"), (ToySides, "full hit", "skipped_tokens"),
    (ToySides, TINY, "retracted"), (ToySides, "several tokens per step", "retracted"),
    (ToySides, HOST, "host_hit_tokens"), (ToySides, ALONE, "failovers"),
    (SidesWithBoth, HOST, "host_hit_tokens"), (SidesWithBoth, ALONE, "failovers"),
    *((make, name, "computed_requests") for make in (ComputingSides, ComputingSidesThatTellBoth)
      for name in ("turns of a chat", "full hit", TINY)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "counter"), SHOWN)
def test_it_keeps_the_laws_of_these_and_they_show_what_they_are_for(
    make: type[ToySides], name: str, counter: str
) -> None:
    kept = Kept(make)
    conformance.Case(name, 0).check(kept, **LOCAL)
    assert kept.made.decode.counters[counter] > 0


class ForgetsTheFirstOfAChunk(ToyDecode):
    def compute(self, req: Any) -> None:
        page = int(req.pages[req.prefix_len // self.model.page_size])
        super().compute(req)
        self.model.pool.v(0)[page] ^= 1


def test_a_wrong_chunk_is_found() -> None:
    kept = Kept(ComputingSides, ForgetsTheFirstOfAChunk)
    assert conformance.run(kept, only=["turns of a chat"], **LOCAL).laws == {"law 8"}


class LateDevice(ToyDecode):
    """Its device writes the KV of a chunk when the next forward is queued behind it."""

    says_when = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.queued: list[tuple[Any, Any, Any]] = []
        self.num_late = 0

    def compute(self, req: Any) -> None:
        self.run_device()
        pool, pages, node = self.model.pool, req.pages.tolist(), self.node
        before, start = pool.read_pages(pages), self.local[req]
        end = min(start + node.chunk_tokens, req.fill_len)
        if start == end:  # this step has to go without
            return
        token = self.model.forward(req.pages, req.tokens[:end], start)
        event = Late()
        self.queued.append((event, pages, pool.read_pages(pages)))
        pool.write_pages(pages, before)
        self.local[req] = end
        whole = end == req.fill_len
        if whole:
            del self.local[req]
        aux = token.to_bytes(4, "little") if whole and not req.resumed else b""
        node.computed(req, end, aux, after=event if self.says_when else None)

    def sample(self, req: Any) -> list[int]:
        self.run_device()
        return super().sample(req)

    def run_device(self) -> None:
        for event, pages, written in self.queued:
            self.num_late += 1
            self.model.pool.write_pages(pages, written)
            event.is_done = True
        self.queued.clear()


class Late:
    is_done = False

    def query(self) -> bool:
        return self.is_done


class LateDeviceThatSaysNothing(LateDevice):
    says_when = False


@pytest.mark.parametrize("name", ["host memory", "decode carries on alone", "turns of a chat"])
def test_a_device_that_is_still_busy_is_told_of_by_after(name: str) -> None:
    kept = Kept(SidesWithBoth, LateDevice)
    conformance.Case(name, 0).check(kept, **LOCAL)
    assert kept.made.d.num_late > 0
    silent = Kept(SidesWithBoth, LateDeviceThatSaysNothing)
    report = conformance.run(silent, only=[name], **LOCAL)
    assert "law 8" in report.laws
    assert "was not computed (computing begins at prefix_len" in str(report)


# --- engines with a fault -------------------------------------------------------------------------


class ForgetsFinish(ToyDecode):
    def finish(self, req: Any) -> None:
        self.batch.remove(req)
        self.answers.pop(req.rid).end()


class FinishesTwice(ToyDecode):
    def finish(self, req: Any) -> None:
        self.node.finish(req)
        super().finish(req)


class ForgetsAbort(ToyDecode):
    def abort(self, rid: str) -> None:
        pass


class EndsAnAbortedOneTwice(ToyDecode):
    def abort(self, rid: str) -> None:
        if rid in self.answers:
            self.answers[rid].end(AbortedError("gone"))
        super().abort(rid)


class WritesBeyondItsPages(ToyDecode):
    def sample(self, req: Any) -> list[int]:
        new = super().sample(req)
        behind = (int(req.pages[-1]) + 1) % self.model.pool.layout.num_pages
        self.model.pool.k(0)[behind] ^= 1
        return new


class DoesNotWriteTheNewestTokensKV(ToyDecode):
    def sample(self, req: Any) -> list[int]:
        return toy_answer(req.tokens.tolist(), 1) if req.output else super().sample(req)


class MakesTheStepAgain(ToyDecode):
    """Tokens come out the same, so that no answer shows it."""

    def append(self) -> None:
        tokens = {req: new[0] for req, new in self.sampled.items()}
        self.sampled = {}
        try:
            self.node.append_many([*tokens], [*tokens.values()])
        except OutOfPagesError as error:
            for rid in error.retract[:1]:
                self.retract(rid)
            return
        for req, token in tokens.items():
            if not req.state.ended:
                self.answers[req.rid].token(token)


class DropsSampledTokens(MakesTheStepAgain):
    """Its sampler goes on by itself, as one with a random generator does."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.says: dict[str, Iterator[int]] = {}

    def sample(self, req: Any) -> list[int]:
        new = super().sample(req)
        if req.rid not in self.says:
            left = req.max_new_tokens - len(req.output)
            self.says[req.rid] = iter([*new, *toy_answer([*req.tokens.tolist(), *new], left - 1)])
        return [next(self.says[req.rid], 0)]


class IgnoresRetraction(ToyDecode):
    def retract(self, rid: str) -> None:
        pass

    def append(self) -> None:
        try:
            self.node.append_many([*self.sampled], [new[0] for new in self.sampled.values()])
        except OutOfPagesError:
            return  # until somebody else makes room
        for req, new in self.sampled.items():
            self.answers[req.rid].token(new[0])
        self.sampled = {}


class NeverAsksAgain(ToyDecode):
    def ask_again(self) -> None:
        self.node.pop_needs_prefill()


def changed(request: Any, **changes: Any) -> Any:
    names = ("rid", "tokens", "max_new_tokens", "room", "prefill", "decode", "namespace",
             "cacheable", "generation", "deadline_s")  # fmt: skip
    return type(request)(**{name: getattr(request, name) for name in names} | changes)


class AsksAgainWithThePromptOnly(ToyDecode):
    def ask_again(self) -> None:
        before = len(self.asked)
        super().ask_again()
        again = self.asked[before:]
        self.asked[before:] = [self.asked_again(request) for request in again]

    def asked_again(self, request: Any) -> Any:
        prompt = self.answers[request.rid.partition(".")[0]].prompt
        return changed(request, tokens=prompt.tokens)


class AsksAgainWithoutADeadline(AsksAgainWithThePromptOnly):
    def asked_again(self, request: Any) -> Any:
        return changed(request, deadline_s=None)


class TellsPrefillToKeepIt(ToyDecode):
    def add(self, prompt: Prompt, answer: AnswerLog, prefill: str) -> None:
        super().add(prompt, answer, prefill)
        self.asked[-1] = changed(self.asked[-1], cacheable=True)


class NeverEndsAnAnswer(ToyDecode):
    def finish(self, req: Any) -> None:
        self.node.finish(req)
        self.batch.remove(req)


class HasAConfigOfItsOwn(ToyPrefill):
    def __init__(self, settings: Any) -> None:
        own = replace(settings.prefill, follow_s=0.5, reserved_pages=0)
        super().__init__(replace(settings, prefill=own))


class HasAnotherPool(ToyPrefill):
    def __init__(self, settings: Any) -> None:
        super().__init__(replace(settings, prefill_pages=settings.prefill_pages + 1))


class TakesAuxOfAResumedOne(ToyDecode):
    def step(self) -> bool:
        self.known = set(self.batch)
        return super().step()

    def sample(self, req: Any) -> list[int]:
        if req.resumed and req not in self.known:
            return [int.from_bytes(req.aux, "little")]
        return super().sample(req)


class ForgetsTheNamespace(ToyDecode):
    def add(self, prompt: Prompt, answer: AnswerLog, prefill: str) -> None:
        bare = Prompt(prompt.rid, prompt.tokens, prompt.max_new_tokens)
        super().add(bare, answer, prefill)


class AbortsWhatIsDone(ToyDecode):
    """Its answers are right, but nothing of them is ever cached."""

    def finish(self, req: Any) -> None:
        self.batch.remove(req)
        self.answers.pop(req.rid).end()
        self.answers[req.rid] = AnswerLog(Prompt(req.rid, [1], 1), [1], may_fail=True)
        self.node.abort(req.rid)


class IgnoresTheEndToken(ToyDecode):
    def is_done(self, req: Any) -> bool:
        return len(req.output) == req.max_new_tokens


class Raises(ToyDecode):
    def ask_again(self) -> None:
        super().ask_again()
        if self.batch:
            raise KeyError("something of its own")


class SendsBeforeItComputes(ToyPrefill):
    def compute(self, req: Any) -> None:
        start = self.computing[req]
        end = min(start + self.chunk_tokens, req.num_tokens)
        last = end == req.num_tokens
        (token,) = toy_answer(req.tokens.tolist(), 1)
        pages, tokens = req.pages.copy(), req.tokens[:end]
        self.node.send_chunk(req, end, last, token.to_bytes(4, "little") if last else b"")
        self.model.forward(pages, tokens, start)
        self.computing[req] = end
        if last:
            del self.computing[req]


class BeginsBehindDecodesPrefix(ToyPrefill):
    def begin(self, req: Any) -> None:
        self.computing[req] = min(req.decode_prefix_len, req.num_tokens - 1)


class WritesAgainWhatItHasSent(ToyPrefill):
    def compute(self, req: Any) -> None:
        if self.computing[req] > req.prefix_len:
            self.model.pool.v(0)[int(req.pages[req.prefix_len // self.model.page_size])] ^= 1
        super().compute(req)


class NeverPopsFailures(ToyPrefill):
    def forget_ended(self) -> None:
        for req in self.node.pop_sent():
            self.computing.pop(req, None)
        for req in [req for req in self.computing if req.state.ended]:
            del self.computing[req]


class StopsInTheMiddle(ToyPrefill):
    def compute(self, req: Any) -> None:
        if self.computing[req] < 16:
            super().compute(req)


class NeverComputes(ToyDecode):
    def compute(self, req: Any) -> None:
        pass


class NeverTakesPrompts(ToyDecode):
    def step(self) -> bool:
        pop, self.node.pop_local = self.node.pop_local, list  # type: ignore[method-assign]
        try:
            return super().step()
        finally:
            self.node.pop_local = pop  # type: ignore[method-assign]


class GivesUpWithPrefill(ToyDecode):
    """It ends what it had asked a prefill worker for that has gone."""

    def step(self) -> bool:
        busy = super().step()
        for req in self.local:
            if not req.state.ended:
                self.node.abort(req.rid)
        return busy


class SaysThatNoChatGoesOn(ToyDecode):
    def finish(self, req: Any) -> None:
        self.node.finish(req, continues=False)
        self.batch.remove(req)
        self.answers.pop(req.rid).end()


class WritesBehindAnEnd(ToyDecode):
    """It finishes a request whose last step is not done."""

    def finish(self, req: Any) -> None:
        page = int(req.pages[0])
        super().finish(req)
        self.model.pool.v(0)[page] ^= 1


def sides_of(engine: type) -> type[ToySides]:
    side = "make_decode" if issubclass(engine, ToyDecode) else "make_prefill"
    return type("Sides", (ToySides,), {side: engine})


@dataclass(frozen=True)
class Mutant:
    engine: type
    scenario: str
    law: str
    said: str
    stalls: bool = False

    def __str__(self) -> str:
        return self.engine.__name__

    @property
    def make(self) -> type[ToySides]:
        return sides_of(self.engine)


FINISHES_TWICE = Mutant(FinishesTwice, "one prompt", "calls", "decode's finish raised RequestError")
MUTANTS = [
    Mutant(ForgetsFinish, "one prompt", "law 2", "was never finished", True),
    FINISHES_TWICE,
    Mutant(ForgetsAbort, "aborts on decode", "law 7", "came after it was aborted"),
    Mutant(EndsAnAbortedOneTwice, "aborts on decode", "law 7", "it ended 2 times"),
    Mutant(WritesBeyondItsPages, "one prompt", "law 4", "wrote page"),
    Mutant(DoesNotWriteTheNewestTokensKV, "one prompt", "law 8", "was not written"),
    Mutant(DropsSampledTokens, TINY, "tokens", "when it found no page"),
    Mutant(MakesTheStepAgain, TINY, "tokens", "was made again: the token was not kept"),
    Mutant(IgnoresRetraction, TINY, "order", "was not retracted", True),
    Mutant(NeverAsksAgain, TINY, "order", "never asked for", True),
    Mutant(AsksAgainWithThePromptOnly, TINY, "order", "with another tokens"),
    Mutant(AsksAgainWithoutADeadline, TINY, "order", "no deadline_s, which its prompt has ("),
    Mutant(TellsPrefillToKeepIt, "not cacheable", "order", "prefill was given another cacheable"),
    Mutant(NeverEndsAnAnswer, "one prompt", "law 7", "engine never ended its answer", True),
    Mutant(HasAConfigOfItsOwn, "one prompt", "calls", "prefill's node has follow_s=0.5, the"),
    Mutant(HasAnotherPool, "one prompt", "calls", "prefill's pool has 65 pages besides"),
    Mutant(TakesAuxOfAResumedOne, TINY, "law 8", "the model says"),
    Mutant(ForgetsTheNamespace, "namespaces", "order", "decode was given another namespace"),
    Mutant(ForgetsTheNamespace, "namespaces", "cache", "first request of a namespace"),
    Mutant(AbortsWhatIsDone, "turns of a chat", "cache", "a later turn"),
    Mutant(IgnoresTheEndToken, "early finish", "law 7", "a token came after the last"),
    Mutant(Raises, "one prompt", "calls", "a loop raised KeyError"),
    Mutant(SendsBeforeItComputes, "one prompt", "law 8", "was not computed"),
    Mutant(SendsBeforeItComputes, "one prompt", "law 5", "after it was handed over"),
    Mutant(BeginsBehindDecodesPrefix, "turns of a chat", "law 8", "computing begins at prefix_len"),
    Mutant(WritesAgainWhatItHasSent, "one prompt", "law 5", "after it was handed over"),
    Mutant(NeverPopsFailures, "aborts on prefill", "calls", "never calls pop_failed", True),
    Mutant(StopsInTheMiddle, "one prompt", "law 7", "was handed out to be computed", True),
    Mutant(NeverComputes, ALONE, "law 7", "was handed out to be computed, 0 of its", True),
    Mutant(NeverTakesPrompts, ALONE, "calls", "decode's engine never calls pop_local", True),
    Mutant(GivesUpWithPrefill, ALONE, "law 7", "it failed: AbortedError"),
    Mutant(SaysThatNoChatGoesOn, "host memory", "cache", "nothing of what was finished was copied"),
    Mutant(WritesBehindAnEnd, "host memory", "law 8", "the model says"),
    Mutant(WritesBehindAnEnd, "host memory, all of it", "law 4", "which is cached"),
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=pytest.mark.slow if one.stalls else ()) for one in MUTANTS],
    ids=str,
)
def test_a_fault_is_found_and_named_by_its_law(mutant: Mutant) -> None:
    """By an engine that stalls only once its patience is over, so those are slow."""
    options = STALLS if mutant.stalls else LOCAL
    report = conformance.run(mutant.make, only=[mutant.scenario], **options)
    named = [found for found in report.findings if found.law == mutant.law]
    assert any(mutant.said in found.what for found in named), str(report)
    # It can be seen again by what the report says.
    assert f"only=['{mutant.scenario}'], seeds=[0]" in str(report)


@pytest.mark.parametrize("engine", [WritesBeyondItsPages, WritesAgainWhatItHasSent], ids=str)
def test_without_looking_at_bytes_only_calls_and_answers_count(engine: type) -> None:
    (mutant,) = (one for one in MUTANTS if one.engine is engine)
    report = conformance.run(mutant.make, only=[mutant.scenario], probe=False, **LOCAL)
    assert mutant.law not in report.laws


# --- the report -----------------------------------------------------------------------------------


def test_a_report_says_what_broke_and_how_to_see_it_again() -> None:
    make = FINISHES_TWICE.make
    report = conformance.run(make, only=["one prompt"], seeds=[4], **LOCAL)
    assert not report.ok
    assert report.laws <= set(LAWS)
    assert str(report).startswith("in 'one prompt', seed 4: calls (a node refuses no call")
    assert "again: run(make, only=['one prompt'], seeds=[4], backend='shm')" in str(report)
    assert "0 passed, 1 broken, 0 not run" in str(report)
    with pytest.raises(
        AssertionError, match="decode's finish raised RequestError: request 'r0' is finished"
    ):
        conformance.Case("one prompt", 4).check(make, **LOCAL)


def test_an_engine_need_not_do_everything() -> None:
    class Plain(ToySides):
        def __init__(self, settings: Any) -> None:
            if settings.tokens_per_step > 1:
                raise NotImplementedError("one token per step")
            super().__init__(settings)

    report = conformance.run(Plain, only=["several tokens per step", "one prompt"], **LOCAL)
    assert report.ok
    assert report.passed == ["one prompt, seed 0"]
    assert report.skipped == {"several tokens per step, seed 0": "one token per step"}
    assert "not run: several tokens per step, seed 0: one token per step" in str(report)


def test_an_engine_that_raises_at_its_end_is_found() -> None:
    class Sides(ToySides):
        def close(self) -> None:
            super().close()
            raise OSError("a socket")

    report = conformance.run(Sides, only=["one prompt"], **LOCAL)
    assert [found.what for found in report.findings] == ["close raised OSError: a socket"]


def test_the_command_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["prefixkv.conformance.toy:ToySides", "--only", "full hit", "--backend", "shm"]) == 0
    )
    assert capsys.readouterr().out.startswith("1 passed, 0 broken, 0 not run")
    assert main(["--list"]) == 0
    assert "full hit: Ask twice for a prompt of whole pages" in capsys.readouterr().out
    mutant = f"{__name__}:faulty"
    options = ["--only", "one prompt", "--seed", "2", "--backend", "shm"]
    assert main([mutant, *options]) == 1
    assert "seed 2: calls" in capsys.readouterr().out


class WithoutAnything:
    def __init__(self, settings: Any) -> None:
        pass


class HalfASide(WithoutAnything):
    decode = prefill = vocabulary = abort = None

    @property
    def step(self) -> Any:
        return MUTANTS.step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"{__name__}:Nothing"], f"MODULE:NAME is needed, '{__name__}:Nothing' is not: module"),
        ([f"{__name__}:TINY"], f"MODULE:NAME is needed, '{__name__}:TINY' is not callable"),
        ([__name__], f"MODULE:NAME is needed, {__name__!r} is not: module"),
        (["no_such_engine:Sides"], "MODULE:NAME is needed, 'no_such_engine:Sides' is not: No mod"),
        ([".sides:Sides"], "MODULE:NAME is needed, '.sides:Sides' is not: "),
        (["--only", "one promt"], "there is no scenario 'one promt', there are 'one prompt', 't"),
        (["--page-size", "3"], "page_size is 3, a multiple of 4 is needed"),
        (
            [f"{__name__}:WithoutAnything"],
            "WithoutAnything: decode is missing ('WithoutAnything' object has no attribute "
            "'decode'), a DecodeNode is needed; prefill is missing (",
        ),
        (
            [f"{__name__}:HalfASide"],
            "HalfASide: decode is None, a DecodeNode is needed; vocabulary is None, a range is "
            "needed; submit is missing ('HalfASide' object has no attribute 'submit'), a method is "
            "needed; abort is None, a method is needed; "
            "step is missing ('list' object has no attribute 'step'), a method is",
        ),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--backend", "shm"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith(f"python -m prefixkv.conformance: {said}")
    assert shown.err.count("\n") == 1


def test_an_engine_whose_pages_cannot_be_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[ToySides] = []

    class Sides(ToySides):
        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(KVPool, "read_pages", Mock(side_effect=RuntimeError("a device")))
    with pytest.raises(RuntimeError, match="a device"):
        conformance.run(Sides, only=["one prompt"], **LOCAL)
    assert len(closed) == 1


class LogsAndGoesOn(ToyDecode):
    def finish(self, req: Any) -> None:
        logging.getLogger("prefixkv.peers").warning("something of %s is lost", req.rid)
        super().finish(req)


class LogsAndFinishesTwice(FinishesTwice):
    finish = LogsAndGoesOn.finish

    def step(self) -> bool:
        done = [*self.batch]
        busy = super().step()
        for req in done:
            if req.state.ended:
                self.node.finish(req)
        return busy


def test_what_is_logged_is_shown_with_a_finding_only(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """In many scenarios something is lost on purpose."""
    report = conformance.run(sides_of(LogsAndGoesOn), only=["one prompt"], **LOCAL)
    assert report.ok
    assert not report.logs
    assert "is lost" not in str(report)
    report = conformance.run(sides_of(LogsAndFinishesTwice), only=["one prompt"], **LOCAL)
    assert not report.ok
    line = "WARNING prefixkv.peers: something of r0 is lost"
    assert report.logs == {"one prompt, seed 0": [line]}
    assert f"logged in one prompt, seed 0:\n    {line}\n" in str(report)
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
    # Afterwards it is as before.
    logging.getLogger("prefixkv.peers").warning("of somebody else")
    assert [record.message for record in caplog.records] == ["of somebody else"]


def faulty(settings: Any) -> ToySides:
    return FINISHES_TWICE.make(settings)
