"""Three methods of vLLM that the connector goes through, since its interface has no place for it.

`Scheduler.update_from_output`: a request that is not to be computed ends there, as vLLM ends those
whose grammar does not compile. A connector can only say "not yet" of a request, for ever.

`EngineCoreProc._process_engine_step`: where nothing was computed and nothing can be until a request
comes or a worker rings, the engine waits for that. vLLM sleeps for a millisecond and steps again.

`EngineCore.set_weight_version`: the weights were changed in place, and this is their version.

All are put in place when the scheduler's connector is made, each where vLLM has what it needs.
They do nothing for another connector, and nothing where `MultiConnector` is between.
"""

from __future__ import annotations

import functools
from typing import Any

from prefixkv.engines.vllm import compat
from prefixkv.engines.vllm.scheduler import SchedulerSide


def install() -> bool:
    """Put all in place, in this process. Again: no-op. Returns whether the engine can rest."""
    if compat.available(compat.ENDING):
        scheduler = compat.require(compat.ENDING).Scheduler
        if not hasattr(scheduler.update_from_output, "prefixkv"):
            scheduler.update_from_output = _ending(scheduler.update_from_output)
    if compat.available(compat.WEIGHTS):
        core = compat.require(compat.WEIGHTS).EngineCore
        if not hasattr(core.set_weight_version, "prefixkv"):
            core.set_weight_version = _moving(core.set_weight_version)
    if not compat.available(compat.RESTING):
        return False
    engine = compat.require(compat.RESTING).EngineCoreProc
    if not hasattr(engine._process_engine_step, "prefixkv"):
        engine._process_engine_step = _resting(engine._process_engine_step)
    return True


def _ending(original: Any) -> Any:
    @functools.wraps(original)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        side = _side(self)
        if side is not None:
            side.sends.can_end = True
            for rid, params in side.take_ended().items():
                compat.end_request(self, rid, params, outputs)
        return outputs

    update_from_output.prefixkv = True  # type: ignore[attr-defined]
    return update_from_output


def _moving(original: Any) -> Any:
    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> None:
        side = _side(self.scheduler)
        if side is not None:
            side.move_weights(weight_version)  # first, since it raises for what is no version
        original(self, weight_version)

    set_weight_version.prefixkv = True  # type: ignore[attr-defined]
    return set_weight_version


def _resting(original: Any) -> Any:
    @functools.wraps(original)
    def _process_engine_step(self: Any) -> Any:
        executed = original(self)
        side = None if executed else _side(self.scheduler)
        if side is not None and compat.may_rest(self):
            timeout_s = side.rest_s()
            if timeout_s > 0.0:
                with compat.unwatched():
                    self.scheduler.connector.rest.wait(self.input_queue, timeout_s)
        return executed

    _process_engine_step.prefixkv = True  # type: ignore[attr-defined]
    return _process_engine_step


def _side(scheduler: Any) -> SchedulerSide | None:
    """Our side of a vLLM scheduler; None where its connector is another one."""
    connector = getattr(scheduler, "connector", None)
    if not getattr(connector, "is_prefixkv", False):
        return None
    side: SchedulerSide = connector.scheduler  # type: ignore[union-attr]
    return side
