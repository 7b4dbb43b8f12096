"""`python -m benchmarks fleet`: the embedded router beside Dynamo's selection service, on the same
workers and the same load.

The simulation is that of `python -m benchmarks router`: real caches, times from a model. The
service is real: each worker publishes its cache events over ZeroMQ, the service follows them, and
is asked over HTTP where each request goes, and told when its prompt is complete and when it ends.
A block of the trace (512 tokens) is one token in a block of one, which scales what it counts by
512. Before each decision all that was published has been handed to the sockets, and 2 ms pass.

`decision_us` is wall time of one decision: of the embedded router with the hashing of the prompt,
of the service with JSON and HTTP, from Python; `nothing_us` is that of a GET that asks for nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import typer
from rich.console import Console

from benchmarks.ports import free_port
from benchmarks.router import CacheWorker, RouterSimulation, ServiceTimes, output_lengths
from prefixkv.cache.events import EventBatch, page_keys
from prefixkv.cache.results import PrefixLock
from prefixkv.cli.replay import Trace, TraceRequest, read_trace
from prefixkv.config import KVEventsConfig
from prefixkv.errors import ConfigError
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.protocol.ids import PeerId
from prefixkv.serving.router import Route

ROUTERS = ("embedded", "service", "longest", "least_loaded")
PATIENCE_S = 60.0
SETTLE_S = 0.002  # what the service is given to read what was published


class SelectService:
    """`python -m dynamo.select_service`, and what it is asked. Raises ConfigError if it does not
    come up."""

    def __init__(self, python: str, log: Path) -> None:
        self.port = free_port()
        command = [python, "-m", "dynamo.select_service", "--port", str(self.port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "DYN_LOG": "warn"}
            )
        self._http = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.ask("GET", "/health")
                return
            except OSError:
                self._http.close()
                if self._process.poll() is not None or time.monotonic() > end_s:
                    self.close()
                    raise ConfigError(f"{' '.join(command)} did not come up: {log}") from None
                time.sleep(0.1)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        self._http.request(
            method,
            path,
            None if body is None else json.dumps(body),
            {"content-type": "application/json"},
        )
        answer = self._http.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise ConfigError(f"{method} {path}: {answer.status} {text.decode()}")
        return json.loads(text)

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FleetSimulation(RouterSimulation):
    """One run; of the service, if one is given."""

    def __init__(
        self,
        trace: Trace,
        outputs: list[int],
        num_workers: int,
        capacity: int,
        times: ServiceTimes,
        service: SelectService | None = None,
    ) -> None:
        super().__init__(trace, outputs, num_workers, capacity, times)
        self._service = service
        self._publishers: list[KVEventPublisher] = []
        self._decision: Route | str | None = None  # the last
        self.decisions_s: list[float] = []
        self.num_late = 0  # the service did not know what the worker that it chose holds
        if service is None:
            return
        free = "tcp://127.0.0.1:*"
        config = KVEventsConfig(free, free, free)
        for number, worker in enumerate(self.workers):
            publisher = KVEventPublisher(config, PeerId(worker.name, 1), "model", 1)
            self._publishers.append(publisher)
            worker.feed.listen(publisher)
            known = {
                "worker_id": number,
                "endpoint": f"http://127.0.0.1:{number + 1}",
                "kv_events_endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "model_name": "model",
                "block_size": 1,
                "total_kv_blocks": capacity,
            }
            service.ask("POST", "/workers", known)
        time.sleep(2 * config.heartbeat_s)  # it has heard each of them

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    def _choose(self, name: str, number: int, request: TraceRequest) -> int:
        if self._service is not None:
            while not all(publisher.idle for publisher in self._publishers):
                time.sleep(0.0002)
            time.sleep(SETTLE_S)
            body = {
                "selection_id": str(number),
                "model_name": "model",
                "token_ids": request.key.tokens().tolist(),
                "expected_output_tokens": max(1, self.outputs[number] // self.trace.block_tokens),
            }
            began_s = time.perf_counter()
            answer = self._service.ask("POST", "/select_and_reserve", body)
            self.decisions_s.append(time.perf_counter() - began_s)
            chosen = int(answer["worker_id"])
            held = self.workers[chosen].cache.match_prefix(request.whole_key).prefix_len
            self.num_late += answer["overlap"]["longest_matched"] != held
            self._decision = str(number)
            return chosen
        if name != "embedded":
            self._decision = None
            return super()._choose(name, number, request)
        began_s = time.perf_counter()
        keys = page_keys(request.whole_key.data, 1)
        route = self.router.route(keys, request.time_s, work=len(request.key))
        self.decisions_s.append(time.perf_counter() - began_s)
        self._decision = route
        return int(route.worker.rpartition("-")[2])

    def _storing(
        self,
        worker: CacheWorker,
        request: TraceRequest,
        lock: PrefixLock,
        route: Route | None,
        output: int,
    ) -> Callable[[float], None]:
        decision = self._decision

        def store(now_s: float) -> None:
            held = worker.store(request, lock, now_s)
            self._changed(worker)
            if isinstance(decision, str) and self._service is not None:
                self._service.ask("POST", f"/reservations/{decision}/prefill_complete")
            self._at(now_s + output * self._times.step_s, lambda end_s: end(held, end_s))

        def end(held: PrefixLock, now_s: float) -> None:
            worker.end(held, now_s)
            worker.open_blocks -= len(request.key)
            self._changed(worker)
            if isinstance(decision, Route):
                self.router.ended(decision, now_s)
            elif decision is not None and self._service is not None:
                self._service.ask("DELETE", f"/reservations/{decision}")

        return store

    def _changed(self, worker: CacheWorker) -> None:
        if self._service is not None:
            worker.feed.pass_on()
        elif not self.router.apply(EventBatch.decode(worker.feed.take().encode())):
            raise AssertionError(f"{worker.name} is out of sync")


def fleet(
    traces: Annotated[list[Path], typer.Argument(help="Mooncake JSONL, each.")],
    python: Annotated[str, typer.Option(help="Of `python -m benchmarks env dynamo`.")],
    workers: Annotated[int, typer.Option(help="Decode workers.")] = 8,
    capacity: Annotated[int, typer.Option(help="Blocks a worker.")] = 2500,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    names: Annotated[str, typer.Option("--router", help="Names, by commas.")] = ",".join(ROUTERS),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write recipe and results there.")
    ] = None,
) -> None:
    """The embedded router beside Dynamo's selection service: hits, spread, time of a decision."""
    console, results, times = Console(), [], ServiceTimes()
    for trace in traces:
        loaded, outputs = read_trace(trace, limit=requests), output_lengths(trace, requests)
        for name in names.split(","):
            row = run(name, loaded, outputs, workers, capacity, times, python)
            results.append({"trace": trace.name, "requests": len(loaded.requests), **row})
            console.print(results[-1], highlight=False, soft_wrap=True)
    if json_file is not None:
        recipe = {
            "command": "python -m benchmarks fleet " + " ".join(trace.name for trace in traces),
            "service": "dynamo.select_service of ai-dynamo-runtime 1.6.1, its defaults",
            "service_times": asdict(times),
            "block_hit_ratio": "blocks found where sent / all hash ids, the partial last block "
            "included",
            "load": "max / mean over the workers, as in router.json",
            "decision_us": "wall time of one decision, on a machine that others use too: embedded, "
            "with the hashing of the prompt; service, with JSON and HTTP, from Python",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        text = json.dumps({"recipe": recipe, "results": results}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")


def run(
    name: str,
    trace: Trace,
    outputs: list[int],
    workers: int,
    capacity: int,
    times: ServiceTimes,
    python: str,
) -> dict[str, Any]:
    """One way to route, over one trace."""
    if name not in ROUTERS:
        raise ConfigError(f"--router {name!r} is not one of {', '.join(ROUTERS)}")
    if name != "service":
        return _row(FleetSimulation(trace, outputs, workers, capacity, times), name)
    with SelectService(python, Path(os.devnull)) as service:
        simulation = FleetSimulation(trace, outputs, workers, capacity, times, service)
        try:
            row = _row(simulation, name)
        finally:
            simulation.close()
        nothing_s = []
        for _ in range(1000):
            began_s = time.perf_counter()
            service.ask("GET", "/health")
            nothing_s.append(time.perf_counter() - began_s)
        return row | {"nothing_us": _percentiles(nothing_s)}


def _row(simulation: FleetSimulation, name: str) -> dict[str, Any]:
    result = asdict(simulation.run(name))
    for left_out in ("settings", "stats"):
        del result[left_out]
    if simulation.decisions_s:
        result["decision_us"] = _percentiles(simulation.decisions_s)
    if name == "service":
        result["decisions_on_a_late_index"] = simulation.num_late
    return result


def _percentiles(times_s: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(times_s, q)) * 1e6, 1) for q in (50, 99)}
