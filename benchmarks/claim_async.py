"""Claim: a transport thread sees writes through while the scheduler computes; posting inline waits
for the next step.

A prefill scheduler computes for 10 ms a step (asleep, as it is with a GPU at work, or in torch on
its own core); each step leaves 4 MiB of KV to be sent to the next of eight decode agents. *inline*:
the scheduler's loop posts, and looks once a step at what is under way. *thread*: it hands
`NixlTransport` a job. Measured from KV ready to completion seen, how long the scheduler was kept,
and what a step took in all. And through whole nodes, eight decode nodes: `send_chunk`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.pair import (
    Claim,
    Row,
    Stuck,
    Watch,
    load_of,
    paired_ratio,
    quantiles,
    run_pair,
    turn_about,
)
from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.tags import ChunkTag

SIDES: Final = ("inline", "thread")
_PAGES_A_CHUNK: Final = 2
_POLL_S: Final = 50e-6  # between two looks of the decode side at its notifications
_NAMES: Final = ("mean", "p99", "kept_mean", "kept_p99", "step")


@dataclass(frozen=True)
class Steps:
    compute: str = "sleep"
    step_s: float = 0.01
    steps: int = 64
    num_peers: int = 8
    num_layers: int = 32  # 2 MiB a page
    repeats: int = 12
    patience_s: float = 25.0

    def pool(self, num_pages: int) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(num_pages, 16, self.num_layers, 8, 128)

    def computing(self) -> Callable[[], None]:
        """One step's compute: about `step_s` when nothing else wants the core."""
        if self.compute == "sleep":
            return lambda: time.sleep(self.step_s)
        import torch

        a, b = torch.ones(192, 192), torch.ones(192, 192)

        def multiply(times: int) -> float:
            began_s = time.perf_counter()
            for _ in range(times):
                torch.mm(a, b)
            return time.perf_counter() - began_s

        multiply(200)
        times = max(1, int(self.step_s / min(multiply(100) / 100 for _ in range(10))))

        def compute() -> None:
            multiply(times)

        return compute


# --- transport: inline against thread -------------------------------------------------------------


def receiving_side(pipe: Connection, _watch: Watch, case: Steps) -> None:
    """Eight agents with a pool each, whose notifications are polled without end."""
    from benchmarks.raw import make_agent
    from prefixkv.transport.metadata.nixl_form import nixl_name

    pools = [case.pool(_PAGES_A_CHUNK) for _ in range(case.num_peers)]
    peers = [PeerId(f"decode-{number}", 1) for number in range(case.num_peers)]
    agents = [
        make_agent(nixl_name(peer), pool.layout) for peer, pool in zip(peers, pools, strict=True)
    ]
    pipe.send(
        [
            (p, bytes(a.get_agent_metadata()), pool.layout)
            for p, a, pool in zip(peers, agents, pools, strict=True)
        ]
    )
    while not pipe.poll():
        if not sum(len(agent.get_new_notifs()) for agent in agents):
            time.sleep(_POLL_S)
    pipe.recv()
    pipe.send(None)


class _Inline:
    """Posts and looks in the scheduler's loop, with lists prepared and posts as large as the
    transport's."""

    def __init__(self, pool: Any, peers: Any) -> None:
        from benchmarks.raw import make_agent
        from prefixkv.transport.metadata.nixl_form import nixl_name
        from prefixkv.transport.runs import paired_runs

        self._config = TransportConfig()
        self._agent = make_agent("inline", pool.layout)
        self._peers = []
        for peer, metadata, layout in peers:
            self._agent.add_remote_agent(metadata)
            runs = paired_runs(pool.layout, layout)
            local = self._agent.prep_xfer_dlist("", runs.src, "DRAM")
            self._peers.append(
                (runs, local, self._agent.prep_xfer_dlist(nixl_name(peer), runs.dst, "DRAM"))
            )
        self._going: dict[int, list[Any]] = {}
        self.done_s: dict[int, float] = {}

    def send(self, number: int, peer: int, src: Any, dst: Any) -> None:
        from prefixkv.transport.parts import cut_parts, part_indices

        runs, local, remote = self._peers[peer]
        handles = self._going[number] = []
        for part in cut_parts(
            runs, src, dst, self._config.post_bytes, self._config.post_descriptors
        ):
            ours, theirs = part_indices(runs, part, src, dst)
            handle = self._agent.make_prepped_xfer("WRITE", local, ours, remote, theirs, b"part")
            self._agent.transfer(handle)
            handles.append(handle)
        self.look()

    def look(self) -> bool:
        """Once at everything under way. True when nothing is any more."""
        for number, handles in list(self._going.items()):
            left = []
            for handle in handles:
                if self._agent.check_xfer_state(handle) == "DONE":
                    handle.release()
                else:
                    left.append(handle)
            self._going[number] = left
            if not left:
                self.done_s[number] = time.monotonic()
                del self._going[number]
        return not self._going


