"""Names for the author of an adapter: a plug-in of an engine, a server, a policy, a transport.

The rings of the package (`engines`, `serving`, `cli`, `testing`) take what they need from
`prefixkv`, `prefixkv.transfer` and this module, and from nothing else of the core; so can an
adapter that lives elsewhere. Each name is loaded when it is first used. `prefixkv` has what the
author of an engine needs, and `prefixkv.transfer` the transfer side alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv._lazy import homes_of, lazy_names

if TYPE_CHECKING:
    from prefixkv.admission import AdmissionPolicy as AdmissionPolicy
    from prefixkv.admission import register_admission as register_admission
    from prefixkv.cache.events import NO_PARENT as NO_PARENT
    from prefixkv.cache.events import Change as Change
    from prefixkv.cache.events import CheckpointEvicted as CheckpointEvicted
    from prefixkv.cache.events import CheckpointRemoved as CheckpointRemoved
    from prefixkv.cache.events import CheckpointSaved as CheckpointSaved
    from prefixkv.cache.events import CheckpointStored as CheckpointStored
    from prefixkv.cache.events import Cleared as Cleared
    from prefixkv.cache.events import EventBatch as EventBatch
    from prefixkv.cache.events import Inserted as Inserted
    from prefixkv.cache.events import PagePaths as PagePaths
    from prefixkv.cache.events import PageRef as PageRef
    from prefixkv.cache.events import Removed as Removed
    from prefixkv.cache.events import Stored as Stored
    from prefixkv.cache.events import TakenOut as TakenOut
    from prefixkv.cache.events import page_keys as page_keys
    from prefixkv.cache.eviction.ghosts import Ghost as Ghost
    from prefixkv.cache.eviction.ghosts import GhostPolicy as GhostPolicy
    from prefixkv.cache.eviction.ghosts import staircase as staircase
    from prefixkv.cache.eviction.policy import DEFAULT_POLICY as DEFAULT_POLICY
    from prefixkv.cache.eviction.policy import Policy as Policy
    from prefixkv.cache.eviction.policy import Use as Use
    from prefixkv.cache.eviction.policy import explain_policy as explain_policy
    from prefixkv.cache.eviction.policy import make_policy as make_policy
    from prefixkv.cache.eviction.policy import policy_names as policy_names
    from prefixkv.cache.eviction.policy import register_policy as register_policy
    from prefixkv.cache.eviction.queues import EvictionQueue as EvictionQueue
    from prefixkv.cache.eviction.queues import LeafOrders as LeafOrders
    from prefixkv.cache.node import TreeNode as TreeNode
    from prefixkv.cache.page_flags import packed_range as packed_range
    from prefixkv.cache.page_flags import page_runs as page_runs
    from prefixkv.cache.radix_cache import RadixCache as RadixCache
    from prefixkv.cache.radix_key import TOKEN_BYTES as TOKEN_BYTES
    from prefixkv.cache.radix_key import TOKEN_LIMIT as TOKEN_LIMIT
    from prefixkv.cache.radix_key import RadixKey as RadixKey
    from prefixkv.cache.radix_key import common_pages as common_pages
    from prefixkv.cache.radix_key import shortened as shortened
    from prefixkv.cache.results import InsertResult as InsertResult
    from prefixkv.cache.results import MatchResult as MatchResult
    from prefixkv.cache.results import PrefixLock as PrefixLock
    from prefixkv.cache.results import packed_ids as packed_ids
    from prefixkv.config import check_version as check_version
    from prefixkv.decode.host_tier import HostTier as HostTier
    from prefixkv.decode.sources import Lack as Lack
    from prefixkv.decode.sources import Source as Source
    from prefixkv.decode.sources import Sources as Sources
    from prefixkv.errors import AbortedError as AbortedError
    from prefixkv.errors import CallerError as CallerError
    from prefixkv.errors import CapacityError as CapacityError
    from prefixkv.errors import ClosedError as ClosedError
    from prefixkv.errors import ConfigError as ConfigError
    from prefixkv.errors import DrainingError as DrainingError
    from prefixkv.errors import HandshakeError as HandshakeError
    from prefixkv.errors import InternalError as InternalError
    from prefixkv.errors import LockError as LockError
    from prefixkv.errors import ProtocolError as ProtocolError
    from prefixkv.errors import RequestError as RequestError
    from prefixkv.errors import TokenError as TokenError
    from prefixkv.errors import TraceError as TraceError
    from prefixkv.errors import TransferError as TransferError
    from prefixkv.errors import UserErrors as UserErrors
    from prefixkv.errors import check_laws as check_laws
    from prefixkv.errors import check_range as check_range
    from prefixkv.errors import nearest as nearest
    from prefixkv.errors import shown as shown
    from prefixkv.errors import shown_namespace as shown_namespace
    from prefixkv.kv_events.publisher import default_topic as default_topic
    from prefixkv.memory.kv_layout import ITEMSIZE as ITEMSIZE
    from prefixkv.memory.kv_layout import KVLayout as KVLayout
    from prefixkv.memory.kv_layout import Slab as Slab
    from prefixkv.memory.kv_pool import check_device as check_device
    from prefixkv.memory.mesh import check_page_sizes as check_page_sizes
    from prefixkv.pages.windows import WindowPages as WindowPages
    from prefixkv.paging import MAX_INDEX as MAX_INDEX
    from prefixkv.paging import PageIds as PageIds
    from prefixkv.paging import Pages as Pages
    from prefixkv.paging import as_pages as as_pages
    from prefixkv.paging import page_table as page_table
    from prefixkv.paging import pages_for as pages_for
    from prefixkv.paging import slot_mapping as slot_mapping
    from prefixkv.protocol.host_copy import HostCopy as HostCopy
    from prefixkv.protocol.host_copy import HostCopyDone as HostCopyDone
    from prefixkv.protocol.ids import PeerId as PeerId
    from prefixkv.protocol.messages import PROTOCOL_VERSION as PROTOCOL_VERSION
    from prefixkv.protocol.messages import ProcessLife as ProcessLife
    from prefixkv.ranks.row_log import RankLog as RankLog
    from prefixkv.request import DeviceEvent as DeviceEvent
    from prefixkv.request import whole_number as whole_number
    from prefixkv.runtime.death import HeldLife as HeldLife
    from prefixkv.runtime.death import is_dead as is_dead
    from prefixkv.runtime.decode_rank import DecodeRank as DecodeRank
    from prefixkv.runtime.groups import DecodeGroup as DecodeGroup
    from prefixkv.runtime.groups import PrefillGroup as PrefillGroup
    from prefixkv.runtime.host_copies import HostMemory as HostMemory
    from prefixkv.runtime.metrics import NodeCollector as NodeCollector
    from prefixkv.runtime.one_thread import Closing as Closing
    from prefixkv.runtime.prefill_rank import PrefillRank as PrefillRank
    from prefixkv.runtime.transfers import MakeTransport as MakeTransport
    from prefixkv.runtime.transfers import secret_number as secret_number
    from prefixkv.settings import FILE as FILE
    from prefixkv.settings import MAX_BYTES as MAX_BYTES
    from prefixkv.settings import PREFIX as PREFIX
    from prefixkv.settings import VARIABLE as VARIABLE
    from prefixkv.settings import Bytes as Bytes
    from prefixkv.settings import Count as Count
    from prefixkv.settings import CountOrZero as CountOrZero
    from prefixkv.settings import Found as Found
    from prefixkv.settings import Number as Number
    from prefixkv.settings import Port as Port
    from prefixkv.settings import Seconds as Seconds
    from prefixkv.settings import SecondsOrZero as SecondsOrZero
    from prefixkv.settings import Setting as Setting
    from prefixkv.settings import as_environ as as_environ
    from prefixkv.settings import at_least as at_least
    from prefixkv.settings import build as build
    from prefixkv.settings import check_fields as check_fields
    from prefixkv.settings import check_time as check_time
    from prefixkv.settings import convert as convert
    from prefixkv.settings import doc as doc
    from prefixkv.settings import find as find
    from prefixkv.settings import load as load
    from prefixkv.settings import parse_size as parse_size
    from prefixkv.settings import read_toml as read_toml
    from prefixkv.settings import settings_of as settings_of
    from prefixkv.transport.base import Transport as Transport
    from prefixkv.variables import check_environ as check_environ
    from prefixkv.wakeups import Inbox as Inbox

_HOMES = homes_of(
    {
        # Prefix cache: keys, results, the tree.
        "cache.radix_cache": "RadixCache",
        "cache.radix_key": "RadixKey TOKEN_BYTES TOKEN_LIMIT common_pages shortened",
        "cache.node": "TreeNode",
        "cache.results": "InsertResult MatchResult PrefixLock packed_ids",
        "cache.page_flags": "packed_range page_runs",
        # Changes of a cache, for routers.
        "cache.events": """
            Change CheckpointEvicted CheckpointRemoved CheckpointSaved CheckpointStored
            Cleared EventBatch Inserted NO_PARENT PagePaths PageRef Removed Stored TakenOut
            page_keys""",
        "kv_events.publisher": "default_topic",
        # Eviction and admission policies.
        "cache.eviction.policy": """
            DEFAULT_POLICY Policy Use explain_policy make_policy policy_names
            register_policy""",
        "cache.eviction.queues": "EvictionQueue LeafOrders",
        "cache.eviction.ghosts": "Ghost GhostPolicy staircase",
        "admission": "AdmissionPolicy register_admission",
        # Where decode gets what a request lacks.
        "decode.sources": "Lack Source Sources",
        # Host memory behind a device's pages.
        "decode.host_tier": "HostTier",
        "runtime.host_copies": "HostMemory",
        "protocol.host_copy": "HostCopy HostCopyDone",
        # Pages and tokens.
        "paging": "MAX_INDEX PageIds Pages as_pages page_table pages_for slot_mapping",
        "pages.windows": "WindowPages",
        # Layouts and meshes.
        "memory.kv_layout": "ITEMSIZE KVLayout Slab",
        "memory.mesh": "check_page_sizes",
        "memory.kv_pool": "check_device",
        # Several ranks.
        "runtime.groups": "DecodeGroup PrefillGroup",
        "runtime.decode_rank": "DecodeRank",
        "ranks.row_log": "RankLog",
        "runtime.prefill_rank": "PrefillRank",
        # Processes: peers, their death, their metrics, threads.
        "protocol.ids": "PeerId",
        "protocol.messages": "PROTOCOL_VERSION ProcessLife",
        "runtime.death": "HeldLife is_dead",
        "runtime.metrics": "NodeCollector",
        "runtime.transfers": "MakeTransport secret_number",
        "request": "DeviceEvent whole_number",
        "runtime.one_thread": "Closing",
        "wakeups": "Inbox",
        # A transport of one's own.
        "transport.base": "Transport",
        # Settings: bounds, and the one converter.
        "settings": """
            Bytes Count CountOrZero FILE Found MAX_BYTES Number PREFIX Port Seconds
            SecondsOrZero Setting VARIABLE as_environ at_least build check_fields check_time
            convert doc find load parse_size read_toml settings_of""",
        "variables": "check_environ",
        "config": "check_version",
        # Checks of values, and errors (the whole tree is `prefixkv.errors`).
        "errors": """
            AbortedError CallerError CapacityError ClosedError ConfigError DrainingError
            HandshakeError InternalError LockError ProtocolError RequestError TokenError
            TraceError TransferError UserErrors check_laws check_range nearest shown
            shown_namespace""",
    }
)
# NodeCollector needs an extra, so that `import *` leaves it out.
__all__ = sorted({*_HOMES} - {"NodeCollector"})  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
