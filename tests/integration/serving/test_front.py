"""`prefixkv front` before workers that were started by hand."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

from prefixkv.serving.process import READY
from prefixkv.serving.wire import WorkerInfo
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Served, get

KEY = {"PREFIXKV_API_KEY": "secret"}
PROMPT = list(range(300, 350))


def worker(role: str, *more: str) -> tuple[Served, WorkerInfo]:
    made = Served("worker", role, "--name", role, "--threads", "1", *more, **KEY)
    return made, msgspec.json.decode(made.line(READY)[len(READY) :], type=WorkerInfo)


def test_a_worker_that_is_started_again_by_hand_is_taken_back(expected: Expected) -> None:
    prefill, first = worker("prefill")
    decode, second = worker("decode")
    urls = f"{first.url},{second.url}"
    front = Served("front", "--workers", urls, "--workers-key", "secret", "--port", "0",
                   "--status-port", "0")  # fmt: skip
    with prefill, decode, front:
        words = front.line("small: ").split()
        url, status = words[1], words[-1].rstrip(")")

        def answer() -> dict[str, Any]:
            body = {"model": "small", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
            head = {"content-type": "application/json"}
            asked = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), head)
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                return json.load(answer)

        text = expected.text(expected.tokens(PROMPT, 9))
        until(lambda: get(f"{status}/health")[0] == 200)
        for hits in (0, 48):
            made = answer()
            assert made["choices"][0]["text"] == text
            assert made["usage"]["prefixkv"]["decode_hit_tokens"] == hits
        decode.signal(signal.SIGKILL)
        decode.ended()
        port = str(urlsplit(second.url).port)
        again, _ = worker("decode", "--port", port)
        with again:
            until(lambda: get(f"{status}/health")[1]["workers"]["decode"]["pid"] == again.pid)
            assert answer()["choices"][0]["text"] == text
            front.signal()
            assert front.ended() == 0
            assert get(f"{first.status_url}/health")[0] == 200, "a front ends no worker"
