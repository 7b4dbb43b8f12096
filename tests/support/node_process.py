"""A PrefillNode or DecodeNode and its stand-in engine in a process of their own."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from typing import Any

import torch

from prefixkv import PrefillNode
from prefixkv.conformance.pattern import PrefixHasher
from prefixkv.prefill.request import PrefillRequest
from tests.support.gates import Gate
from tests.support.node_pair import PrefillDriver
from tests.support.patience import PATIENCE_S, SkippableClock
from tests.support.patterns import MirroredPattern
from tests.support.processes import Child, answer, children

POISON, CYCLES = 0xA5, 200_000_000
_hasher = PrefixHasher()


class LatePrefillDriver(PrefillDriver):
    """Computes on a stream of its own, behind `CYCLES` in which the GPU does nothing. Until then a
    chunk's slots are poison. `pending` counts the chunks whose event was not over when
    `send_chunk` had returned.
    """

    def __init__(self, node: PrefillNode) -> None:
        super().__init__(node)
        self.pending = 0
        self._cuda: Any = torch.cuda  # in parts untyped
        self._stream = self._cuda.Stream(node.pool.device)
        self._late: list[torch.Tensor] = []  # what a copy still reads

    def compute(self, req: PrefillRequest) -> None:
        pool, pattern = self.node.pool, self.ranks[0].pattern
        assert isinstance(pattern, MirroredPattern)
        hashes = _hasher.prefixes(req.tokens)
        start = self.computed[req.rid]
        end = min(start + self.chunk, req.num_tokens)
        touched = pattern.fill_mirror(req.pages, start, hashes[:end])
        data = pattern.mirror.read_pages(touched).to(pool.device)
        self._poison(touched, start - start // pattern.page_size * pattern.page_size)
        index = torch.tensor(touched, dtype=torch.int64, device=pool.device)
        self._late += [data, index]
        self._cuda.synchronize(pool.device)
        with self._cuda.stream(self._stream):
            self._cuda._sleep(CYCLES)
            for layer in range(pool.layout.num_layers):
                for kv, view in enumerate((pool.k(layer), pool.v(layer))):
                    view[index] = data[:, 2 * layer + kv].contiguous().view(view.dtype)
            ready = self._cuda.Event()
            ready.record(self._stream)
        last = end == req.num_tokens
        self.node.send_chunk(req, end, last, self.aux(req) if last else b"", ready)
        self.pending += not ready.query()
        self.computed[req.rid] = end
        if last:
            del self.computing[req.rid]

    def _poison(self, touched: Any, kept_slots: int) -> None:
        """All slots of the pages but the first ones of the first page, which were sent before."""
        bytes_there = self.node.pool.read_pages(touched)
        kept = bytes_there[0, :, :kept_slots].clone()
        bytes_there.fill_(POISON)
        bytes_there[0, :, :kept_slots] = kept
        self.node.pool.write_pages(touched, bytes_there)


class SignalSelf:
    """A device event that sends its own process a signal the first time it is asked, and then is
    done.

    The transport's thread asks, between two writes: what was posted before is under way, and what
    is posted next is posted after whatever the signal did.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        # To this thread: one for the process would be taken by another, and we might go on for a
        # moment.
        signal.pthread_kill(threading.get_ident(), self.number)
        return True


EVENTS = {"stop": SignalSelf(signal.SIGSTOP), "kill": SignalSelf(signal.SIGKILL), "never": Gate()}


