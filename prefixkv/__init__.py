"""prefixkv: a decode-side radix prefix cache and scheduler for prefill/decode disaggregation, over
NIXL.

The names below are the public ones. Each is loaded when it is first used, so that importing the
package costs next to nothing and loads neither torch nor nixl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkv.cache.radix_cache import RadixCache as RadixCache
    from prefixkv.cache.radix_key import RadixKey as RadixKey
    from prefixkv.config import ControlConfig as ControlConfig
    from prefixkv.config import CurveConfig as CurveConfig
    from prefixkv.config import DecodeConfig as DecodeConfig
    from prefixkv.config import ModelConfig as ModelConfig
    from prefixkv.config import PrefillConfig as PrefillConfig
    from prefixkv.config import TransportConfig as TransportConfig
    from prefixkv.decode.request import DecodeRequest as DecodeRequest
    from prefixkv.decode.request import PrefillAsk as PrefillAsk
    from prefixkv.decode.scheduler import DecodeScheduler as DecodeScheduler
    from prefixkv.errors import OutOfPagesError as OutOfPagesError
    from prefixkv.errors import PrefixKVError as PrefixKVError
    from prefixkv.memory.kv_layout import KVLayout as KVLayout
    from prefixkv.memory.kv_pool import KVPool as KVPool
    from prefixkv.memory.mesh import Mesh as Mesh
    from prefixkv.memory.state_layout import StateTensor as StateTensor
    from prefixkv.memory.state_pool import StatePool as StatePool
    from prefixkv.pages.allocator import PageAllocator as PageAllocator
    from prefixkv.pages.manager import PageBooks as PageBooks
    from prefixkv.prefill.request import PrefillRequest as PrefillRequest
    from prefixkv.prefill.scheduler import PrefillScheduler as PrefillScheduler
    from prefixkv.prefill.send_plan import plan_sends as plan_sends
    from prefixkv.ranks.replica import DecodeReplica as DecodeReplica
    from prefixkv.ranks.replica import RankLog as RankLog
    from prefixkv.request import Request as Request
    from prefixkv.routing import BoundedAffinityRouter as BoundedAffinityRouter
    from prefixkv.runtime.decode_rank import DecodeRank as DecodeRank
    from prefixkv.runtime.nodes import DecodeNode as DecodeNode
    from prefixkv.runtime.nodes import PrefillNode as PrefillNode

__version__ = "0.1.0"

_HOME = {
    "BoundedAffinityRouter": "routing",
    "ControlConfig": "config",
    "CurveConfig": "config",
    "DecodeConfig": "config",
    "DecodeNode": "runtime.nodes",
    "DecodeRank": "runtime.decode_rank",
    "DecodeReplica": "ranks.replica",
    "DecodeRequest": "decode.request",
    "DecodeScheduler": "decode.scheduler",
    "KVLayout": "memory.kv_layout",
    "KVPool": "memory.kv_pool",
    "Mesh": "memory.mesh",
    "ModelConfig": "config",
    "OutOfPagesError": "errors",
    "PageAllocator": "pages.allocator",
    "PageBooks": "pages.manager",
    "PrefillAsk": "decode.request",
    "PrefillConfig": "config",
    "PrefillNode": "runtime.nodes",
    "PrefillRequest": "prefill.request",
    "PrefillScheduler": "prefill.scheduler",
    "PrefixKVError": "errors",
    "RadixCache": "cache.radix_cache",
    "RadixKey": "cache.radix_key",
    "RankLog": "ranks.replica",
    "Request": "request",
    "StatePool": "memory.state_pool",
    "StateTensor": "memory.state_layout",
    "TransportConfig": "config",
    "plan_sends": "prefill.send_plan",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'prefixkv' has no attribute {name!r}")
    value = getattr(import_module(f"prefixkv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
