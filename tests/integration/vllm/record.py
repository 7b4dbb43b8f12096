"""Records what vLLM calls, from two real servers, for the tests that need no vLLM:

python -m tests.integration.vllm.record ENGINE_PYTHON tests/unit/engines/vllm/recorded.json
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port
from benchmarks.vllm_servers import (
    MODEL,
    TINY,
    Server,
    make_model,
    transfer_config,
)
from tests.integration.vllm.test_vllm import prompt_of
from tests.support.patience import until


def main(python: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(16) as threads:
        place = Path(folder)
        model = make_model(python, place / "model", TINY)
        kv_port = free_port()
        servers = {}
        for role, name, port in (
            ("kv_producer", "prefill-0", kv_port),
            ("kv_consumer", "decode-0", free_port()),
        ):
            config = transfer_config(role, name, port)
            config["kv_connector"] = "RecordingConnector"
            config["kv_connector_module_path"] = "tests.integration.vllm.recorder"
            record = {"PREFIXKV_RECORD": str(place / f"{name}.jsonl")}
            servers[name] = Server(
                python, model, place / f"{name}.log", config, chunk=64, environment=record
            )
        prefill, decode = servers["prefill-0"], servers["decode-0"]
        try:
            prefill.wait()
            decode.wait()
            scene(prefill, decode, f"tcp://127.0.0.1:{kv_port}", threads)
        finally:
            prefill.kill()
            decode.kill()
        calls = {
            name: few([json.loads(line) for line in (place / f"{name}.jsonl").open()])
            for name in servers
        }
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(call) for call in made) + "\n]"
        for name, made in calls.items()
    )
    out.write_text("{" + lines + "}\n", encoding="utf-8")


def few(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without most of those that only ask the same again, while a request waits."""
    kept: list[dict[str, Any]] = []
    for call in calls:
        if call["call"] != "matched" or kept[-4:].count(call) < 2:
            kept.append(call)
    return kept


def scene(prefill: Server, decode: Server, where: str, threads: ThreadPoolExecutor) -> None:
    """Two turns, three requests with one new prompt, two failures, a client that leaves."""

    def ask(room: int, prompt: list[int], other: list[int] | None = None) -> Any:
        send = {"do_remote_decode": True, "room": room, "decode": "decode-0"}
        load = {"do_remote_prefill": True, "room": room, "prefill": where}
        threads.submit(prefill.complete, other or prompt, 1, send)
        return threads.submit(decode.complete, prompt, 4, load)

    first = prompt_of(1, 150)
    ask(1, first).result()
    ask(2, first + prompt_of(2, 40)).result()
    for one in [ask(3 + i, prompt_of(3, 100) + prompt_of(4 + i, 10)) for i in range(3)]:
        one.result()
    ask(6, prompt_of(7, 50), prompt_of(8, 50)).result()  # not the same prompt
    decode.complete(prompt_of(9, 40), 2, {"do_remote_prefill": True, "room": 7})
    client = http.client.HTTPConnection("127.0.0.1", decode.port)
    params = {"do_remote_prefill": True, "room": 8, "prefill": where}
    body = {"model": MODEL, "prompt": prompt_of(10, 70), "kv_transfer_params": params}
    client.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    until(lambda: decode.metrics()["vllm:kv_cache_usage_perc"], pause_s=0.05)
    client.close()
    until(lambda: not decode.metrics()["vllm:kv_cache_usage_perc"], pause_s=0.05)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
