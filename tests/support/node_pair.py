"""Stand-in engines around a DecodeNode and a PrefillNode: the scheduler loops of the tests that run
real nodes. Workers of several ranks, with window layers or extra state: `mesh_workers`.

Both compute the KV pattern of the demo, which follows from the whole prefix, the layer, K or V, and
the head of the *model*; so every byte of every page a request holds can be checked at any time, on
any rank. `step` never blocks. A test may keep prefill from computing (`hold`), or decode from
going on (`hold_running`), to stop a request in the state it wants.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from prefixkv import DecodeNode, KVPool, Mesh, OutOfPagesError, PrefillNode, PrefillRequest, Request
from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import RadixKey
from prefixkv.conformance.pattern import Hashes, PrefixHasher, sample
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.pages.manager import PageManager
from prefixkv.serving.router import WorkerIndex
from tests.laws.auditor import assert_at_rest
from tests.support.devices import DEVICE
from tests.support.patience import PATIENCE_S
from tests.support.patterns import pattern_in
from tests.support.schedulers import decode_scheduler, prefill_scheduler
from tests.support.wires import is_shm

Tokens = npt.NDArray[np.int32]
SALT = 99

_hasher = PrefixHasher()


def tokens_of(seed: int, count: int) -> Tokens:
    """`count` tokens; a longer run of the same seed begins with a shorter one."""
    return np.random.default_rng(seed).integers(0, 50_000, 100_000, dtype=np.int32)[:count]


def make_pool(num_pages: int = 64, page_size: int = 4, **options: Any) -> KVPool:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "device": DEVICE}
    return KVPool.create(num_pages, page_size, **sizes | {"shared": is_shm()} | options)


def first_token(tokens: Tokens) -> int:
    """What follows these tokens."""
    return int(sample(_hasher.prefixes(tokens)[-1:])[0])


class RankKV:
    """The KV of one rank: of the pool, of groups that have its pages, and of groups that keep a
    window. `meshes`: how the heads of each are shared out, where they are."""

    def __init__(self, pool: KVPool, meshes: Sequence[Mesh] = (), rank: int = 0) -> None:
        pools = [pool, *(group.pool for group in pool.groups)]
        places = [(mesh, rank) for mesh in meshes] or [None] * len(pools)
        first, *others = (
            pattern_in(one, SALT, place) for one, place in zip(pools, places, strict=True)
        )
        of_groups = list(zip(pool.groups, others, strict=True))
        self.pattern = first
        self.full = [first, *(pattern for group, pattern in of_groups if not group.window)]
        self.windows = [(group, pattern) for group, pattern in of_groups if group.window]

    def fill(self, view: View, start: int, hashes: Hashes) -> None:
        for pattern in self.full:
            pattern.fill(view.pages, start, hashes)
        for group, pattern in self.windows:
            first, ids = view.window_pages(group.name)
            behind = first * pattern.page_size
            pattern.fill(ids, start - behind, hashes[behind:])

    def mismatches(self, view: View, hashes: Hashes) -> int:
        """Over all that the next token sees."""
        wrong = sum(pattern.mismatches(view.pages, hashes) for pattern in self.full)
        for group, pattern in self.windows:
            first, ids = view.window_pages(group.name)
            behind = first * pattern.page_size
            assert behind <= max(0, len(hashes) + 1 - group.window), "the window is not all there"
            wrong += pattern.mismatches(ids, hashes[behind:])
        return wrong


class View(NamedTuple):
    """A request's pages as one rank knows them."""

    pages: Any
    window_pages: Callable[[str], Any]


