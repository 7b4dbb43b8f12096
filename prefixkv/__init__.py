"""prefixkv: a decode-side radix prefix cache and scheduler for prefill/decode disaggregation, over
NIXL.

The names below are the public ones. Each is loaded when it is first used, so that importing the
package costs next to nothing and loads neither torch nor nixl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkv.cache.eviction.policy import Policy as Policy
    from prefixkv.cache.eviction.policy import register as register_policy  # noqa: F401
    from prefixkv.cache.namespace import Namespace as Namespace
    from prefixkv.cache.radix_cache import RadixCache as RadixCache
    from prefixkv.cache.radix_key import RadixKey as RadixKey
    from prefixkv.config import ControlConfig as ControlConfig
    from prefixkv.config import CurveConfig as CurveConfig
    from prefixkv.config import DecodeConfig as DecodeConfig
    from prefixkv.config import KVEventsConfig as KVEventsConfig
    from prefixkv.config import ModelConfig as ModelConfig
    from prefixkv.config import PrefillConfig as PrefillConfig
    from prefixkv.config import TransportConfig as TransportConfig
    from prefixkv.decode.admission import AdmissionPolicy as AdmissionPolicy
    from prefixkv.decode.admission import register as register_admission  # noqa: F401
    from prefixkv.decode.request import DecodeRequest as DecodeRequest
    from prefixkv.decode.request import PrefillAsk as PrefillAsk
    from prefixkv.decode.scheduler import DecodeScheduler as DecodeScheduler
    from prefixkv.digest import prompt_digest as prompt_digest
    from prefixkv.errors import OutOfPagesError as OutOfPagesError
    from prefixkv.errors import PrefixKVError as PrefixKVError
    from prefixkv.memory.kv_layout import KVLayout as KVLayout
    from prefixkv.memory.kv_pool import KVPool as KVPool
    from prefixkv.memory.mesh import Mesh as Mesh
    from prefixkv.memory.shared import shared_bytes as shared_bytes
    from prefixkv.memory.state_layout import StateTensor as StateTensor
    from prefixkv.memory.state_pool import StatePool as StatePool
    from prefixkv.pages.allocator import PageAllocator as PageAllocator
    from prefixkv.pages.manager import PageManager as PageManager
    from prefixkv.paging import page_table as page_table
    from prefixkv.paging import slot_mapping as slot_mapping
    from prefixkv.prefill.request import PrefillRequest as PrefillRequest
    from prefixkv.prefill.scheduler import PrefillScheduler as PrefillScheduler
    from prefixkv.prefill.send_plan import plan_sends as plan_sends
    from prefixkv.ranks.replica import DecodeReplica as DecodeReplica
    from prefixkv.ranks.replica import RankLog as RankLog
    from prefixkv.request import Request as Request
    from prefixkv.routing import BoundedAffinityRouter as BoundedAffinityRouter
    from prefixkv.runtime.decode_rank import DecodeRank as DecodeRank
    from prefixkv.runtime.decode_transfers import DecodeTransfers as DecodeTransfers
    from prefixkv.runtime.groups import DecodeGroup as DecodeGroup
    from prefixkv.runtime.groups import PrefillGroup as PrefillGroup
    from prefixkv.runtime.metrics import NodeCollector as NodeCollector
    from prefixkv.runtime.nodes import DecodeNode as DecodeNode
    from prefixkv.runtime.nodes import PrefillNode as PrefillNode
    from prefixkv.runtime.prefill_transfers import PrefillTransfers as PrefillTransfers

__version__ = "0.1.0"

_HOME = {
    "AdmissionPolicy": "decode.admission",
    "BoundedAffinityRouter": "routing",
    "ControlConfig": "config",
    "CurveConfig": "config",
    "DecodeConfig": "config",
    "DecodeGroup": "runtime.groups",
    "DecodeNode": "runtime.nodes",
    "DecodeRank": "runtime.decode_rank",
    "DecodeReplica": "ranks.replica",
    "DecodeRequest": "decode.request",
    "DecodeScheduler": "decode.scheduler",
    "DecodeTransfers": "runtime.decode_transfers",
    "KVEventsConfig": "config",
    "KVLayout": "memory.kv_layout",
    "KVPool": "memory.kv_pool",
    "Mesh": "memory.mesh",
    "ModelConfig": "config",
    "Namespace": "cache.namespace",
    "NodeCollector": "runtime.metrics",
    "OutOfPagesError": "errors",
    "PageAllocator": "pages.allocator",
    "PageManager": "pages.manager",
    "Policy": "cache.eviction.policy",
    "PrefillAsk": "decode.request",
    "PrefillConfig": "config",
    "PrefillGroup": "runtime.groups",
    "PrefillNode": "runtime.nodes",
    "PrefillRequest": "prefill.request",
    "PrefillScheduler": "prefill.scheduler",
    "PrefillTransfers": "runtime.prefill_transfers",
    "PrefixKVError": "errors",
    "RadixCache": "cache.radix_cache",
    "RadixKey": "cache.radix_key",
    "RankLog": "ranks.replica",
    "Request": "request",
    "StatePool": "memory.state_pool",
    "StateTensor": "memory.state_layout",
    "TransportConfig": "config",
    "page_table": "paging",
    "plan_sends": "prefill.send_plan",
    "prompt_digest": "digest",
    "shared_bytes": "memory.shared",
    "slot_mapping": "paging",
}
# Public names that are another in their module.
_AS = {
    "register_admission": ("decode.admission", "register"),
    "register_policy": ("cache.eviction.policy", "register"),
}
# NodeCollector needs an extra, so that `import *` leaves it out.
__all__ = sorted({*_HOME, *_AS} - {"NodeCollector"})


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _AS:
        raise AttributeError(f"module 'prefixkv' has no attribute {name!r}")
    module, inside = _AS.get(name) or (_HOME[name], name)
    value = getattr(import_module(f"prefixkv.{module}"), inside)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
