"""Run in the environment that has vLLM's wheel: its decoder of cache events reads what comes in,
and tells how many of which events there were.

Only that one file of vLLM is loaded: its other parts need torch.
"""

import importlib.util
import json
import struct
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec


def load() -> Any:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0])
    names = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils": {},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
        ),
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    for name, inside in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(inside)
    spec = importlib.util.spec_from_file_location("kv", folder / "distributed" / "kv_events.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    kv = load()
    decoder = msgspec.msgpack.Decoder(kv.KVEventBatch)
    counts: Counter[str] = Counter()
    while size := sys.stdin.buffer.read(4):
        batch = decoder.decode(sys.stdin.buffer.read(*struct.unpack(">I", size)))
        assert isinstance(batch.data_parallel_rank, int)
        counts["batches"] += 1
        for event in batch.events:
            counts[type(event).__name__] += 1
            counts[f"group {getattr(event, 'group_idx', None)}"] += 1
            if isinstance(event, kv.BlockStored):
                assert len(event.block_hashes) * event.block_size == len(event.token_ids)
                assert all(type(one) is int for one in event.block_hashes)
                counts["blocks"] += len(event.block_hashes)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
