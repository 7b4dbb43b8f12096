"""What `test_vllm_rooms` stands on: a prefill and a decode server of vLLM, and `prefixkv proxy`
before them.

Each answer of the proxy is compared with that of the decode server alone, which computes the prompt
under a cache salt of its own: so from nothing, within the same limits, in float32.
"""

import http.client
import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_servers import MODEL, REPOSITORY, TINY, Server, make_model, transfer_config
from prefixkv.engines.vllm.stats import GAUGES
from tests.integration.vllm.test_vllm import BLOCK_BYTES, PYTHON, prompt_of, until
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

DECODE_LEN = 512  # tokens; prefill takes longer prompts
ENDED_S = 25.0
"""After an answer, for the last of it to end on both servers; below the half minute that the
product's shortest timer of a room takes. On a machine that has nothing else to do it is less than
two seconds."""
SAID_S = 25.0
TEMPLATE = "{% for one in messages %}{{ one.content }} {% endfor %}"
NAMES = {"prefill": "on-prefill-only", "decode": "on-decode-only"}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Json = dict[str, Any]


@dataclass
class Said:
    """An answer. `value` is its JSON; of a stream, that of all its events by choice."""

    status: int
    value: Any
    error: str = ""  # of a stream that was cut


_seeds = itertools.count(10_001)


def new_prompt(num_tokens: int) -> list[int]:
    """A prompt that nobody has asked for yet."""
    return prompt_of(next(_seeds), num_tokens)


class Client:
    """A request, whose client may leave."""

    def __init__(self, port: int, path: str, body: Json) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        head = {"content-type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), head)
        self.answer: http.client.HTTPResponse | None = None

    def first_event(self) -> str:
        """The first line of a stream that says something."""
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200
        return self.answer.readline().decode()

    def leave(self) -> None:
        """Close the connection now."""
        if self.answer is not None:
            self.answer.close()
        self._connection.close()

    def read(self) -> Said:
        answer = self.answer or self._connection.getresponse()
        text = answer.read()
        self._connection.close()
        if "event-stream" in answer.headers.get("content-type", ""):
            return stream_of(text.decode())
        return Said(answer.status, json.loads(text))


def stream_of(text: str) -> Said:
    """The events of a stream, those of each choice put together."""
    choices: dict[int, Json] = {}
    whole: Json = {"choices": choices}
    error = ""
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            error = str(event["error"])
            continue
        if event.get("usage"):
            whole["usage"] = event["usage"]
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "token_ids": [], "logs": []})
            choice["text"] += piece.get("text") or (piece.get("delta") or {}).get("content") or ""
            choice["token_ids"] += piece.get("token_ids") or []
            logs = piece.get("logprobs") or {}
            choice["logs"] += logs.get("token_logprobs") or logs.get("content") or []
            if piece.get("finish_reason"):
                choice["finish_reason"] = piece["finish_reason"]
    return Said(200, whole, error)


_OF_ONE_ANSWER = ("id", "created", "kv_transfer_params", "prompt_tokens_details")


def is_same(one: Any, other: Any) -> bool:
    """Whether two answers say the same; numbers may differ as sums in another order do."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = (one.keys() | other.keys()) - set(_OF_ONE_ANSWER)
        return all(is_same(one.get(name), other.get(name)) for name in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    return bool(one == other)


_HELD: Final = frozenset(
    ["vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"]
    + [f"vllm:prefixkv_{name}" for name in GAUGES]
)


class Rooms:
    """The servers and the proxy. `decode` are options of decode's connector."""

    def __init__(self, folder: Path, **decode: Any) -> None:
        model = make_model(PYTHON, folder / "model", TINY)
        self.kv_port = free_port()
        common = ["--chat-template", TEMPLATE, "--enable-prompt-tokens-details"]
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        for side, role in roles.items():
            port = self.kv_port if side == "prefill" else free_port()
            options = decode if side == "decode" else {}
            server = Server(
                PYTHON, model, folder / f"{side}.log",
                transfer_config(role, f"{side}-0", port, **options),
                chunk=64, max_len=DECODE_LEN if side == "decode" else 4096,
                more=[*common, "--served-model-name", MODEL, NAMES[side]],
            )  # fmt: skip
            setattr(self, side, server)
        self.port, self.status_port = free_port(), free_port()
        self._proxy: subprocess.Popen[str] | None = None
        self._salts = 0
        self.slowest_s = 0.0  # of all times that something took to end

    prefill: Server
    decode: Server

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode

    def start(self) -> None:
        """Start the proxy, before servers that answer."""
        command = [
            sys.executable, "-m", "prefixkv.cli.main", "proxy",
            "--prefill", f"{self.prefill.url}=tcp://127.0.0.1:{self.kv_port}",
            "--decode", f"{self.decode.url}=decode-0",
            "--port", str(self.port), "--status-port", str(self.status_port),
        ]  # fmt: skip
        self._proxy = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._proxy.stdout is not None
        assert f"http://127.0.0.1:{self.port}/v1" in self._proxy.stdout.readline()

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.send_signal(signal.SIGTERM)
            with self._proxy:
                assert self._proxy.wait(PATIENCE_S) == 0
        self.decode.kill()
        self.prefill.kill()

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, path: str, body: Json) -> Client:
        """Through the proxy."""
        return Client(self.port, path, body)

    def alone(self, path: str, body: Json) -> Said:
        """What decode says by itself, from nothing."""
        self._salts += 1
        salt = body.get("cache_salt", f"alone {self._salts}")
        return Client(self.decode.port, path, {**body, "cache_salt": salt}).read()

    # --- what is held -----------------------------------------------------------------------------

    def proxy_metrics(self) -> dict[str, float]:
        """Those of the proxy, by name, summed over labels."""
        found: dict[str, float] = {}
        url = f"http://127.0.0.1:{self.status_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            for line in answer.read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def held(self) -> dict[str, float]:
        """What is not over: requests, blocks and rooms, by server and name."""
        found = {
            f"{side}: {name}": value
            for side, server in (("prefill", self.prefill), ("decode", self.decode))
            for name, value in server.metrics().items()
            if name in _HELD
        }
        assert len(found) == 2 * len(_HELD), found
        for name in ("rooms_waiting", "oldest_waiting_timestamp_seconds"):
            found[f"proxy: {name}"] = self.proxy_metrics()[f"prefixkv_proxy_{name}"]
        return {name: value for name, value in found.items() if value}

    def settled(self) -> None:
        """Nothing is held on any server, soon after now."""
        begun_s = time.monotonic()
        until(lambda: not self.held(), ENDED_S, state=self.held, pause_s=0.05)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    def blocks_sent(self) -> float:
        return self.prefill.counter("bytes_sent") / BLOCK_BYTES

    def has_sent(self, blocks: float) -> None:
        """Prefill has sent so many in all; it says so with a step, which may be a later one."""
        until(lambda: self.blocks_sent() >= blocks, SAID_S, state=self.blocks_sent, pause_s=0.02)
        assert self.blocks_sent() == blocks

    def gauge(self, side: str, name: str) -> float:
        server: Server = getattr(self, side)
        return server.metrics()[f"vllm:prefixkv_{name}"]

    def until_gauge(self, side: str, name: str, value: float = 1) -> None:
        until(lambda: self.gauge(side, name) == value, pause_s=0.02)
