"""`prefixkv serve` as processes, asked by OpenAI's own client, and by the shell function of
docs/start.md. Without options decode computes what it lacks where that is sooner."""

import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import httpx
import openai
import pytest

from tests.support.patience import NEVER_S, PATIENCE_S, until
from tests.support.served import ROOT, Expected, Serve, at_rest, client_of, get, greedy, said_by

# No other module begins so: the first hits nothing.
HELLO = [{"role": "user", "content": "Please, tell me something about cats and boats."}]


# Each process that freezes what it has loaded says how many objects these are.
FREEZES = """
import gc, os
freeze = gc.freeze

def said():
    freeze()
    with open(f"{os.environ['FREEZES']}/{os.getpid()}", "w") as file:
        file.write(str(gc.get_freeze_count()))

gc.freeze = said
"""


def test_a_front_knows_what_its_workers_have_cached(serve: Serve, client: openai.OpenAI) -> None:
    """The first here: of a client that leaves the front expects pages for half a minute more."""
    known = 'prefixkv_front_routing{{what="{}_known_pages"}}'

    def is_known(worker: str) -> bool:
        cached = f'prefixkv_pages{{node="{worker}",state="cached"}}'
        role = worker.partition("-")[0]
        return serve.figures(worker)[cached] == serve.figures()[known.format(role)]

    workers = ("decode-0", "prefill-0")
    until(lambda: all(map(is_known, workers)))
    texts = [{"role": "user", "content": "Pages of a chat that nothing else has: " + "x" * 64}]
    before = {role: serve.figures()[known.format(role)] for role in ("decode", "prefill")}
    for salt, pages in (("a", 6), ("b", 12)):  # 105 tokens; another salt shares nothing
        greedy(client, texts, 3, extra_body={"cache_salt": salt})
        greedy(client, texts, 3, extra_body={"cache_salt": salt})
        for role, had in before.items():
            until(lambda role=role, most=had + pages: serve.figures()[known.format(role)] == most)
    until(lambda: all(map(is_known, workers)))


def test_turns_of_a_chat_are_answered_as_generate_does_and_the_second_hits(
    serve: Serve, client: openai.OpenAI, expected: Expected
) -> None:
    first = greedy(client, HELLO, 24)
    said = first.choices[0].message.content
    assert said == expected.chat(HELLO, 24)
    assert first.choices[0].finish_reason == "length"
    prompt = len(expected.texts.chat(HELLO))
    assert first.usage.prompt_tokens == prompt
    assert first.usage.completion_tokens == 24
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    more = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    second = greedy(client, more, 24)
    assert second.choices[0].message.content == expected.chat(more, 24)
    hit = (prompt + 23) // 16 * 16  # of the last token there is no KV yet
    split = second.usage.prefixkv
    num = len(expected.texts.chat(more))
    prefill_hit = prompt // 16 * 16  # prefill has not seen the answer
    assert split == {
        "decode_hit_tokens": hit, "decode_host_tokens": 0, "shared_tokens": 0,
        "prefill_hit_tokens": prefill_hit, "computed_tokens": num - prefill_hit,
        "sent_tokens": num - hit, "decode_computed_tokens": 0,
    }  # fmt: skip
    assert second.usage.prompt_tokens_details.cached_tokens == hit
    at_rest(serve)


def test_a_completion_is_drawn_with_its_seed_and_ends_at_a_string(
    client: openai.OpenAI, expected: Expected
) -> None:
    prompt = expected.texts.plain("Once upon a time")
    tokens = expected.tokens(prompt, 8)
    drawn = [
        client.completions.create(
            model="small", prompt=prompt, max_tokens=8, temperature=1.5, top_p=0.9, seed=seed,
            extra_body={"top_k": 40},
        ).choices[0].text
        for seed in (3, 3, 4)
    ]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    stop = expected.text(tokens[3:4])
    made = client.completions.create(
        model="small", prompt=prompt, max_tokens=8, temperature=0, stop=[stop]
    )
    assert made.choices[0].text == expected.text(tokens).partition(stop)[0]
    assert made.choices[0].finish_reason == "stop"


def test_models_and_health(serve: Serve, client: openai.OpenAI, guarded: Serve) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.default_temperature) == ("small", 0)
    assert client.models.retrieve("small").id == "small"
    status, told = get(f"{serve.status}/health")
    assert (status, told["status"]) == (200, "ok")
    for worker in told["workers"].values():
        assert get(f"{worker['status_url']}/health")[0] == 200
        assert get(f"{worker['url']}/info")[0] == 401, "a worker is asked by its front alone"
    # On the port of clients health needs no key.
    base = guarded.url.removesuffix("/v1")
    assert get(f"{base}/health") == (200, {"status": "ok"})
    assert httpx.get(f"{base}/v1/models").status_code == 401
    assert httpx.head(f"{base}/health").status_code == 200


