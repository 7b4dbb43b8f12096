"""One vLLM server without a model: the engine's loop, vLLM's real scheduler, one worker."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from prefixkv import config as prefixkv_config
from prefixkv.engines.vllm import hooks
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.worker import WorkerSide
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.protocol.ids import RoomKey
from tests.integration.vllm.drift import config_folder
from tests.integration.vllm.liveness.case import MAX_LEN_BLOCKS
from tests.integration.vllm.liveness.process import Inputs
from tests.laws.liveness.arrivals import BLOCK, LivenessError
from tests.unit.engines.vllm.standin import prefix_hashes

if TYPE_CHECKING:
    from tests.integration.vllm.liveness.world import World

OFFER_GRACE_S, OFFER_TIMEOUT_S = 4.0, 8.0


@cache
def _model() -> ModelConfig:
    folder = config_folder()
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32",
        max_model_len=MAX_LEN_BLOCKS * BLOCK,
    )  # fmt: skip


@cache
def _config(
    name: str,
    role: str,
    num_blocks: int,
    chunk: int,
    share: int,
    join: bool,
    recompute_below: int,
    asynchronous: bool,
    compute_below: int,
    host: str,
    state: str,
) -> VllmConfig:
    extra: dict[str, Any] = {
        "offer_grace_s": OFFER_GRACE_S,
        "offer_timeout_s": OFFER_TIMEOUT_S,
        "name": name,
        "join_flights": join,
        "recompute_below": recompute_below,
        "compute_below": compute_below,
        "host_memory": host,
    }
    scheduling = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=max(chunk, MAX_LEN_BLOCKS * BLOCK),
        max_model_len=MAX_LEN_BLOCKS * BLOCK,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    scheduling.max_num_scheduled_tokens = chunk
    scheduling.long_prefill_token_threshold = share
    caching = CacheConfig(block_size=BLOCK, enable_prefix_caching=state != "none")
    config = VllmConfig(
        model_config=_model(),
        cache_config=caching,
        scheduler_config=scheduling,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PrefixKVConnector",
            kv_connector_module_path="prefixkv.engines.vllm.connector",
            kv_role=role,
            kv_port=15000 + ord(name),
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )
    caching.num_gpu_blocks = num_blocks
    # Of a model with states vLLM sets it so.
    caching.mamba_cache_mode = "align" if state in ("align", "checkpoint") else "none"
    # The platform of this environment may switch it off; a GPU's does not.
    scheduling.async_scheduling = asynchronous
    return config


@dataclass(slots=True)
class _Batch:
    step: Any  # vLLM's SchedulerOutput
    result: Any = None  # what the worker has answered


@dataclass(slots=True)
class _Row:
    """A request in the worker, with a block table for each of vLLM's groups."""

    tokens: list[int]
    tables: list[list[int]]


