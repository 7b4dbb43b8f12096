"""All imports of the transfer backend from SGLang, besides those in `internals.py`.

Attributes of SGLang's objects that the backend uses, besides methods: manager: `kv_args`,
`server_socket`, `local_ip`, `request_status`, `failure_records`, `prefill_info_table`,
`connection_pool`, `connection_lock`, `attn_tp_size`, `enable_deferred_decode_kv_release`; sender:
`_early_send_wait_event`, `num_kv_indices`, `curr_idx`, `aux_index`; receiver: `bootstrap_infos`,
`prefill_info`, `init_time`; request: `origin_input_ids`, `output_ids`, `cache_salt`,
`pd_rebootstrap_in_progress`; decode's transfer queue: `enable_deferred_kv_release`,
`deferred_kv_release_timeout`.
"""

from __future__ import annotations

from typing import cast

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    web,
)
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel, get_serving
from sglang.srt.utils.network import get_local_ip_auto


def gather(given: object) -> list[object]:
    """Gather from all ranks that share a model's KV heads. See `rank_group.Gather`."""
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return [given]
    return cast(list[object], parallel.attn_tp_group.all_gather_object(given))
