"""The ranks of a prefill worker in step, whatever runs them. Pure.

A request is bootstrapped or sent when it is on all ranks, and failed as soon as it is on one, since
that rank's pages are not to be computed into any more. Each rank has a cache of its own, so pages
and `prefix_len` may differ from rank to rank: `ranks_of` gives all. What the methods return is
rank 0's request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from prefixkv.errors import RequestError
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import DeviceEvent, Request, check_rid


class PrefillCalls(Protocol):
    """Calls of an engine to one rank of a prefill worker: see PrefillNode."""

    def add(self, request: Request) -> PrefillRequest: ...

    def refuse(self, request: Request, reason: str = "refused") -> None: ...

    def pop_bootstrapped(self, limit: int | None = None) -> list[PrefillRequest]: ...

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int: ...  # fmt: skip

    def pop_sent(self) -> list[PrefillRequest]: ...

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]: ...

    def abort(self, rid: str) -> bool: ...

    def fail(self, rid: str, error: Exception) -> bool: ...

    def flush(self, weights_version: str | None = None) -> int: ...


NodeT = TypeVar("NodeT", bound=PrefillCalls)


class RankGroup(Generic[NodeT]):
    """The ranks of a prefill worker behind one object, kept in step. Used from one thread."""

    def __init__(self, nodes: Sequence[NodeT]) -> None:
        self.nodes = nodes
        self._reqs: dict[str, list[PrefillRequest]] = {}
        self._begun: dict[str, int] = {}
        self._num_ended: dict[str, int] = {}  # number of ranks on which it has ended
        self._ready: dict[str, PrefillRequest] = {}  # handed out by all ranks, to be returned
        self._failed: set[str] = set()  # returned as failed, while some ranks still have it
        # Ended on all ranks, and not returned yet: a later rank's call may have raised.
        self._to_return_sent: list[PrefillRequest] = []
        self._to_return_failed: list[PrefillRequest] = []

    def add(self, request: Request) -> PrefillRequest:
        reqs: list[PrefillRequest] = []
        try:
            for node in self.nodes:
                reqs.append(node.add(request))
        except BaseException:
            # Undo on the ranks that took it: they would wait for a promise that is meant for all.
            for node in self.nodes[: len(reqs)]:
                node.abort(request.rid)
            raise
        self._reqs[request.rid] = reqs
        self._begun[request.rid] = self._num_ended[request.rid] = 0
        return reqs[0]

    def refuse(self, request: Request, reason: str = "refused") -> None:
        for node in self.nodes:
            node.refuse(request, reason)

    def ranks_of(self, rid: str) -> list[PrefillRequest]:
        """Return the request on each prefill rank of the group, until it is popped as sent or
        failed. Raises RequestError for one that is not here."""
        check_rid(rid)
        if rid not in self._reqs:
            raise RequestError(f"request {rid!r} is not here")
        return self._reqs[rid]

    def pop_bootstrapped(self, limit: int | None = None) -> list[PrefillRequest]:
        """Return the requests that every prefill rank of the group has handed out. See
        `PrefillNode.pop_bootstrapped`.

        A request that one rank hands out early is kept for later.
        """
        for node in self.nodes:
            for req in node.pop_bootstrapped(limit):
                if req.rid in self._begun:
                    self._begun[req.rid] += 1
                    if self._begun[req.rid] == len(self.nodes) and req.rid not in self._failed:
                        self._ready[req.rid] = self._reqs[req.rid][0]
        rids = list(self._ready)[:limit]
        return [self._ready.pop(rid) for rid in rids]

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """Send a chunk on every prefill rank of the group; return the sum of the pages. See
        `PrefillNode.send_chunk`."""
        # 1. What is not here on every rank: rank 0 says what is wrong with it, or nothing, if it
        # has failed.
        reqs = self._reqs.get(req.rid) if isinstance(req, PrefillRequest) else None
        if reqs is None or reqs[0] is not req:
            return self.nodes[0].send_chunk(req, end, last, aux, ready, state_slot)
        # 2. It is being aborted on the other ranks: another chunk would write for a room that ends.
        if req.rid in self._failed:
            return 0
        pairs = zip(self.nodes, reqs, strict=True)
        return sum(node.send_chunk(mine, end, last, aux, ready, state_slot) for node, mine in pairs)

    def pop_sent(self) -> list[PrefillRequest]:
        for node in self.nodes:
            for req in node.pop_sent():
                failed = req.rid in self._failed
                if (ended := self._end(req.rid)) is not None and not failed:
                    self._to_return_sent.append(ended)
        # Returned only here, when no rank's call can raise any more: see `_to_return_sent`.
        sent, self._to_return_sent = self._to_return_sent, []
        return sent

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """Return the requests that failed on a prefill rank of the group, and abort each on the
        other ranks.

        See `PrefillNode.pop_failed`.
        """
        # The same list, not a copy: if a later rank raises, what was found stays in it for the next
        # call.
        failed = self._to_return_failed
        for node in self.nodes:
            for req in node.pop_failed(after):
                if req.rid not in self._reqs:
                    continue  # its `add` failed on another rank
                # Reported with its first failure; the ends on the other ranks are only counted.
                if req.rid not in self._failed:
                    self._failed.add(req.rid)
                    self._ready.pop(req.rid, None)
                    for other in self.nodes:
                        if other is not node:
                            other.abort(req.rid)
                    failed.append(self._reqs[req.rid][0])
                    failed[-1].error = req.error
                self._end(req.rid)
        self._to_return_failed = []
        return failed

    def abort(self, rid: str) -> bool:
        # A list, not a generator: `any` would stop at the first rank that knows the request.
        aborted = [node.abort(rid) for node in self.nodes]
        return any(aborted)

    def fail(self, rid: str, error: Exception) -> bool:
        failed = [node.fail(rid, error) for node in self.nodes]
        return any(failed)

    def flush(self, weights_version: str | None = None) -> int:
        """Flush every prefill rank of the group; return the sum of their pages. See
        `PrefillNode.flush`."""
        return sum(node.flush(weights_version) for node in self.nodes)

    def _end(self, rid: str) -> PrefillRequest | None:
        self._num_ended[rid] += 1
        if self._num_ended[rid] < len(self.nodes):
            return None
        del self._begun[rid], self._num_ended[rid]
        self._failed.discard(rid)
        return self._reqs.pop(rid)[0]
