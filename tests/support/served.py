"""`prefixkv serve` and `prefixkv worker` as processes, and what they should answer."""

import contextlib
import http.client
import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import openai
import torch
from transformers import AutoModelForCausalLM

from prefixkv.engines.hf.models import unpaged_copy
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_model, small_tokenizer
from prefixkv.serving.text import Texts
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import ROOT as ROOT
from tests.support.processes import Command


class Served(Command):
    """A process of prefixkv's command line."""

    python = sys.executable

    def __init__(self, *arguments: str, **environ: str) -> None:
        super().__init__(self.python, "-m", "prefixkv.cli.main", *arguments, **environ)


class Serve(Served):
    """`prefixkv serve` on free ports; `url` and `status` are there once it is ready. Prefill
    computes all, unless `arguments` say other things."""

    own_compute: tuple[str, ...] = ("--compute-below", "0", "--no-carry-on")

    def __init__(self, *arguments: str, **environ: str) -> None:
        super().__init__(
            "serve", "--port", "0", "--status-port", "0", "--threads", "1", *self.own_compute,
            *arguments, **environ,
        )  # fmt: skip
        words = self.line("small: ").split()
        self.url, self.status = words[1], words[-1].rstrip(")")

    def workers(self) -> dict[str, dict[str, Any]]:
        _, told = get(f"{self.status}/health")
        found: dict[str, dict[str, Any]] = told["workers"]
        return found

    def audit(self, worker: str) -> None:
        """Raises HTTPError where a law of the worker's node does not hold."""
        info = self.workers()[worker]
        environ = Path(f"/proc/{info['pid']}/environ").read_bytes().decode().split("\0")
        name = "PREFIXKV_API_KEY="
        key = next(one for one in environ if one.startswith(name)).removeprefix(name)
        asked = urllib.request.Request(
            f"{info['url']}/audit", method="POST", headers={"authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert answer.status == 204

    def figures(self, worker: str = "") -> dict[str, float]:
        """The metrics of a worker, or of the front."""
        status = self.workers()[worker]["status_url"] if worker else self.status
        with urllib.request.urlopen(f"{status}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(number)
            for name, _, number in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }


def at_rest(serve: Serve) -> None:
    """No worker holds anything for a request, and each finds its books in order."""
    for worker in serve.workers():

        def idle(worker: str = worker) -> bool:
            figures = serve.figures(worker)
            held = [
                figures[f'prefixkv_pages{{node="{worker}",state="{state}"}}']
                for state in ("owned", "held", "quarantined")
            ]
            queued = [n for name, n in figures.items() if name.startswith("prefixkv_queue")]
            return not any(held) and not any(queued)

        until(idle)
        serve.audit(worker)


def ask_and_leave(
    serve: Serve, path: str, body: dict[str, Any], seen: Callable[[], object], **headers: str
) -> None:
    """A client that closes its connection once `seen()`, with no answer."""
    place = urlsplit(serve.url)
    connection = http.client.HTTPConnection(place.netloc, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        head = {"content-type": "application/json", **headers}
        connection.request("POST", place.path + path, json.dumps(body), head)
        until(seen)


def under_way(serve: Serve) -> bool:
    """A request waits for a transfer to decode, or runs there."""
    figures, queue = serve.figures("decode-0"), 'prefixkv_queue_requests{node="decode-0",queue='
    return any(figures.get(f'{queue}"{name}"}}') for name in ("transfer", "running"))


def client_of(serve: Serve, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=serve.url, api_key=key, timeout=PATIENCE_S, max_retries=0)


def greedy(
    client: openai.OpenAI, messages: list[dict[str, str]], num_tokens: int, **more: Any
) -> Any:
    """The answer to a chat, or its stream."""
    return client.chat.completions.create(
        model="small", messages=messages, max_tokens=num_tokens, temperature=0, **more
    )


def said_by(client: openai.OpenAI, messages: list[dict[str, str]], num_tokens: int) -> str:
    said: str = greedy(client, messages, num_tokens).choices[0].message.content
    return said


def get(url: str) -> tuple[int, Any]:
    """Status and JSON of what is there."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


class Expected:
    """What the small model says by itself, or the model of a folder with its tokenizer."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            self._model = unpaged_copy(small_model(0, trial=False))
        else:
            self._model = AutoModelForCausalLM.from_pretrained(folder)
        self.texts = Texts(small_tokenizer(), CHAT_TEMPLATE)

    def tokens(self, prompt: list[int], num: int) -> list[int]:
        """Its greedy answer to these tokens."""
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor([prompt]), max_new_tokens=num, do_sample=False, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> Any:
        """float64 [len(tokens), vocabulary]: row i is about the token after the first i + 1."""
        logits = self._model(input_ids=torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()

    def chat(self, messages: list[dict[str, str]], num: int, said: str = "") -> str:
        """Its greedy answer to a chat, as text. `said`: what may be that answer. One forward tells,
        where `generate` takes one for each token; it is asked where a token is not the likeliest.
        """
        prompt, likely = self.texts.chat(messages), self.texts.tokenizer.encode(said).ids
        end = self._model.generation_config.eos_token_id
        if likely and end not in likely and len(likely) <= num:
            rows = self.logprobs([*prompt, *likely])[len(prompt) - 1 :]
            if rows.argmax(-1).tolist()[:num] == [*likely, end][:num]:
                return said
        return self.text(self.tokens(prompt, num))

    def text(self, tokens: list[int]) -> str:
        text: str = self.texts.tokenizer.decode(tokens)
        return text