class _Thread:
    """Hands jobs to the transport's thread, which says when they are done."""

    def __init__(self, pool: Any, peers: Any) -> None:
        from prefixkv.transport.nixl.transport import NixlTransport

        self._peers = [peer for peer, _, _ in peers]
        self.done_s: dict[int, float] = {}
        self._sent = 0
        self._transport = NixlTransport(PeerId("thread", 1), pool.layout, self._take)
        for peer, metadata, layout in peers:
            self._transport.add_peer(peer, metadata, layout)

    def _take(self, event: Any) -> None:
        from prefixkv.transport.base import WriteDone

        assert isinstance(event, WriteDone), event
        self.done_s[event.job_id] = time.monotonic()

    def send(self, number: int, peer: int, src: Any, dst: Any) -> None:
        from prefixkv.transport.base import WriteJob

        self._sent += 1
        tag = ChunkTag(1, peer, 0, rank=0, chunk=number)
        self._transport.write(WriteJob(number, self._peers[peer], src, dst, tag))

    def look(self) -> bool:
        return len(self.done_s) == self._sent

    def close(self) -> None:
        self._transport.close()


def scheduling_side(pipe: Connection, watch: Watch, case: Steps) -> Row:
    pool = case.pool(_PAGES_A_CHUNK * case.num_peers)
    peers = pipe.recv()
    thread = _Thread(pool, peers)
    ways: dict[str, _Inline | _Thread] = {"inline": _Inline(pool, peers), "thread": thread}
    compute = case.computing()
    dst = np.arange(_PAGES_A_CHUNK, dtype=np.int32)
    numbers = 0

    def run(way: _Inline | _Thread, steps: int) -> dict[str, list[float]]:
        """Seconds from ready to seen, that the scheduler was kept, and of all the steps."""
        nonlocal numbers
        ready_s: dict[int, float] = {}
        kept: list[float] = []
        began_s = time.monotonic()
        for _ in range(steps):
            compute()
            peer = numbers % case.num_peers
            src = np.arange(_PAGES_A_CHUNK, dtype=np.int32) + np.int32(peer * _PAGES_A_CHUNK)
            ready_s[numbers] = time.monotonic()
            way.send(numbers, peer, src, dst)
            kept.append(time.monotonic() - ready_s[numbers])
            numbers += 1
        step_s = (time.monotonic() - began_s) / steps
        while not way.look():  # what is left of the last steps, one look a step as before
            compute()
        return {
            "seen": [way.done_s[n] - at for n, at in ready_s.items()],
            "kept": kept,
            "step": [step_s],
        }

    for way in ways.values():
        run(way, case.num_peers)
    runs: list[dict[str, dict[str, list[float]]]] = []

    def repetition(number: int) -> Row:
        taken = {side: run(ways[side], case.steps) for side in turn_about(SIDES, number)}
        runs.append(taken)
        row: Row = {"number": number}
        for side, figures in taken.items():
            seen, kept = np.array(figures["seen"]), np.array(figures["kept"])
            values = (
                seen.mean(),
                np.percentile(seen, 99),
                kept.mean(),
                np.percentile(kept, 99),
                figures["step"][0],
            )
            row |= {
                f"{side}_{name}": float(value) for name, value in zip(_NAMES, values, strict=True)
            }
        return row

    rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
    thread.close()
    pipe.send(None)
    pipe.recv()
    kept_runs = [runs[row["number"]] for row in rows]

    def pooled(side: str, what: str) -> list[float]:
        return [value for taken in kept_runs for value in taken[side][what]]

    p99 = {side: float(np.percentile(pooled(side, "seen"), 99)) for side in SIDES}
    return {
        "compute": case.compute,
        "inline_over_thread_p99_of_all": round(p99["inline"] / p99["thread"], 3),
        "chunk_mib": _PAGES_A_CHUNK * pool.layout.page_bytes / 2**20,
        "steps": case.steps,
        **{
            f"inline_over_thread_{name}": paired_ratio(rows, f"inline_{name}", f"thread_{name}")
            for name in _NAMES
        },
        "seen_ms": {side: quantiles(pooled(side, "seen"), 1e-3) for side in SIDES},
        "scheduler_kept_ms": {side: quantiles(pooled(side, "kept"), 1e-3, 4) for side in SIDES},
        "step_ms": {side: round(1e3 * float(np.median(pooled(side, "step"))), 3) for side in SIDES},
        **load_of(rows),
    }


