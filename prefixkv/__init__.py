"""A decode-side radix prefix cache and scheduler for prefill/decode disaggregation, over NIXL.

These names are for the author of an engine. `prefixkv.transfer` is the transfer side alone, for an
engine that owns its pages and its prefix cache; `prefixkv.spi` is for the author of an adapter;
`prefixkv.errors` has all error classes. Everything else may change. Each name is loaded when it is
first used, so that importing the package costs next to nothing and loads neither torch nor nixl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv._lazy import homes_of, lazy_names

if TYPE_CHECKING:
    from prefixkv.assembly import DecodeNode as DecodeNode
    from prefixkv.assembly import PrefillNode as PrefillNode
    from prefixkv.cache.radix_key import Namespace as Namespace
    from prefixkv.config import ComputeConfig as ComputeConfig
    from prefixkv.config import ControlConfig as ControlConfig
    from prefixkv.config import CurveConfig as CurveConfig
    from prefixkv.config import DecodeConfig as DecodeConfig
    from prefixkv.config import HostConfig as HostConfig
    from prefixkv.config import KVEventsConfig as KVEventsConfig
    from prefixkv.config import ModelConfig as ModelConfig
    from prefixkv.config import PrefillConfig as PrefillConfig
    from prefixkv.config import TransportConfig as TransportConfig
    from prefixkv.decode.request import DecodeRequest as DecodeRequest
    from prefixkv.decode.request import PrefillAsk as PrefillAsk
    from prefixkv.digest import prompt_digest as prompt_digest
    from prefixkv.errors import NotFiniteError as NotFiniteError
    from prefixkv.errors import OutOfPagesError as OutOfPagesError
    from prefixkv.errors import PrefixKVError as PrefixKVError
    from prefixkv.memory.kv_pool import KVPool as KVPool
    from prefixkv.memory.kv_pool import PoolGroup as PoolGroup
    from prefixkv.memory.kv_pool import shared_bytes as shared_bytes
    from prefixkv.memory.mesh import Mesh as Mesh
    from prefixkv.memory.state_layout import StateTensor as StateTensor
    from prefixkv.memory.state_pool import StatePool as StatePool
    from prefixkv.prefill.request import PrefillRequest as PrefillRequest
    from prefixkv.request import Hints as Hints
    from prefixkv.request import Request as Request

__version__ = "0.1.0"

_HOMES = homes_of(
    {
        "assembly": "DecodeNode PrefillNode",
        "config": """
            ComputeConfig ControlConfig CurveConfig DecodeConfig HostConfig KVEventsConfig
            ModelConfig PrefillConfig TransportConfig""",
        "decode.request": "DecodeRequest PrefillAsk",
        "memory.kv_pool": "KVPool PoolGroup shared_bytes",
        "memory.mesh": "Mesh",
        "cache.radix_key": "Namespace",
        "errors": "NotFiniteError OutOfPagesError PrefixKVError",
        "prefill.request": "PrefillRequest",
        "request": "Hints Request",
        "memory.state_pool": "StatePool",
        "memory.state_layout": "StateTensor",
        "digest": "prompt_digest",
    }
)
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