class Server:
    """One vLLM server: the engine's loop, its scheduler, one worker."""

    def __init__(self, world: World, name: str, role: str, num_blocks: int) -> None:
        case = world.case
        self.world, self.name = world, name
        state = case.states["ab".index(name)] if case.states else ""
        self.config = _config(
            name, role, num_blocks, case.chunk, case.share, case.join, case.recompute_below,
            case.asynchronous, case.compute_below, "" if role == "kv_producer" else case.host,
            state,
        )  # fmt: skip
        self.batch_queue_size = self.config.max_concurrent_batches
        sizes: Any = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(
                [f"last {i}"], SlidingWindowSpec(BLOCK, sliding_window=window, **sizes)
            )
            for i, window in enumerate(case.windows)
        ]
        full = FullAttentionSpec(BLOCK, **sizes)
        self.states = _state_specs(state, full) if state else []
        groups += [KVCacheGroupSpec([f"state {i}"], one) for i, one in enumerate(self.states)]
        # Behind the others: a group's number is not its place in a transfer.
        groups.append(KVCacheGroupSpec(["layer"], full))
        kv = KVCacheConfig(num_blocks, [], groups, hash_block_size=BLOCK)
        kind = AsyncScheduler if case.asynchronous else Scheduler
        # Of structured outputs, which no request asks for.
        manager: Any = SimpleNamespace(accept_tokens=lambda request, tokens: True)
        # Without a prefix cache a state stands for all tokens.
        size = max(group.kv_cache_spec.block_size for group in groups)
        self.scheduler: Any = kind(self.config, kv, manager, block_size=size)
        self.connector: Any = self.scheduler.connector
        self.side: SchedulerSide = self.connector.scheduler
        self.side.ledger.now_s, self.side.ledger.draw = lambda: world.now_s, world.draw
        self.side.compute.now_s = lambda: world.now_s
        # Whatever was measured, and again on each call: so every decision has to be a live one.
        chance = random.Random(case.seed)
        vars(self.side.compute)["is_here"] = lambda rid, missing, _: (
            missing <= case.compute_below and chance.random() < 0.5
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.memory = torch.zeros(num_blocks, BLOCK, 1)
        self.address = self.connector._options.bind
        self.worker = WorkerSide(
            self.connector._options, self.connector._setup, prefixkv_config.ModelConfig(model="m")
        )
        pool = KVPool.from_tensors([self.memory])
        windows = self.connector._groups.windows
        named = [PoolGroup(one.name, KVPool.from_tensors([self.memory]), one.window)
                 for one in windows]  # fmt: skip
        self.worker.register(pool.with_groups(*named) if named else pool)
        self._input = Inputs()
        self._aborts: deque[str] = deque()
        self._queue: deque[_Batch] = deque()  # the oldest first
        self._blocked = False  # until the oldest batch is executed
        self._rows: dict[str, _Row] = {}
        self._engine: Any = SimpleNamespace(
            scheduler=self.scheduler,
            connector=self.connector,
            vllm_config=self.config,
            is_running=lambda: True,
            input_queue=self._input,
            batch_queue=self._queue,
        )
        self._executed = False
        self._process_engine_step = hooks.wrapped(
            lambda _: self._executed, hooks._process_engine_step
        )

    # --- the engine's loop ------------------------------------------------------------------------

    def add(self, request: Request, *, leaves: bool = False) -> None:
        def take() -> None:
            self.scheduler.add_request(request)
            if leaves:
                self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)

        self._input.append(take)

    def abort(self, rid: str) -> None:
        self._aborts.append(rid)
        self._input.append(self._take_aborts)

    def _take_aborts(self) -> None:
        while self._aborts:
            rid = self._aborts.popleft()
            self.scheduler.finish_requests([rid], RequestStatus.FINISHED_ABORTED)

    @property
    def may_step(self) -> bool:
        if self._blocked:
            return self._queue[0].result is not None
        for bell in self.world.bells:
            bell.look()
        has_work = bool(self._input or self._queue or self.scheduler.has_requests())
        return has_work and not self._input.is_resting

    def step(self) -> bool:
        """Go on until the loop has been round once, or waits for the worker. True if something
        happened."""
        if self._blocked:
            self._blocked = False
            moved = self._update(self._queue.popleft())
            self._process_engine_step(self._engine)
            return moved
        moved = bool(self._input)
        while self._input:
            self._input.popleft()()
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._queue.append(_Batch(step))
            self._executed = step.total_num_scheduled_tokens > 0
            moved |= self._executed or bool(step.kv_connector_metadata)
            if len(self._queue) < self.batch_queue_size and (
                self._executed or self.scheduler.has_requests()
            ):
                self._process_engine_step(self._engine)
                return moved
        elif not self._queue:
            return moved
        else:
            self._executed = False
        self._blocked = True
        return moved

    def _update(self, batch: _Batch) -> bool:
        self._take_aborts()
        outputs = self.scheduler.update_from_output(batch.step, batch.result)
        moved = False
        for output in outputs.values():
            for one in output.outputs:
                moved = True
                self.world.answered(self, one)
        heard = batch.result.kv_connector_output
        return moved or not heard.is_empty()

    # --- the worker -------------------------------------------------------------------------------

    @property
    def may_execute(self) -> bool:
        return any(batch.result is None for batch in self._queue)

    def execute(self) -> bool:
        """The worker takes its next batch. True if something happened."""
        batch = next(batch for batch in self._queue if batch.result is None)
        step, orders = batch.step, batch.step.kv_connector_metadata
        self.world.ordered(self, orders)
        for block in step.new_block_ids_to_zero or ():
            self.memory[block] = 0.0
        self.worker.before_forward(orders)
        sampled = self._forward(step)
        if self.worker.has_work_after(orders):
            self.worker.after_forward(orders)
        results, news = self.worker.take_results(), self.worker.take_report()
        heard = KVConnectorOutput(
            finished_recving={*results},
            failed_recving={rid for rid, has_failed in results.items() if has_failed},
            kv_connector_worker_meta=news,
        )
        rids = list(sampled)
        batch.result = ModelRunnerOutput(
            rids,
            {rid: i for i, rid in enumerate(rids)},
            [sampled[rid] for rid in rids],
            kv_connector_output=heard,
        )
        return bool(rids or orders) or not heard.is_empty()

    def _forward(self, step: Any) -> dict[str, list[int]]:
        for rid in step.finished_req_ids:
            self._rows.pop(rid, None)
        starts: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self._rows[new.req_id] = _Row(tokens, [list(one) for one in new.block_ids])
            starts[new.req_id] = new.num_computed_tokens
        again = step.scheduled_cached_reqs
        for i, rid in enumerate(again.req_ids):
            row, new_blocks = self._rows[rid], again.new_block_ids[i]
            if rid in again.resumed_req_ids:
                row.tables = [[] for _ in row.tables]
            if rid in again.all_token_ids:
                row.tokens = list(again.all_token_ids[rid])
            for table, more in zip(row.tables, new_blocks or (), strict=new_blocks is not None):
                table += more
            starts[rid] = again.num_computed_tokens[i]
        sampled = {}
        for rid, count in step.num_scheduled_tokens.items():
            self.world.computed(self, rid)
            sampled[rid] = self._compute(rid, starts[rid], count)
        return sampled

    def _compute(self, rid: str, start: int, count: int) -> list[int]:
        """Write the tokens' KV in each group. What its layers see of the tokens before them was
        written before, or loaded: it is looked at."""
        row, end = self._rows[rid], start + count
        assert end <= len(row.tokens), f"{rid}: token {end} of {len(row.tokens)} is unknown"
        chain = prefix_hashes(row.tokens)
        flat = self.memory.numpy().reshape(-1)
        num_states = len(self.states)
        for number, (table, spec) in enumerate(zip(row.tables, self.states, strict=False)):
            self._advance(f"{rid}: group {number}", spec, table, start, chain[:end])
        tables = row.tables[num_states:]
        for number, (table, window) in enumerate(
            zip(tables, (*self.world.case.windows, end), strict=True)
        ):
            # Another group's KV of the same token is another.
            kv = np.array(chain[:end]) + 0.125 * number
            slots = np.repeat(np.array(table) * BLOCK, BLOCK)[:end] + np.arange(end) % BLOCK
            seen = np.arange(max(0, start + 1 - window), start)
            wrong = seen[flat[slots[seen]] != kv[seen]]
            if len(wrong):
                raise LivenessError(
                    f"{rid} on {self.name}: the KV of tokens {wrong.tolist()} is wrong in group "
                    f"{number}"
                )
            flat[slots[start:]] = kv[start:]
        if end < len(row.tokens):
            return []
        row.tokens.append(3 + int(chain[-1]) % 1900)
        return [row.tokens[-1]]

    def _advance(
        self, what: str, spec: Any, table: list[int], start: int, chain: list[int]
    ) -> None:
        """Write the state behind the last token of a step, and what a long step keeps on its way.
        The state behind the tokens before was written before, or loaded: it is looked at."""
        end, size, last = len(chain), spec.block_size, (start - 1) // spec.block_size
        if start:
            found = self.memory[table[last]].flatten().tolist()
            if found != [float(chain[start - 1])] * BLOCK:
                raise LivenessError(
                    f"{what} on {self.name}: behind {start} tokens the state is {found}, not "
                    f"{chain[start - 1]}"
                )
        middle = get_mamba_prefill_checkpoint_position(end, BLOCK, False)
        if (
            spec.num_prefill_checkpoint_blocks
            and is_mamba_prefill_checkpoint_valid(start, end, middle, BLOCK, size, 1)
            and (block := table[-(-end // size) - 2])
        ):
            self.memory[block] = float(chain[middle - 1])
        assert table[(end - 1) // size], "vLLM's null block"
        self.memory[table[(end - 1) // size]] = float(chain[end - 1])

    def flush(self) -> bool:
        """vLLM's word that its cache is to be reset, and what lies outside of it too."""
        if self.scheduler.has_requests() or self.side.busy:
            self.scheduler.reset_prefix_cache(reset_connector=True)
        return True

    # --- audits -----------------------------------------------------------------------------------

    def may_land(self, room: RoomKey, pages: np.ndarray) -> None:
        """A write of this room arrives. Raises LivenessError where a page is not the room's."""
        rid = next(
            (rid for rid, load in self.side.loads.pending.items() if load.room == room.room), None
        )
        if rid is None:
            raise LivenessError(f"room {room.room} writes {pages} on {self.name}, which forgot it")
        load = self.side.loads.pending[rid]
        others = {
            block
            for one in self.scheduler.requests
            if one != rid
            for table in self.scheduler.kv_cache_manager.get_block_ids(one)
            for block in table
        } - {0}  # the null block
        for page in pages.tolist():
            block = self.pool.blocks[page]
            if page not in load.pages or block.ref_cnt < 1 or page in others:
                raise LivenessError(f"room {room.room} writes block {page}, which is another's")
            if block.block_hash is not None:
                raise LivenessError(f"room {room.room} writes block {page}, which is cached")

    def check(self) -> None:
        self.side.check_invariants()
        tables_of = self.scheduler.kv_cache_manager.get_block_ids
        for one in self.connector._groups.windows:
            for rid in self.scheduler.requests if one.is_state else ():
                held = sum(block != 0 for block in tables_of(rid)[one.number])
                if held > one.most_blocks:
                    raise LivenessError(f"{rid} on {self.name} has {held} states of a group")

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def leftovers(self) -> dict[str, Any]:
        """What has to be nothing at rest."""
        worker, sends = self.worker, self.side.sends
        host = self.side.host
        left = {
            "copies": host.num_copies,
            "host": [*host._keys, *host._load_of, *host._barred, *host._flights._blocks],
            "asked": list(self.side._asked),
            "parts": [*worker._pending, *worker._failed],
            "requests": list(self.scheduler.requests),
            "blocks": len(self.pool.blocks) - 1 - self.num_free,
            "holds": self.side.holds.num_blocks,
            "loads": list(self.side.loads.pending),
            "wanted": list(self.side.loads.wanted),
            "followers": list(self.side.loads.followers),
            "failed": list(self.side._turns.failed),
            "landed": list(self.side._turns.landed),
            "flights": len(self.side.flights),
            "computing": sorted(self.side.compute.rids),
            "sends": list(sends.sends),
            "drawn": list(sends._drawn),
            "ending": list(sends.ending),
            "answers": dict(self.side._answers),
            "worker": [*worker._loads, *worker._sends],
            "batches": len(self._queue),
        }
        return {name: what for name, what in left.items() if what}

    def picture(self) -> str:
        """Who holds what."""
        lines = [f"server {self.name}: {self.num_free} of {len(self.pool.blocks) - 1} blocks free"]
        lines[0] += " (rests)" if self._input.is_resting else ""
        blocks_of = self.scheduler.kv_cache_manager.get_block_ids
        for rid, request in self.scheduler.requests.items():
            lines.append(
                f"  {rid}: {request.status.name}, {len(blocks_of(rid)[-1])} blocks, "
                f"{request.num_computed_tokens} of {request.num_tokens} tokens"
            )
        for rid, held in self.side.holds._held.items():
            lines.append(f"  held for {rid}: {len(held)} blocks")
        for rid, load in self.side.loads.pending.items():
            over = "over" if load.over else "waits"
            lines.append(f"  load {rid}: room {load.room}, {len(load.pages)} blocks, {over}")
        for rid, send in self.side.sends.sends.items():
            state = "unpromised" if send.unpromised > 0 else "promised"
            state = "offer" if send.is_offer else state
            lines.append(f"  send {rid}: {send.key}, {state}, {send.end} tokens computed")
        lines.append(f"  copies of host memory: {self.side.host.num_copies}")
        if joined := [rid for rid, asked in self.side._asked.items() if asked.has_joined]:
            lines.append(f"  wait for another's load: {sorted(joined)}")
        return "\n".join(lines)


def _state_specs(mode: str, full: Any) -> list[Any]:
    """Of two groups of layers that keep a state."""
    checkpoints = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    spec = MambaSpec(
        block_size=MAX_LEN_BLOCKS * BLOCK if mode == "none" else BLOCK,
        shapes=((2, 8),),
        dtypes=(torch.float32,),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="none" if mode == "none" else "align",
        **(checkpoints if mode == "checkpoint" else {}),  # type: ignore[arg-type]
    )
    return [spec, spec]