# --- send_chunk through whole nodes ---------------------------------------------------------------


def nodes_side(pipe: Connection, _watch: Watch, case: Steps) -> None:
    """Eight decode nodes; told a round's number they ask for its requests, and say when all have
    come."""
    from prefixkv.request import Request
    from prefixkv.runtime.decode_node import DecodeNode

    endpoint = pipe.recv()
    num_pages = _chunks(case) * _PAGES_A_CHUNK + 8
    nodes = [
        DecodeNode(case.pool(num_pages), DecodeConfig(name=f"decode-{n}"))
        for n in range(case.num_peers)
    ]
    while (number := pipe.recv()) is not None:
        left = set(range(case.num_peers))
        for peer, node in enumerate(nodes):
            node.flush()
            prompt, room = _prompt(case, number, peer)
            node.add(Request(str(room), prompt, max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
        while left:
            for peer in list(left):
                nodes[peer].pop_preallocated()
                for req in nodes[peer].pop_transferred():
                    nodes[peer].append_many([req], [7])
                    nodes[peer].finish(req)
                    left.discard(peer)
                assert not nodes[peer].pop_failed()
            if left:
                nodes[min(left)].wait(0.02)
        pipe.send("all have come")
    for node in nodes:
        node.close()


def _chunks(case: Steps) -> int:
    """Of each request."""
    return max(1, case.steps // case.num_peers)


def _prompt(case: Steps, number: int, peer: int) -> tuple[Any, int]:
    room = number * case.num_peers + peer
    tokens = _chunks(case) * _PAGES_A_CHUNK * 16
    return np.random.default_rng(room).integers(0, 50_000, tokens, dtype=np.int32), room


class Call(NamedTuple):
    """What a call took of this thread, or the clocks when it began."""

    wall_s: float
    cpu_s: float
    waits: int  # the thread gave its core up: for the GIL or a lock
    preempted: int  # its core was taken from it

    @classmethod
    def now(cls) -> Call:
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return cls(time.perf_counter(), time.thread_time(), used.ru_nvcsw, used.ru_nivcsw)

    def since(self, before: Call) -> Call:
        return Call(
            self.wall_s - before.wall_s,
            self.cpu_s - before.cpu_s,
            self.waits - before.waits,
            self.preempted - before.preempted,
        )


def _slowest(calls: list[Call]) -> Row:
    """Of the slowest hundredth: what they worked, and how many waited or lost their core."""
    num_slow = max(1, len(calls) // 100)
    others, slow = sorted(calls)[:-num_slow], sorted(calls)[-num_slow:]
    return {
        "calls": len(slow),
        "wall_us_p50": round(1e6 * float(np.median([call.wall_s for call in slow])), 1),
        "cpu_us_p50": round(1e6 * float(np.median([call.cpu_s for call in slow])), 1),
        "that_waited": sum(call.waits > 0 for call in slow),
        "that_lost_their_core": sum(call.preempted > 0 for call in slow),
        "others": len(others),
        "others_that_waited": sum(call.waits > 0 for call in others),
        "others_that_lost_their_core": sum(call.preempted > 0 for call in others),
    }


def sending_side(pipe: Connection, watch: Watch, case: Steps) -> Row:
    from prefixkv.request import Request
    from prefixkv.runtime.prefill_node import PrefillNode

    took: list[list[Call]] = []
    compute = case.computing()
    pool = case.pool(case.num_peers * _chunks(case) * _PAGES_A_CHUNK + 8)
    with PrefillNode(pool, PrefillConfig()) as node:
        stuck = Stuck(node)
        pipe.send(node.endpoint)

        def repetition(number: int) -> Row:
            node.flush()
            pipe.send(number)
            for peer in range(case.num_peers):
                prompt, room = _prompt(case, number, peer)
                node.add(Request(str(room), prompt, room=room, decode=f"decode-{peer}"))
            ready: list[Any] = []
            while len(ready) < case.num_peers:
                ready += stuck.until(node.pop_bootstrapped)
            took.append([])
            for chunk in range(_chunks(case)):
                end = (chunk + 1) * _PAGES_A_CHUNK * 16
                for req in ready:
                    compute()
                    before = Call.now()
                    node.send_chunk(req, end, last=chunk == _chunks(case) - 1)
                    took[-1].append(Call.now().since(before))
            sent = 0
            while sent < case.num_peers:
                sent += len(stuck.until(node.pop_sent))
            pipe.recv()
            return {"number": number}

        repetition(0)  # connects
        del took[0]
        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        pipe.send(None)
    calls = [call for row in rows for call in took[row["number"]]]
    pooled = [call.wall_s for call in calls]
    return {
        "compute": case.compute,
        "send_chunk_p99_us": round(1e6 * float(np.percentile(pooled, 99)), 1),
        "send_chunk_us": quantiles(pooled, 1e-6, 1),
        "send_chunk_cpu_us": quantiles([call.cpu_s for call in calls], 1e-6, 1),
        "slowest": _slowest(calls),
        **load_of(rows),
    }


# --- the claim ------------------------------------------------------------------------------------


def measure(quick: bool) -> tuple[list[Claim], Row]:
    case = Steps()
    if quick:
        case = Steps(step_s=0.001, steps=6, num_peers=2, num_layers=2, repeats=1, patience_s=0.0)
    claims: list[Claim] = []
    details: dict[str, list[Row]] = {"chunks": [], "send_chunk": []}
    for tls, compute in (
        (("tcp", "torch"),) if quick else product(("default", "tcp"), ("sleep", "torch"))
    ):
        env = {} if tls == "default" else {"UCX_TLS": tls}
        row = run_pair(scheduling_side, receiving_side, replace(case, compute=compute), env=env)
        details["chunks"].append({"ucx_tls": tls, **row})
        claims += _claims(tls, compute, row)
        row = run_pair(sending_side, nodes_side, replace(case, compute=compute), env=env)
        details["send_chunk"].append({"ucx_tls": tls, **row})
        where = f"{tls}, compute in {compute}: send_chunk P99"
        claims.append(Claim("async", where, row["send_chunk_p99_us"], "us", 100.0, at_least=False))
    return claims, details


def _claims(tls: str, compute: str, row: Row) -> list[Claim]:
    where = f"{tls}, compute in {compute}"
    aims = {"mean": 2.5, "p99_of_all": 4.0} if (tls, compute) == ("tcp", "sleep") else {}
    what = {
        "mean": "ready to seen, mean, inline / thread",
        "p99_of_all": "ready to seen, P99, inline / thread",
        "kept_mean": "scheduler kept a chunk, mean, inline / thread",
        "step": "a step with all that it costs, inline / thread",
    }
    targets = {**aims, "step": 1.0}
    return [
        Claim(
            "async",
            f"{where}: {text}",
            row[f"inline_over_thread_{name}"],
            "ratio",
            targets.get(name),
        )
        for name, text in what.items()
    ]