class NodeCalls:
    """In the child: a node, its driver, and what the test may call on them."""

    def __init__(self, side: str, config: Any, pool: dict[str, Any]) -> None:
        from prefixkv import DecodeNode, PrefillNode
        from tests.support.node_pair import DecodeDriver, PrefillDriver, make_pool
        from tests.support.wires import wired

        self.node: Any
        self.driver: Any
        self.closed = False
        self.clock = SkippableClock()
        self.clock.install()
        if side == "prefill":
            self.node = PrefillNode(make_pool(**pool), wired(config))
            self.driver = PrefillDriver(self.node)
        else:
            self.node = DecodeNode(make_pool(**pool), wired(config))
            self.driver = DecodeDriver(self.node, lambda *ask: None)  # the test tells prefill

    def late(self) -> None:
        """Prefill computes on a stream of the GPU's, and hands chunks over before that is over."""

        self.driver = LatePrefillDriver(self.node)

    def set(self, **attributes: Any) -> None:
        """Attributes of the driver."""
        for name, value in attributes.items():
            setattr(self.driver, name, value)

    def get(self, name: str) -> Any:
        """An attribute of the driver; errors as text."""
        value = getattr(self.driver, name)
        if isinstance(value, dict):
            return {key: repr(v) if isinstance(v, Exception) else v for key, v in value.items()}
        return value

    def take_ended(self) -> dict[str, str | None]:
        """What has ended on decode since the last call, and why; None: it finished."""
        ended, self.driver.ended = self.driver.ended, {}
        for rid in ended:
            for kept in (self.driver.prompts, self.driver.outputs, self.driver.prefix_lens):
                kept.pop(rid, None)
        return {rid: error and repr(error) for rid, error in ended.items()}

    def names(self, name: str) -> list[str]:
        """The keys of an attribute of the driver."""
        return list(getattr(self.driver, name))

    def ready(self, rid: str, chunk: int, event: str) -> None:
        """Chunk number `chunk` of this request waits for that event."""
        self.driver.ready[rid, chunk] = EVENTS[event]

    def add(self, *args: Any) -> None:
        self.driver.add(*args)

    def submit(self, *args: Any, **options: Any) -> None:
        self.driver.submit(*args, **options)

    def abort(self, rid: str) -> bool:
        known: bool = self.node.abort(rid)
        return known

    def fence(self, name: str, incarnation: int) -> None:
        self.node.fence(name, incarnation)

    def skip(self, seconds: float) -> None:
        self.clock.skip(seconds, [self.node])

    def fork(self) -> int:
        """A process that does nothing; its pid. It outlives this one."""
        pid = os.fork()
        if not pid:
            while True:
                signal.pause()
        return pid

    def meets(self, address: str) -> Any:
        """The peer at this address, and how it is."""
        return self.node.peers().get(address)

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.node.stats()
        return stats

    def close(self) -> None:
        from prefixkv.runtime import control_thread

        control_thread._FAREWELL_S = PATIENCE_S  # it is to arrive, however slow the machine
        self.node.close()
        self.closed = True

    def check_at_rest(self) -> None:
        from tests.support.node_pair import node_at_rest

        assert self.driver.mismatches == 0
        node_at_rest(self.node)


def serve(pipe: Any, side: str, config: Any, pool: dict[str, Any] | None = None) -> None:
    """In the child: the scheduler loop of the node's engine, which answers calls between turns."""
    served = NodeCalls(side, config, pool or {})
    pipe.send((served.node.peer_id, getattr(served.node, "endpoint", "")))
    while not served.closed:
        served.driver.step()
        busy = bool(getattr(served.driver, "running", None)) or (
            side == "prefill" and bool(served.driver.computing) and not served.driver.hold
        )
        wait([pipe, served.node.fileno()], 0 if busy else 1.0)
        while not served.closed and pipe.poll():
            answer(pipe, served)


class NodeProcess(Child):
    """The test's end: `NodeProcess(side, config, pool)`, then `call` of any method of `NodeCalls`.

    A subclass with another `serve` takes what that takes.
    """

    serve: Callable[..., None] = staticmethod(serve)

    def __init__(self, *args: Any) -> None:
        super().__init__(self.serve, *args)
        self.peer_id, self.endpoint = self.hello

    def close(self) -> None:
        """Close its node cleanly, and see it end."""
        self.call("close")
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0, self.stderr()


def node_processes() -> AbstractContextManager[Any]:
    """Yields a starter of processes, `start(side, config, pool)`."""
    return children(NodeProcess)
