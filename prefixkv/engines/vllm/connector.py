"""The class that vLLM calls: it passes each hook on to the scheduler's or the worker's side. Its
counters are in the classes in which vLLM carries them to its log and to Prometheus."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from prefixkv import ModelConfig
from prefixkv.engines.vllm import compat, hooks
from prefixkv.engines.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from prefixkv.engines.vllm.groups import BlockGroups, look_up_densely
from prefixkv.engines.vllm.layout import check_engine, event_on, is_plain, pool_of
from prefixkv.engines.vllm.options import OPTION_NAMES, ConnectorOptions, ServerSetup
from prefixkv.engines.vllm.orders import NO_ORDERS, StepOrders, WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.shadow import Shadow, govern
from prefixkv.engines.vllm.stats import GAUGES, METRICS, added, share_log
from prefixkv.engines.vllm.versions import check_overrides
from prefixkv.engines.vllm.wakeup import WakeupListener
from prefixkv.engines.vllm.worker import WorkerSide
from prefixkv.errors import ConfigError
from prefixkv.spi import check_environ


class PrefixKVStats(KVConnectorStats):
    """Counts of an interval, by the names of `stats.METRICS`."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> PrefixKVStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PrefixKVMetrics(KVConnectorPromMetrics):
    """Prometheus metrics: a counter `vllm:prefixkv_..._total` per count, and the gauges."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, texts: dict[str, str], **more: Any) -> dict[str, Any]:
            return {
                name: kind(
                    name=f"vllm:prefixkv_{name}", documentation=text, labelnames=labelnames, **more
                )
                for name, text in texts.items()
            }

        self._counters = make(self._counter_cls, METRICS)
        self._gauges = make(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        # At 0 from the start: a gauge that was never set would be missing, not 0. Only changes
        # come.
        for labels in per_engine_labelvalues.values():
            for gauge in self._gauges.values():
                gauge.labels(*labels).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(number)
            elif name in self._gauges:
                self._gauges[name].labels(*labels).set(number)


check_overrides(PrefixKVStats, KVConnectorStats)
check_overrides(PrefixKVMetrics, KVConnectorPromMetrics)


_log = logging.getLogger("vllm.prefixkv")

# Registered, not inherited: `orders` then needs no vLLM, and both sides are tested without it.
compat.KVConnectorMetadata.register(StepOrders)
compat.KVConnectorWorkerMetadata.register(WorkerReport)


class PrefixKVConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):
    """One in the scheduler, and one in each worker. See docs/vllm.md. Raises ConfigError, which
    names the cause, for a wrong option, model or parallel setup."""

    is_prefixkv = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # Checks come before the base class, whose errors would not name the option that is wrong.
        share_log()
        # The connector has no settings there: it would ignore what is misspelt.
        check_environ(os.environ)
        has_windows = len(kv_cache_config.kv_cache_groups) > 1
        step_tokens = vllm_config.max_in_flight_tokens if has_windows else 0
        self._groups = BlockGroups.of(kv_cache_config, step_tokens)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.of(transfer.kv_connector_extra_config, transfer.kv_port)
        check_engine(options, vllm_config, self._groups)
        # A wildcard `bind` names no host that a decode server could connect to.
        if options.is_on_every_address:
            options = replace(options, advertise=compat.reached_at(options.bind))
        super().__init__(vllm_config, role, kv_cache_config)
        events = vllm_config.kv_events_config
        self._options = options
        self._setup = ServerSetup(
            transfer.is_kv_producer,
            transfer.is_kv_consumer,
            num_ranks=vllm_config.parallel_config.tensor_parallel_size,
            max_len=vllm_config.model_config.max_model_len,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            publishes=events is not None and bool(events.enable_kv_cache_events),
        )
        # Exactly one of the two sides is made, by role. The worker's waits for the KV memory.
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self.wakeups: WakeupListener | None = None
        if role is compat.KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(options, self._setup, self._groups)
            self._scheduler.sends.proves = bool(compat.envs.VLLM_COMPUTE_NANS_IN_LOGITS)
            hooks.install(compat.Scheduler, compat.EngineCore, compat.EngineCoreProc)
            self.wakeups = WakeupListener(compat.WAKEUP)
            self._scheduler.rest.listener = self.wakeups

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Transfers do not follow KV that is mapped elsewhere. vLLM asks this from 0.33.0 on;
        `check_engine` refuses sleep mode in any version."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return bool(self._groups.windows)

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted request's blocks are held until they are sent."""
        return False

    # --- in the scheduler -------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "the scheduler's connector"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """For requests whose windows are loaded it then looks for a prefix in the layers that keep
        every token alone."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._groups.windows:
            look_up_densely(kv_cache_manager, self._groups.full, self.scheduler.ignores_windows)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        shadow: Shadow | None = None
        if self._options.policy and not gpu_block_pool.enable_caching:
            _log.warning("the policy is not used: vLLM's prefix cache is off")
        elif self._options.policy:
            shadow = Shadow(self._groups.block_size, self._options.policy, time.monotonic)
            govern(gpu_block_pool, shadow, self.scheduler.counters)
        self.scheduler.bind(gpu_block_pool, shadow)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.count_loadable(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        hosted = self.scheduler.allocated(request, tables, num_external_tokens)
        # Of what is loaded, `usage` says of tokens from host memory alone that they were cached.
        if num_external_tokens and (stats := request.prefill_stats) is not None:
            stats.num_cached_tokens = stats.num_local_cached_tokens + hosted

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.take_reports(
            connector_output.kv_connector_worker_meta, connector_output.finished_recving or ()
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        # False: vLLM need not delay the free. Blocks that must outlive the request carry
        # references of `Holds`, which vLLM's own free leaves in place.
        return False, self.scheduler.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._groups.full])

    def has_pending_push_work(self) -> bool:
        return self.scheduler.busy

    def has_pending_block_frees(self) -> bool:
        """True while writes to host memory keep blocks: they come back by themselves, so that no
        running request has to give up its own."""
        return self.scheduler.host.is_writing

    def reset_cache(self) -> bool:
        self.scheduler.flush()
        return True

    def take_events(self) -> Iterable[Any]:
        """Those of host memory; vLLM's own pool reports the blocks that arrive there."""
        return compat.host_events(self.scheduler.host.take_events(), self._groups.block_size)

    # --- in a worker ------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "a worker's connector, with its KV memory"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker's side over the KV tensors, by layer name. All ranks call it."""
        config, kv_cache, options = self._vllm_config, self._kv_cache_config, self._options
        model = ModelConfig(
            model=options.model or str(config.model_config.model),
            weights_version=options.weights_version,
            kv_scales=str(config.cache_config.cache_dtype),
            option_names=OPTION_NAMES,
        )
        self._kv_caches = kv_caches
        is_alone, groups = self._setup.num_ranks == 1, self._groups
        self._worker = WorkerSide(
            options,
            self._setup,
            model,
            rank=0 if is_alone else compat.get_tensor_model_parallel_rank(),
            num_kv_heads=1
            if groups.is_latent
            else int(config.model_config.get_total_num_kv_heads()),
            gather=None if is_alone else compat.gather,
        )
        # The tag goes into every handshake: pages are copied as bytes, so two servers must agree on
        # all that decides how a kernel packs a block.
        backends = compat.backends_of(config, kv_cache)
        tag = compat.block_format(config, kv_cache, groups, backends)
        plain = is_plain(groups.spec, backends)
        self._worker.register(pool_of(kv_caches, kv_cache, tag, plain=plain))

    def unregister_kv_caches(self) -> None:
        """Raises ConfigError for memory of a device: a peer may still read or write what is
        registered. On a CPU vLLM releases nothing. vLLM asks for it from 0.33.0 on."""
        if any(cache.device.type != "cpu" for cache in self._kv_caches.values()):
            raise ConfigError(
                "the KV memory cannot be released: prefixkv's connector has registered it"
            )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Carry out the orders that precede the forward pass. Not in `start_load_kv`, which vLLM
        calls after the forward where nothing is loaded in this step."""
        super().bind_connector_metadata(connector_metadata)
        orders = connector_metadata
        has_copies = bool(orders.copies or orders.late) or self.worker.has_work_after(NO_ORDERS)
        self.worker.before_forward(orders, event_on(self._kv_caches) if has_copies else None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None:
        # vLLM calls this when the step's kernels are queued. The event stands behind them, so a
        # chunk is read only once its KV is written.
        orders = self._get_connector_metadata()
        if self.worker.has_work_after(orders):
            self.worker.after_forward(orders, event_on(self._kv_caches))

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self.worker.take_results()
        return compat.KVConnectorTransferResults(
            finished_recving={*results},
            failed_recving={rid for rid, has_failed in results.items() if has_failed},
        )

    def build_connector_worker_meta(self) -> Any:
        return self.worker.take_report()

    # --- in both, and in the API server -----------------------------------------------------------

    def get_kv_connector_stats(self) -> PrefixKVStats | None:
        counts: dict[str, float] = {}
        if self._scheduler is not None:
            counts |= self._scheduler.take_counts() | self._scheduler.take_gauges()
        elif self._worker is not None:
            counts |= self._worker.take_counts()
        return PrefixKVStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixKVStats | None:
        return PrefixKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrefixKVMetrics | None:
        return PrefixKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for part in (self.wakeups, self._worker):
            if part is not None:
                part.close()


for base in (compat.KVConnectorBase_V1, compat.SupportsHMA):
    check_overrides(PrefixKVConnector, base)
