"""Real vLLM servers as processes, and what a proxy would ask of them over HTTP: for the benchmark
`vllm` and for tests/integration/vllm."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks import servers
from tests.support.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = "m"


@dataclass(frozen=True)
class Sizes:
    """Of a Llama with random weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def kv_bytes(self, num_tokens: int) -> int:
        """K and V of so many tokens."""
        itemsize = {"float32": 4, "bfloat16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * num_tokens * itemsize


TINY = Sizes(128, 2, 4, 2, 32, "float32")


def make_model(python: str, folder: Path, sizes: Sizes) -> Path:
    """A model made from a seed, with the interpreter that has transformers."""
    maker = str(Path(__file__).with_name("vllm_model.py"))
    command = [python, maker, str(folder), *map(str, astuple(sizes))]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return folder


class Server(servers.Server):
    """`python -m vllm.entrypoints.openai.api_server`, with our connector."""

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None = None,
        *,
        blocks: int = 256,
        block_size: int = 32,
        chunk: int = 256,
        dtype: str = "float32",
        max_len: int = 4096,
        environment: dict[str, str] | None = None,
        more: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        port = port or free_port()
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL,
            "--dtype", dtype, "--enforce-eager", "--max-model-len", str(max_len),
            "--max-num-seqs", "16", "--max-num-batched-tokens", str(chunk),
            "--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks),
            "--seed", "0", "--api-server-count", "1", *more,
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        around = {
            "PYTHONPATH": str(REPOSITORY),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # one import of vLLM less
            **(environment or {}),
        }
        super().__init__(command, log, port, around, log.parent)

    def complete(
        self,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        timeout_s: float = servers.ANSWER_S,
        **more: Any,
    ) -> Any:
        """The tokens that follow, greedily, and what else the answer says."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        return self.post("/v1/completions", body, timeout_s)

    def metrics(self) -> dict[str, float]:
        """By name, summed over labels."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def counter(self, name: str) -> int:
        """Of ours, by the end of its name."""
        return int(self.metrics().get(f"vllm:prefixkv_{name}_total", 0))


def transfer_config(
    role: str, name: str, kv_port: int, failure: str = "recompute", **extra: Any
) -> dict[str, Any]:
    """`--kv-transfer-config` of a server."""
    return {
        "kv_connector": "PrefixKVConnector",
        "kv_connector_module_path": "prefixkv.engines.vllm",
        "kv_role": role,
        "kv_port": kv_port,
        "kv_load_failure_policy": failure,
        "kv_connector_extra_config": {"name": name, **extra},
    }


def token_ids(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
