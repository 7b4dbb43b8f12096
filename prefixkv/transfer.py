"""The transfer side on its own, for an engine that owns its pages and its prefix cache: see
`prefixkv.runtime.transfers`.

    transfers = DecodeTransfers(pool, DecodeConfig(...))
    digest = prompt_digest(tokens, namespace)            # on both sides
    transfers.open(room, 0, num_tokens, prefix_len, pages, "tcp://host:port", digest)
    for event in transfers.take_events(): ...            # RoomEnded, RoomDrained, RoomOverdue

    transfers = PrefillTransfers(pool, PrefillConfig(bind="tcp://..."))
    transfers.add(room, 0, num_tokens, decode="decode-0", digest=digest)
    transfers.send_chunk(room, end, pages, decode="decode-0", last=True, aux=first_token)
    for event in transfers.take_events(): ...            # Bootstrapped, RoomEnded, SourceFree
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv._lazy import homes_of, lazy_names

if TYPE_CHECKING:
    from prefixkv.assembly import DecodeTransfers as DecodeTransfers
    from prefixkv.assembly import PrefillTransfers as PrefillTransfers
    from prefixkv.digest import prompt_digest as prompt_digest
    from prefixkv.protocol.events import Bootstrapped as Bootstrapped
    from prefixkv.protocol.events import DecodeEvent as DecodeEvent
    from prefixkv.protocol.events import PrefillEvent as PrefillEvent
    from prefixkv.protocol.events import RoomDrained as RoomDrained
    from prefixkv.protocol.events import RoomEnded as RoomEnded
    from prefixkv.protocol.events import RoomOverdue as RoomOverdue
    from prefixkv.protocol.events import SourceFree as SourceFree
    from prefixkv.protocol.ids import KVPoll as KVPoll
    from prefixkv.protocol.ids import RoomKey as RoomKey
    from prefixkv.runtime.rank_spec import RankSpec as RankSpec

_HOMES = homes_of(
    {
        "protocol.events": """
            Bootstrapped DecodeEvent PrefillEvent RoomDrained RoomEnded RoomOverdue
            SourceFree""",
        "assembly": "DecodeTransfers PrefillTransfers",
        "protocol.ids": "KVPoll RoomKey",
        "runtime.rank_spec": "RankSpec",
        "digest": "prompt_digest",
    }
)
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