class PrefillDriver:
    """Prefill's engine. Computes `chunk` tokens a step of each request it does not hold. With
    `router`, what routers are told of is what can be used, and all of it."""

    def __init__(
        self, node: PrefillNode, chunk: int = 8, ranks: Sequence[RankKV] = (), router: bool = False
    ) -> None:
        self.node = node
        self.chunk = chunk
        self.ranks = ranks or [RankKV(node.pool)]
        self.router = WorkerIndex(10_000) if router else None
        self.starts: dict[str, int] = {}
        self.hold = False
        self.aux: Callable[[PrefillRequest], bytes] = lambda req: first_token(req.tokens).to_bytes(
            4, "little"
        )
        self.ready: dict[tuple[str, int], Any] = {}  # by request and number of the chunk
        self.computing: dict[str, PrefillRequest] = {}
        self.computed: dict[str, int] = {}
        self.chunks: dict[str, int] = {}
        self.sent: list[str] = []
        self.failed: dict[str, Exception | None] = {}
        self.mismatches = 0

    def add(
        self, rid: str, tokens: Tokens, room: int, generation: int = 0, decode: str = "decode-0"
    ) -> None:
        self.node.add(Request(rid, tokens, room=room, generation=generation, decode=decode))

    def step(self) -> None:
        for req in self.node.pop_bootstrapped():
            hashes = _hasher.prefixes(req.tokens)
            for rank, view in zip(self.ranks, self.views(req), strict=True):
                self.mismatches += rank.mismatches(view, hashes[: req.prefix_len])
            self.computing[req.rid] = req
            self.computed[req.rid] = self.starts[req.rid] = req.prefix_len
            if self.router is not None:
                assert self.router.apply(self.node.take_cache_events())
                page_size = self.node.pool.layout.page_size
                keys = page_keys(RadixKey(req.tokens[:-1]).data, page_size)
                assert req.prefix_len == self.router.depth(None, keys) * page_size
            self.chunks[req.rid] = 0
        for req in self.node.pop_failed():
            self.computing.pop(req.rid, None)
            self.failed[req.rid] = req.error
        if not self.hold:
            for req in list(self.computing.values()):
                self.compute(req)
        for req in self.node.pop_sent():
            self.sent.append(req.rid)

    def compute(self, req: PrefillRequest) -> None:
        """One chunk of this request, also while holding."""
        if req.state.ended:
            return
        start = self.computed[req.rid]
        end = min([start + self.chunk, req.num_tokens, *(at for at in req.stops if at > start)])
        last = end == req.num_tokens
        if last and not self.may_end(req):
            return
        self.fill(req, start, end)
        more = self.state_of(req, start, end)
        ready = self.ready.get((req.rid, self.chunks[req.rid]))
        self.node.send_chunk(req, end, last, self.aux(req) if last else b"", ready, **more)
        self.computed[req.rid] = end
        self.chunks[req.rid] += 1
        if last:
            del self.computing[req.rid]

    def fill(self, req: PrefillRequest, start: int, end: int) -> None:
        hashes = _hasher.prefixes(req.tokens)[:end]
        for rank, view in zip(self.ranks, self.views(req), strict=True):
            rank.fill(view, start, hashes)

    def views(self, req: PrefillRequest) -> list[Any]:
        """The request on each rank; the others know what the log has told them."""
        views: list[Any] = [req]
        node: Any = self.node
        if len(self.ranks) > 1:
            node._hand_log()
            views += [other.request(req.rid) for other in node.others]
        assert {(one.prefix_len, *one.stops) for one in views} == {(req.prefix_len, *req.stops)}
        return views

    def may_end(self, req: PrefillRequest) -> bool:
        """Whether this engine has what the last chunk takes."""
        return True

    def state_of(self, req: PrefillRequest, start: int, end: int) -> dict[str, Any]:
        """The chunk is computed; returns what goes with it."""
        return {}


class DecodeDriver:
    """Decode's engine. `ask(rid, tokens, room, generation)` hands a prompt to prefill's."""

    def __init__(
        self, node: DecodeNode, ask: Callable[[str, Tokens, int, int], None],
        ranks: Sequence[RankKV] = (),
    ) -> None:  # fmt: skip
        self.node = node
        self.ask = ask
        self.ranks = ranks or [RankKV(node.pool)]
        self.hold_running = False
        self.untrusted = ""  # requests whose ids begin so are served by no honest prefill
        self.together = (
            False  # who is admitted runs once all who are admitted have arrived, on any machine
        )
        self.prompts: dict[str, Tokens] = {}
        self.running: dict[str, DecodeRequest] = {}
        self.ended: dict[str, Exception | None] = {}  # None: finished
        self.outputs: dict[str, list[int]] = {}
        self.prefix_lens: dict[str, list[int]] = {}  # of each admission that brought KV
        self.mismatches = 0
        self.wrong_aux = 0
        self.retracted: list[str] = []
        self._rooms = 0

    def submit(
        self,
        rid: str,
        tokens: Tokens,
        prefill: str,
        max_new_tokens: int = 4,
        *,
        room: int = -1,
        tell: bool = True,
    ) -> DecodeRequest:
        """A request to both sides; to decode alone with `tell` False."""
        self._rooms += 1
        room = 1000 * self._rooms if room < 0 else room
        req = self.node.add(
            Request(rid, tokens, max_new_tokens=max_new_tokens, room=room, prefill=prefill)
        )
        self.prompts[rid] = tokens
        self.prefix_lens[rid] = []
        if tell:
            self.ask(rid, tokens, room, 0)
        return req

    def step(self) -> None:
        self.node.pop_preallocated()
        for ask in self.node.pop_needs_prefill():
            self.ask(
                f"{ask.rid}.{ask.generation}", np.asarray(ask.tokens), ask.room, ask.generation
            )
        for req in self.node.pop_failed():
            self.running.pop(req.rid, None)
            self.ended[req.rid] = req.error
        arrived = self.node.pop_transferred()
        for req in arrived:
            self.check(req)
            self.prefix_lens[req.rid].append(req.prefix_len)
            self.running[req.rid] = req
        self._append([req for req in arrived if not req.resumed])
        if not self.hold_running and not (self.together and self.node.prefill.open):
            self._run([req for req in self.running.values() if req not in arrived])

    def check(self, req: DecodeRequest) -> None:
        """Every byte of the request's KV, and what came with it."""
        if self.untrusted and req.rid.startswith(self.untrusted):
            return
        hashes = _hasher.prefixes(req.tokens[: req.kv_len])
        for rank, view in zip(self.ranks, self.views(req), strict=True):
            self.mismatches += rank.mismatches(view, hashes)
        if not req.resumed:
            self.wrong_aux += req.aux != first_token(req.key.tokens()).to_bytes(4, "little")

    def views(self, req: DecodeRequest) -> list[View]:
        """The request on each rank, whose page table has to say the same pages."""
        views, node = [View(req.pages, req.window_pages)], cast(Any, self.node)
        if len(self.ranks) > 1:
            for other, pages in zip(node.others, node.pages_of(req)[1:], strict=True):
                assert pages.tolist() == req.pages.tolist()
                views.append(View(pages, partial(other.window_pages, req.row)))
        return views

    def _run(self, reqs: list[DecodeRequest]) -> None:
        for req in reqs:
            if len(req.output) >= req.max_new_tokens:
                self.check(req)
                self.outputs[req.rid] = list(req.output)
                self.ended[req.rid] = None
                del self.running[req.rid]
                self.node.finish(req)
        self._append([req for req in reqs if req.state is not DecodeState.FINISHED], write=True)

    def _append(self, reqs: list[DecodeRequest], write: bool = False) -> None:
        """Write the KV of each request's newest token, then sample the next; retract until all of
        it fits."""
        for req in reqs if write else ():
            for rank, view in zip(self.ranks, self.views(req), strict=True):
                rank.fill(view, len(req.tokens) - 1, _hasher.prefixes(req.tokens))
        while reqs:
            try:
                self.node.append_many(reqs, [first_token(req.tokens) for req in reqs])
            except OutOfPagesError as error:
                victim = error.retract[0]
                self.node.retract(victim)
                self.running.pop(victim)
                self.retracted.append(victim)
                reqs = [req for req in reqs if req.rid != victim]
            else:
                return


