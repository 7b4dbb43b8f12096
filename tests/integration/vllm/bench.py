"""`vllm bench serve`, vLLM's own load generator, run in its environment, and what it counts."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_servers import MODEL
from tests.integration.vllm.test_vllm import PYTHON

LIMIT_S: Final = 400.0  # two imports of vLLM on a busy machine, and the requests
BACKENDS: Final = {"completions": "openai", "chat": "openai-chat"}
"""By the name of the API, its name for it."""


@dataclass(frozen=True)
class Load:
    """Prompts of random words, which begin with one prefix: lengths in tokens."""

    num_prompts: int
    prefix_len: int
    own_len: int
    answer_len: int
    seed: int

    @property
    def prompt_len(self) -> int:
        """The length of each prompt, in tokens."""
        return self.prefix_len + self.own_len


@dataclass(frozen=True)
class Count:
    """Requests that were answered, and tokens of their prompts and answers."""

    requests: int
    prompt: int
    answer: int


def vllm_bench_serve(
    api: str, port: int, path: str, load: Load, tokenizer: Path, folder: Path, id_prefix: str
) -> Count:
    """Ask a server of this machine for the whole load at once; its requests' ids begin with
    `id_prefix`. Returns what it has counted. Raises AssertionError if a request fails."""
    script = str(Path(__file__).with_name("vllm_command.py"))
    command = [
        PYTHON, script, "bench", "serve", "--backend", BACKENDS[api],
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", path,
        "--model", MODEL, "--tokenizer", str(tokenizer), "--request-id-prefix", id_prefix,
        "--dataset-name", "random", "--seed", str(load.seed),
        "--num-prompts", str(load.num_prompts), "--random-prefix-len", str(load.prefix_len),
        "--random-input-len", str(load.own_len), "--random-output-len", str(load.answer_len),
        "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", "out.json",
    ]  # fmt: skip
    alone = {
        "HOME": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PREFIXKV")}
    done = subprocess.run(
        command, cwd=folder, env={**kept, **alone}, text=True, check=False, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    made = json.loads((folder / "out.json").read_text())
    assert (made["failed"], set(made["errors"])) == (0, {""}), done.stdout[-4000:]
    # Of each request too, not only in sum.
    assert made["input_lens"] == [load.prompt_len] * load.num_prompts
    assert made["output_lens"] == [load.answer_len] * load.num_prompts
    return Count(made["completed"], made["total_input_tokens"], made["total_output_tokens"])


def logged(request_log: Path, id_prefix: str) -> list[dict[str, Any]]:
    """The lines of a proxy's request log whose ids, of the client, begin with `id_prefix`."""
    lines = [json.loads(line) for line in request_log.read_text().splitlines()]
    return [line for line in lines if str(line.get("request_id", "")).startswith(id_prefix)]
