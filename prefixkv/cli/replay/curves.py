"""Several policies at several capacities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from prefixkv.cli.policies import policy_of
from prefixkv.cli.replay.optimum import OPTIMUM, replay_optimum
from prefixkv.cli.replay.run import ReplayResult, replay_policy
from prefixkv.cli.replay.tiers import HostSize, host_size
from prefixkv.cli.replay.trace import Trace, footprint
from prefixkv.errors import ConfigError, check_range
from prefixkv.spi import Policy, policy_names

MakePolicy: TypeAlias = Callable[[], Policy]
"""Makes a new eviction policy: an object of it serves one replay. A class is one."""

Makers: TypeAlias = Mapping[str, MakePolicy | None]
"""By the name of the results; None stands for the optimum."""


class RequestHits(NamedTuple):
    """What one request of a trace found in one replay."""

    trace: str
    policy: str
    capacity_blocks: int
    request: int  # from 0, in the order of replay, which is that of time
    time_s: float
    blocks: int  # asked for, a partial one included
    tokens: int  # of the prompt
    hit_tokens: int
    counted: bool  # False: it only warms the cache, and counts in no ratio
    host_hit_tokens: dict[int, int]  # by size of host tier (blocks): what it has behind those


def capacities_for(blocks: int) -> list[int]:
    """Return capacities that show the hit curve of a trace with this many distinct blocks: from a
    64th of them on, each twice the one before, up to one that holds all.

    >>> capacities_for(6400), capacities_for(3)
    ([100, 200, 400, 800, 1600, 3200, 6400], [1, 2, 4])
    """
    sizes = [-(-max(1, blocks) // 64)]
    while sizes[-1] < blocks:
        sizes.append(2 * sizes[-1])
    return sizes


def replays(
    trace: Trace, makers: Makers, capacities: Sequence[int], *, warm: float = 0.0, queue: int = 0,
    hints: Sequence[float | None] | None = None, each: Callable[[RequestHits], None] | None = None,
    running: int = 1, hosts: Sequence[HostSize] = (),
) -> Iterator[ReplayResult]:  # fmt: skip
    """As `replay_curves`, one result after the other, nothing checked but the hosts' sizes."""
    block_bytes = trace.block_tokens * trace.bytes_per_token
    # All sizes first: they raise before anything is replayed.
    tiers = {
        size: sorted({host.blocks(size, block_bytes) for host in hosts}) for size in capacities
    }

    def note(
        name: str, size: int, sizes: Sequence[int], at: int, known: int, behind: Sequence[int]
    ) -> None:
        request, block = trace.requests[at], trace.block_tokens
        assert each is not None
        each(
            RequestHits(
                trace.name, name, size, at, request.time_s, len(request.key) // trace.page_size,
                request.num_tokens, known * block, at >= int(warm * len(trace.requests)),
                {host: blocks * block for host, blocks in zip(sizes, behind, strict=True)},
            )
        )  # fmt: skip

    for size in capacities:
        for name, make in makers.items():
            if make is None:
                # It knows the future, so neither a queue nor hints could add to it. It is that of
                # the device alone.
                noted = None if each is None else partial(note, name, size, ())
                result = replay_optimum(trace, size, warm, noted, running)
            else:
                noted = None if each is None else partial(note, name, size, tiers[size])
                result = replay_policy(
                    trace, make(), size, warm, queue, hints, noted, running, tiers[size]
                )
            # By the name that it was given, with its settings: two settings are two curves.
            yield replace(result, policy=name)


def replay_curves(
    trace: Trace,
    policies: Iterable[str | MakePolicy] | Mapping[str, str | MakePolicy] | None = None,
    capacities: Iterable[int] | None = None,
    *,
    warm: float = 0.0,
    queue: int = 0,
    hints: Sequence[float | None] | None = None,
    each: Callable[[RequestHits], None] | None = None,
    running: int = 1,
    hosts: Iterable[str | int] = (),
    bytes_per_token: int = 0,
) -> list[ReplayResult]:
    """Replay a trace with each policy at each capacity, through a real `RadixCache`. Costs some ten
    microseconds per request of each replay, and as much for each host tier.

    Args:
        policies: names as on the command line ("adaptive:trust=30", "MODULE:CLASS", "optimum"),
            functions that make a new policy, or a map from names of results to these. None: all,
            and the optimum.
        capacities: in blocks, at least 1. None: from 1/64 of the trace's different blocks to all.
        warm: share of the requests that only warm the cache, in [0, 0.99].
        queue: how many following requests count as waiting.
        hints: per request, what its client says at its end (`finish(continues=)`).
        each: called with what each request of each replay finds.
        running: requests that run at a time: their blocks count against the capacity, and are not
            evicted. 0: not even those of the request that comes count.
        hosts: sizes of host tiers, each for itself: "4x" (of the capacity), "64GiB", or blocks.
        bytes_per_token: of KV, for sizes and results in bytes. 0: what the trace says, if it does.
    Returns:
        A result for each capacity and policy: capacities rising, policies as given.

    Raises ConfigError, before any replay: an unknown policy, two of one name, or a value out of
    range.
    """
    check_range("warm", warm, 0, 0.99)
    check_range("queue", queue, 0, 1_000_000)
    check_range("running", running, 0, 1_000_000)
    check_range("bytes_per_token", bytes_per_token, 0, 2**32)
    if bytes_per_token:
        trace = replace(trace, bytes_per_token=bytes_per_token)
    tiers = [host_size("hosts", one) for one in hosts]
    if hints is not None and len(hints) != len(trace.requests):
        raise ConfigError(f"{len(hints)} hints for {len(trace.requests)} requests")
    makers = _makers([*policy_names(), OPTIMUM] if policies is None else policies)
    sizes = capacities_for(footprint(trace)) if capacities is None else sorted({*capacities})
    for size in sizes:
        check_range("capacity", size, 1, 10**8)
    return [
        *replays(
            trace, makers, sizes, warm=warm, queue=queue, hints=hints, each=each, running=running,
            hosts=tiers,
        )
    ]  # fmt: skip


def maker_of(name: str) -> MakePolicy | None:
    """Raises ConfigError for a name of no policy."""
    if name == OPTIMUM:
        return None
    policy_of(name)  # what is wrong with it is found out before anything is replayed
    return partial(policy_of, name)


def _makers(policies: Any) -> Makers:
    if not isinstance(policies, Mapping):
        named = [(one if isinstance(one, str) else _name_of(one), one) for one in policies]
        policies = dict(named)
        if len(policies) < len(named):
            names = ", ".join(name for name, _ in named)
            raise ConfigError(f"two policies of one name: {names}; give them names of your own")
    makers: dict[str, MakePolicy | None] = {}
    for name, policy in policies.items():
        if not isinstance(policy, str):
            _name_of(policy)
        makers[name] = maker_of(policy) if isinstance(policy, str) else policy
    return makers


def _name_of(make: MakePolicy) -> str:
    """Raises ConfigError if the function makes no policy."""
    made = make() if callable(make) else None
    name = getattr(made, "name", None)
    if not isinstance(made, Policy) or not isinstance(name, str) or not name:
        raise ConfigError(f"{make!r} is no function that makes an eviction policy with a name")
    return name
