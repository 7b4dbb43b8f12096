"""Chats with a model: what is said, when it is sent, and what a pass has to answer for. The workers
here are stand-ins; `tests/integration/serving/test_chats.py` has real ones."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest
from rich.console import Console

from prefixkv.cli.chats.command import as_json, compare
from prefixkv.cli.chats.play import Played, Vocabulary, play
from prefixkv.cli.chats.rates import LinkRate, link_of
from prefixkv.cli.chats.report import ChatsReport, links_table
from prefixkv.cli.chats.workers import ChatAnswer, ModelWorkerError
from prefixkv.cli.chats.workload import Run, Turn, Workload, chat
from prefixkv.errors import ConfigError

WORDS = Vocabulary(10, 20, system=1, user=2, assistant=3, stop=4)


class Workers:
    """Answers with the prompt's length and its count, after some turns of the event loop."""

    def __init__(self, fails_at=None):
        self.asked, self.fails_at, self.open = [], fails_at, 0

    async def ask(self, decode, rid, prompt, num, salt, ignore_end):
        self.asked.append((decode, rid, tuple(prompt), num, salt, ignore_end))
        self.open += 1
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if rid == self.fails_at:
                raise ModelWorkerError(f"request {rid}: lost")
            if self.fails_at:
                await asyncio.sleep(1000)
        finally:
            self.open -= 1
        return ChatAnswer(list(prompt), num, [len(prompt)] * num)


def test_a_prompt_is_all_that_was_said():
    system, users = Run(1, 5), (Run(2, 3), Run(3, 4))
    turns = Turn((system, users[0]), 2), Turn((users[1],), 3)

    def words(run):
        return [token % 10 + 10 for token in run.tokens().tolist()]

    workers = Workers()
    played = asyncio.run(play(workers, "d", Workload((turns,)), WORDS, "s", ignore_end=True))
    first = [1, *words(system), 4, 2, *words(users[0]), 4, 3]
    second = [*first, 13, 13, 2, *words(users[1]), 4, 3]
    assert workers.asked == [
        ("d", "s.0.0", tuple(first), 2, "s", True),
        ("d", "s.0.1", tuple(second), 3, "s", True),
    ]
    assert [answer.tokens for answer in played.all()] == [[13, 13], [22, 22, 22]]


def test_conversations_run_side_by_side_and_wait_for_their_time():
    sizes = {"system_tokens": 4, "user_tokens": 4, "output_tokens": 2}
    workload = chat(1, 2, 2, **sizes)
    workers = Workers()
    asyncio.run(play(workers, "d", workload, WORDS, "s"))
    assert [rid for _, rid, *_ in workers.asked] == ["s.0.0", "s.1.0", "s.0.1", "s.1.1"]
    workers = Workers()
    due = [np.array([0.02, 0.03]), np.array([0.0, 0.0])]
    played = asyncio.run(play(workers, "d", workload, WORDS, "s", due))
    rids = [rid for _, rid, *_ in workers.asked]
    assert rids[0] == "s.1.0"
    assert [*filter(lambda rid: rid.startswith("s.0"), rids)] == ["s.0.0", "s.0.1"]
    assert played.duration_s >= 0.03


def test_one_that_fails_ends_the_others_and_says_why():
    sizes = {"system_tokens": 4, "user_tokens": 4, "output_tokens": 2}
    workers = Workers(fails_at="s.1.0")
    with pytest.raises(ModelWorkerError, match=r"request s\.1\.0: lost"):
        asyncio.run(play(workers, "d", chat(1, 3, 2, **sizes), WORDS, "s"))
    assert len(workers.asked) == 3
    assert workers.open == 0


def answer(prompt, tokens, hit, prefill_hit, ttft_s, shared=0):
    return ChatAnswer(list(range(prompt)), 4, tokens, hit, prefill_hit, shared, ttft_s, [0.01])


def both():
    on = Played(
        ((answer(100, [5], 0, 64, 0.1, shared=64),), (answer(120, [6, 7], 96, 80, 0.2),)), 2.0
    )
    off = Played(((answer(100, [5], 0, 64, 0.3),), (answer(120, [6, 8], 0, 80, 0.4),)), 4.0)
    return ChatsReport({"seed": 1}, {True: on, False: off}, {True: 1000, False: 4000})


