"""`prefixkv serve --host-memory`: what the pool of its decode worker forgets comes back, is shown
wherever a request's tokens are, and is there when prefill is not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.patience import PATIENCE_S, until
from tests.support.processes import lines_of
from tests.support.served import ROOT, Expected, Serve, at_rest, greedy

PAGE, NUM_TOKENS = 16, 12
CHATS = 6  # of some 14 pages each, more than the pool has together
NODE = '{node="decode-0"}'

Chat = list[dict[str, str]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def serve(log: Path) -> Iterator[Serve]:
    with Serve(
        "--host-memory", "8x", "--decode-pages", "48", "--prefill-pages", "64", "--compute-below",
        "40", "--carry-on", "--chunk-tokens", "64", "--request-log", str(log),
    ) as serve:  # fmt: skip
        yield serve


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    """Conversations with nothing in common; the tests go on with them."""
    return [[{"role": "user", "content": f"{i} of {CHATS}: " + f"tell me of {i}. " * 10}]
            for i in range(CHATS)]  # fmt: skip


class Talk:
    """Asks, goes on with the chats, and remembers what was said."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self.said: list[tuple[Chat, str]] = []

    def turn(self, chat: Chat) -> Any:
        made = greedy(self._client, chat, NUM_TOKENS)
        said = made.choices[0].message.content
        self.said.append(([*chat], said))
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        return made

    def check(self, expected: Expected) -> None:
        """All that was said is what the model by itself says."""
        for chat, said in self.said:
            assert said == expected.chat(chat, NUM_TOKENS)


def written(serve: Serve) -> float:
    """Pages that were copied to host memory."""
    return serve.figures("decode-0")[f"prefixkv_host_written_pages_total{NODE}"]


def test_what_came_from_host_memory_is_told_everywhere(
    serve: Serve, client: openai.OpenAI, chats: list[Chat], expected: Expected, log: Path
) -> None:

    def counted() -> tuple[float, float]:
        front, decode = serve.figures(), serve.figures("decode-0")
        hits = decode[f"prefixkv_host_hit_tokens_total{NODE}"]
        return front['prefixkv_front_tokens_total{kind="decode_host"}'], hits

    before, talk, num_pages = counted(), Talk(client), 0
    for chat in chats:
        num_pages += talk.turn(chat).usage.prompt_tokens // PAGE
        until(lambda wanted=num_pages: written(serve) >= wanted)
    made = [talk.turn(chat) for chat in chats]
    talk.check(expected)
    splits = [one.usage.prefixkv for one in made]
    loaded = [split["decode_host_tokens"] for split in splits]
    # The last of them may still be in the pool.
    assert sum(tokens > 100 for tokens in loaded) >= CHATS - 2
    for one, split in zip(made, splits, strict=True):
        assert split["decode_host_tokens"] <= split["decode_hit_tokens"]
        num = one.usage.prompt_tokens
        parts = ("decode_hit", "shared", "decode_computed", "sent")
        assert sum(split[f"{part}_tokens"] for part in parts) == num
    assert [after - earlier for earlier, after in zip(before, counted(), strict=True)] == [
        sum(loaded), sum(loaded),
    ]  # fmt: skip
    ids = [one.id.removeprefix("chatcmpl-") for one in made]

    def lines() -> dict[tuple[str, str], Any]:
        found = lines_of(log)
        return {(line["side"], line["id"]): line for line in found}

    until(lambda: all(("front", name) in lines() for name in ids))
    until(lambda: all(("decode", name) in lines() for name in ids))
    told = lines()
    assert [told["front", name]["decode_host_tokens"] for name in ids] == loaded
    assert [told["decode", name]["host_tokens"] for name in ids] == loaded
    at_rest(serve)


def test_the_client_of_the_page_on_agents_hits(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^<!-- file: agent.py -->\n```python\n(.*?)^```", page, re.S | re.M)
    exec(code.replace("http://127.0.0.1:8000/v1", serve.url), {})
    hits = [json.loads(line.replace("'", '"')) for line in capsys.readouterr().out.splitlines()]
    assert [split["decode_hit_tokens"] > 64 for split in hits] == [False, True, True]
    at_rest(serve)


def test_of_a_session_that_has_ended_nothing_is_copied(serve: Serve, client: openai.OpenAI) -> None:
    """Of a prompt behind it all is."""
    owned = 'prefixkv_host_pages{node="decode-0",state="owned"}'  # of copies under way
    until(lambda: not serve.figures("decode-0")[owned])
    before = written(serve)
    for word, hints in (("Ends", {"ends": True}), ("Goes on", {"returns_after": 30})):
        chat = [{"role": "user", "content": f"{word}. " + "Rain. " * 30}]
        made = greedy(client, chat, 4, extra_body={"kv_hints": hints})
    until(lambda: written(serve) > before)
    at_rest(serve)
    assert written(serve) - before == (made.usage.total_tokens - 1) // PAGE


def test_a_parked_session_is_loaded_before_its_announced_turn(
    serve: Serve, client: openai.OpenAI, expected: Expected
) -> None:
    def ask(chat: Chat, **hints: object) -> Any:
        session = {"session_id": chat[0]["content"][:6], "kv_hints": hints}
        return greedy(client, chat, 4, extra_body=session)

    def figure(name: str) -> float:
        return serve.figures("decode-0")[f"prefixkv_host_{name}_total{NODE}"]

    # 1. It is in host memory, and others take its pages on the device.
    chat, before = [{"role": "user", "content": "Parked " + "Snow. " * 30}], written(serve)
    first = ask(chat, returns_after=600)
    until(lambda: written(serve) >= before + first.usage.prompt_tokens // PAGE)
    for number in range(4):
        ask([{"role": "user", "content": f"Other {number} " + "Hail. " * 30}])
    # 2. Those of a session that has ended are worth nothing.
    ask([{"role": "user", "content": "Ended " + "Wind. " * 40}], ends=True)
    loads = figure("loads")
    assert httpx.post(f"{serve.url}/sessions/Parked", timeout=PATIENCE_S).status_code == 202
    # By itself it would be loaded two minutes after its end.
    until(lambda: figure("loads") > loads, patience_s=60.0)
    chat += [{"role": "assistant", "content": first.choices[0].message.content},
             {"role": "user", "content": "And then?"}]  # fmt: skip
    second = ask(chat, returns_after=600)
    split = second.usage.prefixkv
    assert split["decode_hit_tokens"] >= first.usage.prompt_tokens // PAGE * PAGE
    assert split["decode_host_tokens"] == 0
    assert second.choices[0].message.content == expected.chat(chat, 4)
    at_rest(serve)
