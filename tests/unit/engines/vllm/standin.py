"""A stand-in of vLLM around both sides of the connector: an engine that calls the hooks in vLLM's
order, with a block pool and a prefix cache of vLLM's laws. It has no model: the KV of a token
follows from all tokens before it, so that every block can be looked at.

vLLM's own scheduler is in `tests/integration/vllm/liveness`.
"""

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from prefixkv.config import ControlConfig, ModelConfig
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.layout import pool_of
from prefixkv.engines.vllm.options import OPTION_NAMES, ConnectorOptions, ServerSetup
from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.worker import WorkerSide
from tests.support.patience import PATIENCE_S

BLOCK = 4  # tokens
HEADS, CONTENT, LAYERS = 2, 8, 2


class FullAttentionSpec:
    """Its name counts."""

    def __init__(self, block_size: int = BLOCK, num_kv_heads: int = HEADS) -> None:
        self.block_size, self.num_kv_heads = block_size, num_kv_heads
        self.head_size = self.head_size_v = CONTENT // 2
        self.kv_quant_mode = SimpleNamespace(name="NONE")
        self.state_content_bytes = self.num_head_slots = None


def kv_cache_config(num_blocks: int, block_size: int = BLOCK, num_kv_heads: int = HEADS) -> Any:
    group = SimpleNamespace(
        layer_names=[f"layer.{i}" for i in range(LAYERS)],
        kv_cache_spec=FullAttentionSpec(block_size, num_kv_heads),
        host_resident=False,
        enable_kv_transfer=True,
    )
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group], hash_block_size=None)


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        self.block_hash: bytes | None = None


class BlockPool:
    """vLLM's: a block is free where nobody has a reference, and cached where it has a hash."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free: list[Block] = list(self.blocks)
        self.cached: dict[bytes, Block] = {}

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block)

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def new_blocks(self, number: int) -> list[Block] | None:
        if number > len(self.free):
            return None
        taken, self.free = self.free[:number], self.free[number:]
        for block in taken:
            if block.block_hash is not None:
                del self.cached[block.block_hash]
                block.block_hash = None
            block.ref_cnt = 1
        return taken

    def evict(self, hashes: Iterable[bytes]) -> None:
        """They are not found any more; whoever has references keeps them."""
        for one in hashes:
            if (block := self.cached.pop(one, None)) is not None:
                block.block_hash = None

    def cache(self, block: Block, block_hash: bytes) -> None:
        if block.block_hash is None and block_hash not in self.cached:
            block.block_hash = block_hash
            self.cached[block_hash] = block


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Of the tokens up to each: below 2**20, so that float32 has them exactly."""
    found, last = [], 0
    for token in tokens:
        last = (last * 31 + token + 7) % 1_000_003
        found.append(last)
    return found


class Request:
    """The attributes of vLLM's that the connector reads, and those of the stand-in."""

    def __init__(self, rid: str, tokens: Sequence[int], params: Any = None, **more: Any) -> None:
        self.request_id = rid
        self.prompt_token_ids: list[int] | None = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.prompt_embeds = None
        self.resumable = self.abort_immediately = self.skip_reading_prefix_cache = False
        self.kv_transfer_params = params
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.mm_features: list[Any] = []
        self.kv_hints: Any = None
        self.session_id: str | None = None
        vars(self).update(more)
        self.salt = hash((self.cache_salt, self.lora_request and self.lora_request.lora_name))
        self.chain, self.all_token_ids = prefix_hashes(tokens), list(tokens)
        self.hash_blocks(BLOCK)
        self.blocks: list[Block] = []
        self.computed = self.num_in_flight_tokens = 0
        self.status = "waiting"
        self.answer: dict[str, Any] | None = None
        self.recomputed = False
        self.loaded_from: int | None = None  # tokens that were cached when it was loaded
        self.loaded_to = 0

    def hash_blocks(self, size: int) -> None:
        tokens = self.all_token_ids
        self.block_hashes = [
            hashlib.sha256(repr((self.salt, tuple(tokens[: end + 1]))).encode()).digest()
            for end in range(size - 1, len(tokens), size)
        ]

    @property
    def num_computed_tokens(self) -> int:
        return self.computed


