"""Hits of a tenant without hints beside another that lies in all of its own.

    python -m benchmarks.policies.liars TRACE... [--seed 1]

Each session of a trace goes to one of two tenants, drawn with the seed; a session is a prompt that
begins with more than .3 of the blocks of a former one. Of the second half of the trace: hits of the
honest tenant and of the other, by their hits without any hint, where the other says the opposite of
the truth (ends for returns), and where it says the truth.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from prefixkv.cli.replay.run import RequestHits, replay_policy
from prefixkv.cli.replay.trace import Trace, block_names, client_hints, read_trace
from prefixkv.spi import RadixKey


def two_tenants(trace: Trace, seed: int) -> tuple[Trace, list[int]]:
    random, owners = Random(seed), dict[Any, int]()
    requests, tenants = [], []
    for request in trace.requests:
        names = block_names(request.key, trace.page_size)
        known = next((at for at in range(len(names), 0, -1) if names[at - 1] in owners), 0)
        goes_on = known and known >= 0.3 * len(names)
        tenant = owners[names[known - 1]] if goes_on else random.randrange(2)
        for name in names:
            owners.setdefault(name, tenant)
        requests.append(replace(request, key=RadixKey(request.key.tokens(), tenant)))
        tenants.append(tenant)
    return replace(trace, requests=requests), tenants


def hits_of_each(
    trace: Trace, tenants: list[int], capacity: int, hints: Sequence[float | None] | None
) -> list[int]:
    hits = [0, 0]

    def count(one: RequestHits) -> None:
        hits[tenants[one.request]] += one.hit_tokens * one.counted

    replay_policy(trace, "adaptive", capacity, 0.5, hints=hints, each=count)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for path in args.traces:
        trace, tenants = two_tenants(read_trace(path, 512).in_order(), args.seed)
        told = client_hints(trace, 10.0)
        true = [hint if tenant else None for hint, tenant in zip(told, tenants, strict=True)]
        lies = [None if hint is None else 0.0 if hint else 30.0 for hint in true]
        for capacity in (1000, 3000):
            plain = hits_of_each(trace, tenants, capacity, None)
            for name, hints in (("lies", lies), ("truth", true)):
                found = hits_of_each(trace, tenants, capacity, hints)
                honest, other = (a / b for a, b in zip(found, plain, strict=True))
                print(f"{path.name}, {capacity} blocks, {name}: {honest:.2f}, {other:.2f}")


if __name__ == "__main__":
    main()