class Reference:
    """Says the last of both passes' answers."""

    def __init__(self):
        self.asked = []

    def answer(self, prompt, num):
        self.asked.append((len(prompt), num))
        return {100: [5], 120: [6, 7]}[len(prompt)]


def test_every_answer_is_compared_and_each_prompt_asked_once():
    report, reference = both(), Reference()
    compare([report], reference)
    assert reference.asked == [(100, 4), (120, 4)]
    assert report.wrong == {True: 0, False: 1}
    assert report.complaints() == [
        "chats, this machine, cache_off: 1 answers are not what generate() says"
    ]
    report.left.append("chats, cache on: 2 pages left held on prefill")
    assert len(report.complaints()) == 2
    # Answers of later passes count too.
    report.again = {True: [Played(((answer(100, [6], 0, 64, 0.1),),), 1.0)]}
    compare([report], reference)
    assert report.wrong == {True: 1, False: 1}


def test_figures_and_the_last_conversation_are_those_of_the_answers():
    report = both()
    report.wrong = {True: 0, False: 0}
    found = json.loads(json.dumps(report.as_json()))
    on, off = found["runs"]["cache_on"], found["runs"]["cache_off"]
    assert (on["requests"], on["prompt_tokens"], on["answer_tokens"]) == (2, 220, 3)
    assert (on["hit_tokens"], on["computed_tokens"], on["sent_tokens"]) == (96, 76, 60)
    assert on["token_hit_rate"] == 96 / 220
    assert on["ttft_s"]["p50"] == pytest.approx(0.15)
    assert off["sent_tokens"] == 220
    assert found["ratios"] == pytest.approx({"ttft_p50": 0.35 / 0.15, "bytes_sent": 4.0})
    assert found["last_conversation"] == [
        {"prompt": [0, 120], "hit_on_decode": [0, 96], "on_the_way": [96, 96],
         "sent": [96, 120], "hit_on_prefill": [0, 80], "computed": [80, 120]},
    ]  # fmt: skip
    del report.played[False]
    assert report.as_json()["ratios"] == {"ttft_p50": None, "bytes_sent": None}


def test_passes_that_differ_by_no_more_than_those_of_one_kind_are_alike():
    here, slow = both(), both()
    here.wrong = {True: 0, False: 0}
    slow.link = link_of("1Gbit")
    # Medians: on .15, off .35. A later pass with the cache on of .36 reaches over that of off.
    late = Played(((answer(100, [5], 0, 64, 0.36),),), 1.0)
    here.again = {True: [late]}
    slow.again = {True: [Played(((answer(100, [5], 0, 64, 0.2),),), 1.0)]}
    assert here.ttft_p50s(True) == pytest.approx([0.15, 0.36])
    assert here.ttft_in_words() == "alike"
    assert slow.ttft_in_words() == "2.0 times lower"
    console = Console(width=80, file=io.StringIO())
    console.print(links_table([here, slow]), here.table(), here.conversation(str))
    text = console.file.getvalue()
    for shown in ("this machine", "255.0", "alike", "1 Gbit/s", "2.0 times lower", "43.6%"):
        assert shown in text
    found = json.loads(json.dumps(as_json([here, slow])))
    assert found["runs"]["cache_on"]["ttft_p50_of_passes_s"] == pytest.approx([0.15, 0.36])
    (name,) = found["links"]
    assert (name, found["links"][name]["bytes_per_s"]) == ("1 Gbit/s", 125_000_000)
    assert found["links"][name]["ratios"]["ttft_p50"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("1Gbit", LinkRate("1 Gbit/s", 125_000_000)),
        ("10 gbit/s", LinkRate("10 Gbit/s", 1_250_000_000)),
        ("2.5Gbit", LinkRate("2.5 Gbit/s", 312_500_000)),
        ("500Mbit", LinkRate("500 Mbit/s", 62_500_000)),
    ],
)
def test_a_link_is_a_rate_in_bits(text, link):
    assert link_of(text) == link


@pytest.mark.parametrize("text", ["", "1", "1GB", "fast", "-1Gbit", "99Mbit", "1000000000Gbit"])
def test_what_is_no_link_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--link"):
        link_of(text)