def options(name: str, **more: Any) -> ConnectorOptions:
    said: dict[str, Any] = {
        "control": ControlConfig(heartbeat_s=0.1, resend_s=0.05, fence_settle_s=0.05)
    }
    return ConnectorOptions(name, **({"bind": "tcp://127.0.0.1:*"} | said | more))


PREFILL, DECODE = ServerSetup(True, False), ServerSetup(False, True)
BOTH = ServerSetup(True, True)


def side_of(
    setup: ServerSetup, groups: BlockGroups | None = None, num_blocks: int = 64, **more: Any
) -> tuple[SchedulerSide, BlockPool]:
    """A scheduler's side with its pool of blocks; `more` are options."""
    pool, groups = BlockPool(num_blocks), groups or BlockGroups(BLOCK)
    made = SchedulerSide(options("d", **more), setup, groups)
    made.bind(pool)
    return made, pool


def step_of(
    scheduled: Mapping[str, tuple[int, int]] = MappingProxyType({}), blocks: Any = ()
) -> Any:
    """vLLM's `SchedulerOutput`: by request, from which token on it computes how many. `blocks`: of
    a request, or by request."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=rid, num_computed_tokens=start)
            for rid, (start, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={rid: count for rid, (_, count) in scheduled.items()},
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda rid: (blocks[rid] if isinstance(blocks, dict) else blocks,)
        ),
    )


class Gathering:
    """`worker.Gather` between threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_S)
        self._given: list[object] = [None] * num_ranks

    def of(self, rank: int) -> Any:
        def gather(given: object) -> list[object]:
            self._given[rank] = given
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        return gather


