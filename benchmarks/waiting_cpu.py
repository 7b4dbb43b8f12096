"""What a server costs that only waits: the processor time of its processes while rooms and sends are
pending and nothing can run.

    python -m benchmarks waiting_cpu --pids 123,456 --seconds 10
    python -m benchmarks waiting_cpu --engine-python .venv-vllm/bin/python
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

BOUND: Final = 0.05
"""Of a core, a server."""


def cpu_share(pids: Iterable[int], seconds: float) -> float:
    """Of one core, the share that these processes use together in the next `seconds`: user and
    system time of all their threads, as the kernel counts it."""
    pids = list(pids)
    begun_s, before_s = time.monotonic(), sum(map(_cpu_s, pids))
    time.sleep(seconds)
    return (sum(map(_cpu_s, pids)) - before_s) / (time.monotonic() - begun_s)


def _cpu_s(pid: int) -> float:
    """0 for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def waiting_cpu(pids: str = "", engine_python: str = "", seconds: float = 10.0) -> None:
    """Measure processes, or two vLLM servers of which each waits for the other."""
    if pids:
        _print("these processes", cpu_share(map(int, pids.split(",")), seconds))
        return
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
        try:
            for server in servers.values():
                server.wait()
            time.sleep(3.0)
            for side, server in servers.items():
                _print(f"{side}, idle", cpu_share(server.processes(), seconds))
            where = f"tcp://127.0.0.1:{kv_port}"
            send = {"do_remote_decode": True, "room": 1, "decode": "decode-0"}
            load = {"do_remote_prefill": True, "room": 2, "prefill": where}
            threads.submit(servers["prefill"].complete, list(range(10, 450)), 1, send)
            threads.submit(servers["decode"].complete, list(range(20, 460)), 1, load)
            time.sleep(4.0)
            for side, server in servers.items():
                _print(f"{side}, waiting for the other", cpu_share(server.processes(), seconds))
        finally:
            for server in servers.values():
                server.kill()


def _print(what: str, share: float) -> None:
    bound = "" if share < BOUND else f", above {BOUND:.0%}"
    print(f"{what}: {share:.1%} of a core{bound}")