class NodePair:
    """Two nodes of this process, and their engines taking turns."""

    def __init__(
        self, decode: DecodeNode, prefill: PrefillNode, p: Any = None, d: Any = None
    ) -> None:
        self.decode, self.prefill = decode, prefill
        self.p = p or PrefillDriver(prefill)
        self.d = d or DecodeDriver(decode, partial(self.p.add, decode=decode.peer_id.name))

    @property
    def failed(self) -> dict[str, Exception]:
        """Of decode's."""
        return {rid: error for rid, error in self.d.ended.items() if error is not None}

    def submit(
        self, rid: str, tokens: Tokens, max_new_tokens: int = 4, **options: Any
    ) -> DecodeRequest:
        return self.d.submit(rid, tokens, self.prefill.endpoint, max_new_tokens, **options)

    def step(self) -> None:
        self.d.step()
        self.p.step()

    def until(self, done: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Step until it is so. Sleeps on the nodes' descriptors while nothing happens."""
        drive_until(done, [self.d, self.p], patience_s)

    def run(self, *rids: str) -> None:
        """Until all of these have ended on decode, and nothing is under way any more."""
        self.until(lambda: all(rid in self.d.ended for rid in rids))
        self.settle()

    def settle(self) -> None:
        self.until(lambda: not left(self.decode) and not left(self.prefill))

    def check_at_rest(self) -> None:
        """Every law holds, every byte was right, nothing is locked, owned or held."""
        self.settle()
        assert self.d.mismatches == self.d.wrong_aux == self.p.mismatches == 0
        for node in (self.decode, self.prefill):
            node_at_rest(node)


def left(node: DecodeNode | PrefillNode) -> dict[str, int]:
    """What keeps a node from rest."""
    stats = node.stats()
    names = ("requests", "rooms", "locks", "pages_owned", "pages_held", "pages_quarantined")
    others = sum(other.num_rooms for other in getattr(node, "others", ()))
    return {name: stats[name] for name in names if stats[name]} | (
        {"others": others} if others else {}
    )


def scheduling(node: DecodeNode | PrefillNode) -> dict[str, Any]:
    """What a node has as a scheduler: no threads, no memory."""
    make = decode_scheduler if isinstance(node, DecodeNode) else prefill_scheduler
    names = vars(make(PageManager(4, 2, 2)))
    return {name: value for name, value in vars(node).items() if name in names}


def node_at_rest(node: DecodeNode | PrefillNode) -> None:
    node.audit()
    assert_at_rest(node)
    assert left(node) == {}


def drive_until(
    done: Callable[[], bool],
    drivers: Iterable[DecodeDriver | PrefillDriver],
    patience_s: float = PATIENCE_S,
) -> None:
    """Step the engines until it is so; sleep on the nodes' descriptors while nothing happens."""
    drivers = list(drivers)
    poller = select.poll()
    for driver in drivers:
        poller.register(driver.node.fileno(), select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while True:
        for driver in drivers:
            driver.step()
        if done():
            return
        if time.monotonic() > deadline_s:
            raise AssertionError(
                f"not within {patience_s} s; {[driver.node.stats() for driver in drivers]}"
            )
        busy = any(
            d.running if isinstance(d, DecodeDriver) else d.computing and not d.hold
            for d in drivers
        )
        with contextlib.suppress(InterruptedError):
            poller.poll(0 if busy else 5)
