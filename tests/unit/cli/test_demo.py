"""The demo's chats: what is said, and what is made of the answers. The workers here are stand-ins;
`tests/integration/serving/test_chats.py` has real ones."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cli.demo import HERE, LinkRate, link_of
from prefixkv.cli.demo.command import compare
from prefixkv.cli.demo.report import DemoPass, DemoReport, Split, draw, picture, table
from prefixkv.cli.demo.workers import ChatAnswer, ModelWorkerError
from prefixkv.cli.demo.workload import Played, Run, Turn, Vocabulary, Workload, chat, play
from prefixkv.engines.hf.requests import AnswerToken
from prefixkv.errors import ConfigError
from prefixkv.serving.openai import Usage

WORDS = Vocabulary(10, 20, system=1, user=2, assistant=3, stop=4)


class Workers:
    """Answers with the prompt's length and its count, after some turns of the event loop."""

    def __init__(self, fails_at=None):
        self.asked, self.fails_at, self.open = [], fails_at, 0

    async def ask(self, decode, rid, prompt, num, salt):
        self.asked.append((decode, rid, tuple(prompt), num, salt))
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
        return ChatAnswer(list(prompt), num, Usage(len(prompt)), [len(prompt)] * num)


def test_a_prompt_is_all_that_was_said():
    system, users = Run(1, 5), (Run(2, 3), Run(3, 4))
    turns = Turn((system, users[0]), 2), Turn((users[1],), 3)

    def words(run):
        return [token % 10 + 10 for token in run.tokens().tolist()]

    workers = Workers()
    played = asyncio.run(play(workers, "d", Workload((turns,)), WORDS, "s"))
    first = [1, *words(system), 4, 2, *words(users[0]), 4, 3]
    second = [*first, 13, 13, 2, *words(users[1]), 4, 3]
    assert workers.asked == [
        ("d", "s.0.0", tuple(first), 2, "s"),
        ("d", "s.0.1", tuple(second), 3, "s"),
    ]
    assert [answer.tokens for answer in played.all()] == [[13, 13], [22, 22, 22]]


def test_conversations_run_side_by_side_and_each_answer_is_heard():
    sizes = {"system_tokens": 4, "user_tokens": 4, "output_tokens": 2}
    heard = []
    workers = Workers()
    playing = play(workers, "d", chat(1, 2, 2, **sizes), WORDS, "s",
                   on_answer=lambda number, at, answer: heard.append((number, at)))  # fmt: skip
    played = asyncio.run(playing)
    assert [rid for _, rid, *_ in workers.asked] == ["s.0.0", "s.1.0", "s.0.1", "s.1.1"]
    assert sorted(heard) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(played.all()) == 4


def test_one_that_fails_ends_the_others_and_says_why():
    sizes = {"system_tokens": 4, "user_tokens": 4, "output_tokens": 2}
    workers = Workers(fails_at="s.1.0")
    with pytest.raises(ModelWorkerError, match=r"request s\.1\.0: lost"):
        asyncio.run(play(workers, "d", chat(1, 3, 2, **sizes), WORDS, "s"))
    assert len(workers.asked) == 3
    assert workers.open == 0


def answer(prompt, tokens, hit, prefill_hit, ttft_s, shared=0):
    usage = Usage(prompt)
    usage.add_prompt(
        prompt, AnswerToken(hit_tokens=hit, prefill_hit_tokens=prefill_hit, shared_tokens=shared)
    )
    return ChatAnswer(list(range(prompt)), 4, usage, tokens, ttft_s, [0.01])


def played(*ttfts_s, hits=(0, 0), said=7):
    shared = 64 if any(hits) else 0
    return Played(
        ((answer(100, [5], hits[0], 64, ttfts_s[0], shared),
          answer(120, [6, said], hits[1], 80, ttfts_s[1])),), 2.0
    )  # fmt: skip


def report(*later):
    on = DemoPass(HERE, True, played(0.1, 0.2, hits=(0, 96)), 1 << 20)
    off = DemoPass(HERE, False, played(0.3, 0.4), 4 << 20)
    return DemoReport({"seed": 1}, [on, off, *later], {True: 0, False: 0})


class Reference:
    def __init__(self):
        self.asked = []

    def answer(self, prompt, num):
        self.asked.append((len(prompt), num))
        return {100: [5], 120: [6, 7]}[len(prompt)]


def test_every_answer_of_every_pass_is_compared_and_each_prompt_asked_once():
    one = report(DemoPass(HERE, False, played(0.3, 0.4, said=8), 9))
    reference = Reference()
    compare(one, reference)
    assert reference.asked == [(100, 4), (120, 4)]
    assert one.wrong == {True: 0, False: 1}
    assert one.complaints() == ["cache off: 1 answers are not what generate() says"]
    one.left.append("cache on: 2 pages left held on prefill")
    assert len(one.complaints()) == 2


def test_the_table_is_that_of_the_readme():
    link = link_of("1Gbit")
    slow = [DemoPass(link, True, played(0.2, 0.2), 1), DemoPass(link, False, played(0.9, 0.7), 1)]
    rows = report(*slow).rows()
    assert rows == [
        ("answers that are what generate() says", "4 of 4", "4 of 4", "token for token"),
        ("hit rate on decode, tokens", "43.6%", "0.0%", ""),
        ("KV sent, once over all turns", "1 MiB", "4 MiB", "4.0 times less"),
        ("TTFT P50 inside this machine", "150 ms", "350 ms", "2.3 times lower"),
        ("TTFT P50 over 1 Gbit/s", "200 ms", "800 ms", "4.0 times lower"),
    ]
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for what, *_ in rows:
        assert f"| {what} |" in readme.replace("`generate()`", "generate()")
    lines = table(rows)
    assert lines[2] == "hit rate on decode, tokens                43.6%    0.0%"
    found = json.loads(json.dumps(report(*slow).as_json()))
    assert found["passes"][0]["sent_tokens"] == 60
    assert found["passes"][0]["computed_tokens"] == 76
    assert found["by_turn"][1]["cache_on"] == {"hit": 96, "shared": 0, "sent": 24}


def test_passes_that_differ_by_no_more_than_those_of_one_kind_are_alike():
    # Medians: on .15, off .35. A later pass with the cache on of .36 reaches over that of off.
    one = report(DemoPass(HERE, True, played(0.36, 0.36), 1))
    assert one.rows()[3] == ("TTFT P50 inside this machine", "255 ms", "350 ms", "alike")


def test_the_picture_has_a_bar_for_each_turn_and_kind(tmp_path):
    pytest.importorskip("matplotlib")
    turns = report().by_turn()
    assert turns[1] == (Split(96, 0, 24), Split(0, 0, 120))
    _, first, first_off, second, _ = picture(turns)
    assert first.count("\u2592") == round(48 * 64 / 120)
    assert first_off.split()[1] == "\u2591" * 40
    assert second.split()[4] == "\u2588" * 38 + "\u2591" * 10
    draw(turns, tmp_path / "turns.svg")
    assert (tmp_path / "turns.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("text", "link"),
    [
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


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_conversations_are_what_their_seed_says(conversations, turns, seed):
    sizes = {"system_tokens": 40, "user_tokens": 10, "output_tokens": 6}
    workload = chat(seed, conversations, turns, **sizes)
    assert workload == chat(seed, conversations, turns, **sizes)
    assert workload.num_requests == conversations * turns
    # They share the system prompt and nothing else.
    systems = {session[0].text[0] for session in workload.sessions}
    users = [turn.text[-1].seed for session in workload.sessions for turn in session]
    assert len(systems) == 1
    assert len(set(users)) == len(users)
