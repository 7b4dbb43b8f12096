"""Names for the author of an adapter: a plug-in of an engine, a server, a policy, a transport.

The rings of the package (`engines`, `serving`, `proxy`, `cli`, `conformance`) take what they need
from `prefixkv`, `prefixkv.transfer`, this module, `prefixkv.errors` and `prefixkv.settings`, and
from nothing else of the core; so can an adapter that lives elsewhere. Each name is loaded when it
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv._lazy import homes_of, lazy_names

if TYPE_CHECKING:
    from prefixkv.admission import AdmissionPolicy as AdmissionPolicy
    from prefixkv.admission import register_admission as register_admission
    from prefixkv.assembly import DecodeGroup as DecodeGroup
    from prefixkv.assembly import DecodeRank as DecodeRank
    from prefixkv.assembly import PrefillGroup as PrefillGroup
    from prefixkv.assembly import PrefillRank as PrefillRank
    from prefixkv.cache.events import NO_PARENT as NO_PARENT
    from prefixkv.cache.events import Change as Change
    from prefixkv.cache.events import CheckpointRemoved as CheckpointRemoved
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
    from prefixkv.cache.eviction.policy import EvictionQueue as EvictionQueue
    from prefixkv.cache.eviction.policy import Policy as Policy
    from prefixkv.cache.eviction.policy import Use as Use
    from prefixkv.cache.eviction.policy import explain_policy as explain_policy
    from prefixkv.cache.eviction.policy import make_policy as make_policy
    from prefixkv.cache.eviction.policy import policy_names as policy_names
    from prefixkv.cache.eviction.policy import register_policy as register_policy
    from prefixkv.cache.node import TreeNode as TreeNode
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
    from prefixkv.config import check_environ as check_environ
    from prefixkv.config import check_version as check_version
    from prefixkv.decode.host_tier import HostTier as HostTier
    from prefixkv.decode.sources import Sources as Sources
    from prefixkv.kv_events.publisher import default_topic as default_topic
    from prefixkv.memory.kv_layout import ITEMSIZE as ITEMSIZE
    from prefixkv.memory.kv_layout import KVLayout as KVLayout
    from prefixkv.memory.kv_layout import Slab as Slab
    from prefixkv.memory.kv_pool import check_device as check_device
    from prefixkv.memory.mesh import check_page_sizes as check_page_sizes
    from prefixkv.pages.groups import GroupPages as GroupPages
    from prefixkv.paging import MAX_INDEX as MAX_INDEX
    from prefixkv.paging import PageIds as PageIds
    from prefixkv.paging import Pages as Pages
    from prefixkv.paging import as_pages as as_pages
    from prefixkv.paging import page_table as page_table
    from prefixkv.paging import pages_for as pages_for
    from prefixkv.paging import slot_mapping as slot_mapping
    from prefixkv.policies import DEFAULT_POLICY as DEFAULT_POLICY
    from prefixkv.protocol.events import HostCopy as HostCopy
    from prefixkv.protocol.events import HostCopyDone as HostCopyDone
    from prefixkv.protocol.ids import PeerId as PeerId
    from prefixkv.protocol.messages import PROTOCOL_VERSION as PROTOCOL_VERSION
    from prefixkv.protocol.messages import ProcessLife as ProcessLife
    from prefixkv.ranks.row_log import RankLog as RankLog
    from prefixkv.request import MAX_SESSION_CHARS as MAX_SESSION_CHARS
    from prefixkv.request import DeviceEvent as DeviceEvent
    from prefixkv.request import whole_number as whole_number
    from prefixkv.runtime.death import HeldLife as HeldLife
    from prefixkv.runtime.death import is_dead as is_dead
    from prefixkv.runtime.host_copies import HostMemory as HostMemory
    from prefixkv.runtime.metrics import NodeCollector as NodeCollector
    from prefixkv.runtime.transfers import secret_number as secret_number
    from prefixkv.threads import Closing as Closing
    from prefixkv.threads import Inbox as Inbox
    from prefixkv.transport.base import Transport as Transport

_HOMES = homes_of(
    {
        # An eviction policy: the interface, its registry, and what a policy may be made of.
        "cache.eviction.policy": """
            EvictionQueue Policy Use explain_policy make_policy policy_names register_policy""",
        "cache.eviction.ghosts": "Ghost GhostPolicy staircase",
        "policies": "DEFAULT_POLICY",
        # An admission policy.
        "admission": "AdmissionPolicy register_admission",
        # A transport.
        "transport.base": "Transport",
        "runtime.transfers": "secret_number",
        # A source of what a request lacks; host memory is one.
        "decode.sources": "Sources",
        "decode.host_tier": "HostTier",
        "runtime.host_copies": "HostMemory",
        "protocol.events": "HostCopy HostCopyDone",
        # Several ranks.
        "assembly": "DecodeGroup DecodeRank PrefillGroup PrefillRank",
        "ranks.row_log": "RankLog",
        # A listener to the changes of a cache: a router.
        "cache.events": """
            Change CheckpointRemoved CheckpointStored
            Cleared EventBatch Inserted NO_PARENT PagePaths PageRef Removed Stored TakenOut
            page_keys""",
        "kv_events.publisher": "default_topic",
        # The tree, under an engine that has pages of its own.
        "cache.radix_cache": "RadixCache",
        "cache.radix_key": "RadixKey TOKEN_BYTES TOKEN_LIMIT common_pages shortened",
        "cache.node": "TreeNode",
        "cache.results": "InsertResult MatchResult PrefixLock packed_ids",
        # Pages, layouts and meshes.
        "paging": "MAX_INDEX PageIds Pages as_pages page_table pages_for slot_mapping",
        "pages.groups": "GroupPages",
        "memory.kv_layout": "ITEMSIZE KVLayout Slab",
        "memory.mesh": "check_page_sizes",
        "memory.kv_pool": "check_device",
        # Processes: identities, proofs of death, metrics, threads, variables.
        "protocol.ids": "PeerId",
        "protocol.messages": "PROTOCOL_VERSION ProcessLife",
        "runtime.death": "HeldLife is_dead",
        "runtime.metrics": "NodeCollector",
        "threads": "Closing Inbox",
        "request": "MAX_SESSION_CHARS DeviceEvent whole_number",
        "config": "check_environ check_version",
    }
)
# NodeCollector needs an extra, so that `import *` leaves it out.
__all__ = sorted({*_HOMES} - {"NodeCollector"})  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