class Engine:
    """One server: scheduler, a worker of each rank, memory. `step` is a step of vLLM's engine."""

    CHUNK = 7  # tokens a step of one request: no whole blocks

    def __init__(
        self,
        name: str,
        *,
        producer: bool = False,
        consumer: bool = False,
        num_blocks: int = 64,
        block_size: int = BLOCK,
        num_ranks: int = 1,
        tag: str = "stand-in",
        plain: bool = False,
        policy: str = "recompute",
        caching: bool = True,
        **more: Any,
    ) -> None:
        self.caching, self.size = caching, block_size
        self.options = options(name, **more)
        setup = ServerSetup(producer, consumer, num_ranks)
        self.pool, self.policy = BlockPool(num_blocks), policy
        self.scheduler = SchedulerSide(self.options, setup, BlockGroups(block_size))
        self.scheduler.bind(self.pool)
        self.scheduler.sends.can_end = True  # as vLLM's step says, before it asks of any request
        model, heads = ModelConfig(model="m", option_names=OPTION_NAMES), HEADS // num_ranks
        self.memory = torch.zeros(num_ranks, LAYERS, num_blocks, heads, block_size, CONTENT)
        # What each head has in each place is its own.
        self.places = torch.arange(HEADS * CONTENT).view(num_ranks, 1, heads, CONTENT)
        config, gathering = kv_cache_config(num_blocks, block_size, heads), Gathering(num_ranks)

        def worker(rank: int) -> WorkerSide:
            made = WorkerSide(self.options, setup, model, rank, HEADS, gathering.of(rank))
            caches = {f"layer.{i}": self.memory[rank, i] for i in range(LAYERS)}
            made.register(pool_of(caches, config, tag, plain=plain))
            return made

        with ThreadPoolExecutor(num_ranks) as threads:
            self.workers = list(threads.map(worker, range(num_ranks)))
        self._received: Counter[str] = Counter()  # ranks that have said so
        self._failed: set[str] = set()
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.orders: list[Any] = []
        self.outputs: dict[str, Request] = {}  # that have ended
        self.left: dict[str, Request] = {}  # aborted while they were loading
        self.spoilt: dict[str, int] = {}  # requests, and the token at whose KV they become NaN

    @property
    def worker(self) -> WorkerSide:
        return self.workers[0]

    def close(self) -> None:
        for worker in reversed(self.workers):
            worker.close()

    def add(self, request: Request) -> None:
        request.hash_blocks(self.size)
        self.waiting.append(request)
        self.scheduler.on_new_request(request)

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        scheduled: dict[str, tuple[int, int]] = {}  # computed, and how many now
        for request in self.running:
            self._schedule(request, request.computed, scheduled)
        for request in list(self.waiting):
            self._admit(request, scheduled)
        tables = {
            request.request_id: [block.block_id for block in request.blocks]
            for request in self.running
        }
        step = step_of(scheduled, tables)
        orders = self.scheduler.orders(step)
        self.orders.append(orders)
        for worker in self.workers:
            worker.before_forward(orders)
        num_nans = dict.fromkeys(scheduled, 0)
        for request in self.running:
            if request.request_id in scheduled:
                start, count = scheduled[request.request_id]
                num_nans[request.request_id] = self._forward(request, start, start + count)
        for worker in self.workers:
            worker.after_forward(orders)
        results, news = self._reports()
        self._take_logits(step, num_nans)
        self._update(results, news)
        self.scheduler.check_invariants()

    def _reports(self) -> tuple[dict[str, bool], WorkerReport | None]:
        """As vLLM has them: a load is over when it is on all ranks, and has failed where one has
        said so."""
        news = WorkerReport()
        for worker in self.workers:
            results = worker.take_results()
            self._received.update([*results])
            self._failed |= {rid for rid, has_failed in results.items() if has_failed}
            news = news.aggregate(worker.take_report() or WorkerReport())
        ended = [rid for rid, n in self._received.items() if n == len(self.workers)]
        over = {rid: rid in self._failed for rid in ended}
        for rid in ended:
            del self._received[rid]
        self._failed -= over.keys()
        return over, news or None

    def _admit(self, request: Request, scheduled: dict[str, tuple[int, int]]) -> None:
        cached = self._cached(request)
        matched, _ = self.scheduler.count_loadable(request, len(cached) * self.size)
        if request.skip_reading_prefix_cache:  # vLLM's word, whatever the connector's is
            matched = 0
        if matched is None:
            return
        self.pool.touch(cached)
        new = self.pool.new_blocks(-(-request.num_prompt_tokens // self.size) - len(cached))
        if new is None:
            self.pool.free_blocks(reversed(cached))
            return
        self.waiting.remove(request)
        request.blocks = [*cached, *new]
        request.computed = len(cached) * self.size
        self.scheduler.allocated(request, ([block.block_id for block in request.blocks],), matched)
        if matched:
            request.loaded_from = request.computed
            request.loaded_to = request.computed + matched
            request.status = "loading"
            self.loading[request.request_id] = request
        else:
            self.running.append(request)
            self._schedule(request, request.computed, scheduled)

    def _cached(self, request: Request) -> list[Block]:
        found = []
        if request.skip_reading_prefix_cache:
            return []
        for block_hash in request.block_hashes[: (request.num_prompt_tokens - 1) // self.size]:
            if block_hash not in self.pool.cached or not self.caching:
                break
            found.append(self.pool.cached[block_hash])
        return found

    def _schedule(
        self, request: Request, computed: int, scheduled: dict[str, tuple[int, int]]
    ) -> None:
        count = min(self.CHUNK, request.num_prompt_tokens - computed)
        if count:
            scheduled[request.request_id] = computed, count

    def _forward(self, request: Request, start: int, end: int) -> int:
        """Writes the tokens' KV. The rest was written before, or loaded: it is looked at. Returns
        how many of the logits are NaN."""
        assert self.wrong_tokens(request, start) == 0
        for token in range(start, end):
            block = request.blocks[token // self.size].block_id
            assert request.blocks[token // self.size].ref_cnt >= 1
            spoilt = token >= self.spoilt.get(request.request_id, end)
            kv = math.nan if spoilt else self._kv(request, token)
            self.memory[:, :, block, :, token % self.size] = kv
        request.computed = end
        self._cache(request)
        return 32 * (end > self.spoilt.get(request.request_id, end))

    def _cache(self, request: Request) -> None:
        for i in range(request.computed // self.size):
            self.pool.cache(request.blocks[i], request.block_hashes[i])

    def wrong_tokens(self, request: Request, end: int) -> int:
        """Of the first `end` tokens, how many have other KV than they should."""
        wrong = 0
        for token in range(end):
            block = request.blocks[token // self.size].block_id
            kv = self.memory[:, :, block, :, token % self.size]
            wrong += not bool((kv == self._kv(request, token)).all())
        return wrong

    def _kv(self, request: Request, token: int) -> torch.Tensor:
        """Of all heads: whole numbers below 2**24, which float32 has exactly."""
        return request.chain[token] * HEADS * CONTENT + self.places

    def _take_logits(self, step: Any, num_nans: dict[str, int]) -> None:
        """As `hooks` has it, before vLLM's own work; and its prefix cache forgets the blocks."""
        self.scheduler.compute.step_ended()
        if not self.scheduler.sends.proves:
            return
        errors, _ = self.scheduler.take_logits(step, num_nans)
        for request in list(self.running):
            if request.request_id in errors:
                self.running.remove(request)
                self.pool.evict(request.block_hashes)
                self._end(request, "FINISHED_ERROR")
                self.scheduler.spoilt(block.block_id for block in request.blocks)

    def _update(self, results: dict[str, bool], news: Any) -> None:
        for rid, has_failed in results.items():
            if has_failed and rid in self.loading and self.policy == "fail":
                request = self.loading.pop(rid)
                self.left[rid] = request
                self._end(request, "FINISHED_ERROR", free=False)
        for request in list(self.running):
            if request.computed == request.num_prompt_tokens:
                self.running.remove(request)
                self._end(request, "done")
        self.scheduler.take_reports(news, results)
        for rid, answer in self.scheduler.take_ended().items():
            self.abort(rid)
            self.outputs[rid].answer = answer
        self.scheduler.clear_spoilt()
        for rid, has_failed in results.items():
            if rid in self.left:
                request = self.left.pop(rid)
                self.pool.free_blocks(reversed(request.blocks))
                continue
            request = self.loading.pop(rid)
            if has_failed:
                request.recomputed = True
                self.pool.free_blocks(reversed(request.blocks))
                request.blocks, request.computed = [], 0
                self.waiting.insert(0, request)
            else:
                request.computed = request.loaded_to
                self._cache(request)
                self.running.append(request)

    def _end(self, request: Request, status: str, *, free: bool = True) -> None:
        request.status = status
        request.answer = self.scheduler.finished(
            request, [block.block_id for block in request.blocks]
        )
        self.outputs[request.request_id] = request
        if free:
            self.pool.free_blocks(reversed(request.blocks))

    # --- what happens to requests -----------------------------------------------------------------

    def abort(self, rid: str) -> None:
        """Its client has left."""
        for queue in (self.waiting, self.running):
            for request in list(queue):
                if request.request_id == rid:
                    queue.remove(request)
                    self._end(request, "FINISHED_ABORTED")
        if rid in self.loading:
            request = self.left[rid] = self.loading.pop(rid)
            self._end(request, "FINISHED_ABORTED", free=False)

    def preempt(self, rid: str) -> None:
        """Its blocks are another's; it begins anew."""
        (request,) = [one for one in self.running if one.request_id == rid]
        self.running.remove(request)
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.computed = [], 0
        self.waiting.insert(0, request)

    @property
    def idle(self) -> bool:
        side = self.scheduler
        at_work = self.waiting or self.running or self.loading
        return not (at_work or side.busy or side.sends.sends)  # an offer alone is not busy

    @property
    def num_used(self) -> int:
        return len(self.pool.blocks) - len(self.pool.free)
