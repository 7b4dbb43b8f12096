"""Puts into the kernel's seams what can be left out: the one file that imports both.

An organ is a folder, or a list of files, that the kernel does not import, with one named seam. To
leave one out, delete it and its lines here. `tests/repository/test_amputation.py` does that.
"""

from __future__ import annotations

from prefixkv import policies as policies
from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.decode import compute_source, host_tier
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.state_checkpoints import CheckpointedCompute
from prefixkv.kv_events import publisher
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.runtime import host_copies, looks, ranks, record, staging
from prefixkv.runtime.death import ProverThread
from prefixkv.runtime.decode_node import DecodeNode as DecodeNode
from prefixkv.runtime.decode_transfers import DecodeTransfers as DecodeTransfers
from prefixkv.runtime.node import Node
from prefixkv.runtime.prefill_node import PrefillNode as PrefillNode
from prefixkv.runtime.prefill_transfers import PrefillTransfers as PrefillTransfers
from prefixkv.runtime.ranks import DecodeGroup as DecodeGroup
from prefixkv.runtime.ranks import DecodeRank as DecodeRank
from prefixkv.runtime.ranks import PrefillGroup as PrefillGroup
from prefixkv.runtime.ranks import PrefillRank as PrefillRank
from prefixkv.runtime.transfers import Transfers
from prefixkv.transport.shm.loop import ShmTransport
from prefixkv.transport.transports import MAKERS

Node.installers["kv_events"] = publisher.install
Node.installers["record"] = record.install
DecodeNode.make_tier = host_copies.make_tier
DecodeNode.refusals.append(compute_source.check_node)
DecodeNode.refusals.append(host_copies.check_node)
DecodeScheduler.source_makers.append(host_tier.make_host)
DecodeScheduler.source_makers.append(compute_source.make_compute)
compute_source.WITH_SAVES[:] = [CheckpointedCompute]
PageManager.make_saves = Checkpoints
PrefillScheduler.resume_at_saves = RequestCheckpoints
Node.lead = ranks.check_log, ranks.lead
Transfers.proofs = ProverThread
MAKERS["shm"] = ShmTransport
staging.install()
looks.install()
