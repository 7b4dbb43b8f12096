"""What a server costs that only waits: the processor time of its processes while rooms and sends
are pending and nothing can run.

    python -m benchmarks waiting_cpu --pids 123,456 --seconds 10
    python -m benchmarks waiting_cpu [--engine-python .venv-vllm/bin/python] [--json
    benchmarks/results/waiting_cpu.json]

`prefixkv serve` with the engine of Hugging Face's models (`waiting_serve`), and two vLLM servers of
which each waits for the other: prefill has a room that decode has not promised, decode loads a room
that prefill has not heard of.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import typer

BOUND: Final = 0.05
"""Of a core, a server."""
REST_S: Final = 4.0
"""From a request, or from a server's first answer, until it is measured."""
_VERSION: Final = """
from importlib.metadata import packages_distributions, version
print(version(packages_distributions()["vllm"][0]))
"""  # a CPU build is a distribution of another name


def cpu_share(pids: Iterable[int], seconds: float) -> float:
    """Of one core, the share that these processes use together in the next `seconds`: user and
    system time of all their threads, as the kernel counts it."""
    return cpu_shares({"": pids}, seconds)[""]


def cpu_shares(servers: Mapping[str, Iterable[int]], seconds: float) -> dict[str, float]:
    """`cpu_share` of several servers, by their names, in the same `seconds`."""
    pids = {name: list(each) for name, each in servers.items()}
    begun_s, before_s = time.monotonic(), {name: sum(map(_cpu_s, pids[name])) for name in pids}
    time.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    return {name: (sum(map(_cpu_s, pids[name])) - before_s[name]) / passed_s for name in pids}


def _cpu_s(pid: int) -> float:
    """0 for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def waiting_cpu(
    pids: Annotated[str, typer.Option(help="Measure these processes, with commas.")] = "",
    engine_python: Annotated[
        str, typer.Option(help="The interpreter of `env vllm`; none: no vLLM servers.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 10.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the shares there.")
    ] = None,
) -> int:
    """Processor time of servers that only wait for each other."""
    if pids:
        _rows("", "as they are", {pids: cpu_share(map(int, pids.split(",")), seconds)})
        return 0
    from prefixkv.cli.figures import machine

    recipe = {
        "command": "python -m benchmarks waiting_cpu --engine-python PYTHON",
        "seconds": seconds,
        **machine(),
    }
    rows = serve_rows(seconds)
    if engine_python:
        command = [engine_python, "-c", _VERSION]
        vllm = subprocess.run(command, capture_output=True, check=True, text=True)
        recipe["versions"]["vllm"] = vllm.stdout.strip()
        rows += vllm_rows(os.path.abspath(engine_python), seconds)
    recipe["load_average_after"] = list(os.getloadavg())
    if json_file is not None:
        content = {"recipe": recipe, "bound": BOUND, "rows": rows}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["share"] < BOUND for row in rows if row["state"] != "idle") else 1


def vllm_rows(engine_python: str, seconds: float) -> list[dict[str, Any]]:
    """Two servers, each idle and then waiting for the other."""
    from benchmarks.ports import free_port
    from benchmarks.vllm_servers import TINY, Server, make_model, transfer_config

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as threads:
        model = make_model(engine_python, Path(folder) / "model", TINY)
        kv_port = free_port()
        servers = {}
        for side, role, port in (
            ("prefill", "kv_producer", kv_port),
            ("decode", "kv_consumer", free_port()),
        ):
            config = transfer_config(role, f"{side}-0", port)
            servers[side] = Server(
                engine_python, model, Path(folder) / f"{side}.log", config, blocks=25, max_len=736
            )
        rows: list[dict[str, Any]] = []
        try:
            for server in servers.values():
                server.wait()
            time.sleep(REST_S)
            rows += _rows("vllm", "idle", cpu_shares(_processes(servers), seconds))
            where = f"tcp://127.0.0.1:{kv_port}"
            send = {"do_remote_decode": True, "room": 1, "decode": "decode-0"}
            load = {"do_remote_prefill": True, "room": 2, "prefill": where}
            threads.submit(servers["prefill"].complete, list(range(10, 450)), 1, send)
            threads.submit(servers["decode"].complete, list(range(20, 460)), 1, load)
            time.sleep(REST_S)
            rows += _rows("vllm", "waits", cpu_shares(_processes(servers), seconds))
        finally:
            for server in servers.values():
                server.kill()
    return rows


def serve_rows(seconds: float) -> list[dict[str, Any]]:
    """`prefixkv serve`: see `waiting_serve`."""
    from benchmarks.waiting_serve import measure

    rows: list[dict[str, Any]] = []

    def shares(state: str, pids: dict[str, int]) -> None:
        servers = {name: (pid,) for name, pid in pids.items()}
        rows.extend(_rows("hf", state, cpu_shares(servers, seconds)))

    measure(shares, REST_S)
    return rows


def _processes(servers: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: server.processes() for name, server in servers.items()}


def _rows(engine: str, state: str, shares: Mapping[str, float]) -> list[dict[str, Any]]:
    for server, share in shares.items():
        bound = "" if share < BOUND else f", above {BOUND:.0%}"
        print(f"{engine} {server}, {state}: {share:.1%} of a core{bound}", flush=True)
    return [
        {"engine": engine, "server": server, "state": state, "share": round(share, 4)}
        for server, share in shares.items()
    ]