def test_turns_of_a_chat_go_to_the_worker_that_has_it_and_a_killed_front_takes_all_along(
    expected: Expected, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FREEZES)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    with (
        Serve("--decode", "2", PYTHONPATH=path, FREEZES=str(tmp_path)) as serve,
        client_of(serve) as client,
    ):
        # What each process has loaded is not looked through again in the midst of requests.
        pids = {worker["pid"] for worker in serve.workers().values()} | {serve.process.pid}
        assert all(int((tmp_path / str(pid)).read_text()) > 50_000 for pid in pids)
        chats = [[{"role": "user", "content": f"{i} " + "What about this? " * 4}] for i in range(4)]
        for turn in range(3):
            for chat in chats:
                made = greedy(client, chat, 20)
                said = made.choices[0].message.content
                assert said == expected.chat(chat, 20)
                if turn:
                    hit = made.usage.prefixkv["decode_hit_tokens"]
                    assert hit > made.usage.prompt_tokens - 40
                chat += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "Go on"},
                ]
        for worker in ("decode-0", "decode-1"):
            assert serve.figures(worker)[f'prefixkv_pages{{node="{worker}",state="cached"}}'] > 0
        stream = greedy(client, HELLO, 3000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        pids = [worker["pid"] for worker in serve.workers().values()]
        assert len(pids) == 3
        serve.kill()
        until(lambda: not any(lives(pid) for pid in pids))


def test_sigterm_lets_a_stream_end_and_leaves_no_process(expected: Expected) -> None:
    with Serve("--limits-max-requests-per-client", "1") as serve, client_of(serve) as client:
        for _ in range(20):  # an answer may be over before this process goes on
            stream = greedy(client, HELLO, 200, stream=True, extra_body={"ignore_eos": True})
            pieces = [next(stream).choices[0].delta.content or ""]
            try:
                greedy(client, HELLO, 8)
            except openai.RateLimitError as error:
                refused = error
                break
            stream.close()
        else:
            raise AssertionError("no request has come while another ran")
        assert "of this client: at most 1" in str(refused)
        assert refused.response.headers["retry-after"] == "1"
        pids = [worker["pid"] for worker in serve.workers().values()]
        serve.signal()
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert len("".join(pieces).split()) == 200
        assert serve.ended() == 0
        assert not any(lives(pid) for pid in pids)
        with pytest.raises(URLError):
            urllib.request.urlopen(serve.url)


def test_a_second_sigterm_ends_at_once() -> None:
    patient = {"PREFIXKV_LIMITS_WRITE_TIMEOUT_S": str(NEVER_S)}
    with Serve("--drain-timeout-s", str(NEVER_S), **patient) as serve, client_of(serve) as client:
        stream = greedy(client, HELLO, 3000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        pids = [worker["pid"] for worker in serve.workers().values()]
        serve.signal()
        serve.line("draining")  # two at once may be one: the kernel keeps no count
        serve.signal()
        serve.ended()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        until(lambda: not any(lives(pid) for pid in pids))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_two_prompts_are_hit_as_the_page_says(serve: Serve) -> None:
    asked = re.search(r"```sh\n(ask\(\) .*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert asked is not None
    assert "prefixkv serve --compute-below 0\n" in PAGE  # as `serve` is here
    script = asked[1].replace("http://127.0.0.1:8000/v1", serve.url)
    assert script != asked[1]
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == asked[2]


COMPUTED = 'prefixkv_computed_requests_total{node="decode-0"}'


class AsItIs(Serve):
    own_compute = ()


def test_decode_computes_a_turn_that_adds_little(expected: Expected) -> None:
    messages = [{"role": "user", "content": "Tell me of snow, and of all that lies below it."}]
    with AsItIs() as serve, client_of(serve) as client:
        for turn in range(3):
            said = said_by(client, messages, 12)
            assert said == expected.chat(messages, 12)
            messages += [
                {"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn}?"},
            ]  # fmt: skip
        # Each turn adds fewer than 64 tokens; the first prompt is computed to know what that takes.
        assert serve.figures("decode-0")[COMPUTED] == 3
        at_rest(serve)


NEAR = 1e-4  # float32, and sums in another order
TEXT = "kaka tono mumu"
GREEDY = {"model": "small", "temperature": 0, "extra_body": {"ignore_eos": True}}


def check_legacy(expected: Expected, choice: Any, num_top: int, num: int) -> None:
    """A completion's log-probabilities against the model by itself."""
    prompt = expected.texts.plain(TEXT)
    said = expected.tokens(prompt, num)
    rows = expected.logprobs([*prompt, *said])[len(prompt) - 1 :]
    found = choice.logprobs
    assert choice.text == expected.text(said)
    assert "".join(found.tokens) == choice.text
    columns = (found.token_logprobs, found.top_logprobs, found.tokens, found.text_offset)
    assert {len(column) for column in columns} == {num}
    for (number, top, name, place), token, row in zip(
        zip(*columns, strict=True), said, rows, strict=False
    ):
        assert choice.text[place : place + len(name)] == name
        assert abs(number - row[token]) < NEAR
        assert top[name] == number
        assert num_top <= len(top) <= num_top + 1 or num_top > 1
        # As scorers do it: the greedy token is the one whose number is the largest.
        if num_top:
            assert (number == max(top.values())) == (row.argmax() == token)


def test_completions_have_them(client: Any, expected: Expected) -> None:
    for num_top in (0, 1, 5):
        for num in (6, 1):
            how = {"prompt": TEXT, "max_tokens": num, "logprobs": num_top, **GREEDY}
            answer = client.completions.create(**how)
            check_legacy(expected, answer.choices[0], num_top, num)
            assert answer.usage.completion_tokens == num
            pieces = list(client.completions.create(stream=True, **how))
            choice = answer.choices[0]
            assert "".join(one.choices[0].text for one in pieces) == choice.text
            parts = [one.choices[0].logprobs for one in pieces if one.choices[0].logprobs]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [x for part in parts for x in getattr(part, name)]
                if name in ("tokens", "text_offset"):
                    assert joined == getattr(choice.logprobs, name)
                assert len(joined) == len(choice.logprobs.tokens)
