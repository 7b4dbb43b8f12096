"""`replay_curves`: several policies at several capacities, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from prefixkv.cli.policies import policy_of
from prefixkv.cli.replay.curves import capacities_for
from prefixkv.cli.replay.hosts import HostSize, host_sizes
from prefixkv.cli.replay.optimum import OPTIMUM, replay_optimum
from prefixkv.cli.replay.run import ReplayResult, replay_policy
from prefixkv.cli.replay.trace import Trace, footprint
from prefixkv.errors import ConfigError, check_range
from prefixkv.spi import Policy, policy_names

MakePolicy = Callable[[], Policy]
"""Makes a new eviction policy: an object of it serves one replay. A class is one."""


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


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of one trace. They share all but policy and capacity; see `replay_curves`."""

    trace: Trace
    warm: float = 0.0
    queue: int = 0
    hints: Sequence[bool | None] | None = None
    each: Callable[[RequestHits], None] | None = None
    running: int = 1
    hosts: Sequence[HostSize] = ()

    def run(
        self,
        name: str,
        make: MakePolicy | None,
        capacity: int,
        progress: Callable[[int], None] | None = None,
    ) -> ReplayResult:
        """Replay with one policy under this name; without a policy, with the optimum."""
        # The optimum knows the future: neither a queue nor hints could add to it. It is that of the
        # device alone.
        hosts = [] if make is None else self.host_blocks(capacity)
        each = None if self.each is None else partial(self._note, name, capacity, hosts)
        if make is None:
            result = replay_optimum(self.trace, capacity, self.warm, each, self.running)
        else:
            result = replay_policy(
                self.trace, make(), capacity, self.warm, self.queue, progress, self.hints, each,
                self.running, hosts,
            )  # fmt: skip
        return replace(result, policy=name)

    def host_blocks(self, capacity: int) -> list[int]:
        """Rising. Raises ConfigError for bytes if the KV of a token is not known."""
        block_bytes = self.trace.block_tokens * self.trace.bytes_per_token
        return sorted({size.blocks(capacity, block_bytes) for size in self.hosts})

    def _note(
        self,
        name: str,
        capacity: int,
        hosts: Sequence[int],
        at: int,
        known: int,
        behind: Sequence[int],
    ) -> None:
        trace, request = self.trace, self.trace.requests[at]
        counted = at >= int(self.warm * len(trace.requests))
        assert self.each is not None
        self.each(
            RequestHits(
                trace=trace.name,
                policy=name,
                capacity_blocks=capacity,
                request=at,
                time_s=request.time_s,
                blocks=len(request.key) // trace.page_size,
                tokens=request.num_tokens,
                hit_tokens=known * trace.block_tokens,
                counted=counted,
                host_hit_tokens={
                    size: blocks * trace.block_tokens
                    for size, blocks in zip(hosts, behind, strict=True)
                },
            )
        )


def replay_curves(
    trace: Trace,
    policies: str
    | MakePolicy
    | Iterable[str | MakePolicy]
    | Mapping[str, str | MakePolicy]
    | None = None,
    capacities: int | Iterable[int] | None = None,
    *,
    warm: float = 0.0,
    queue: int = 0,
    hints: Sequence[bool | None] | None = None,
    each: Callable[[RequestHits], None] | None = None,
    running: int = 1,
    hosts: str | Iterable[str | int] = (),
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
    sizes_of_hosts = host_sizes("hosts", hosts.split(",") if isinstance(hosts, str) else hosts)
    if hints is not None and len(hints) != len(trace.requests):
        raise ConfigError(f"{len(hints)} hints for {len(trace.requests)} requests")
    makers = _makers([*policy_names(), OPTIMUM] if policies is None else policies)
    if isinstance(capacities, int):
        capacities = (capacities,)
    sizes = capacities_for(footprint(trace)) if capacities is None else sorted({*capacities})
    for size in sizes:
        check_range("capacity", size, 1, 10**8)
    replays = Replays(trace, warm, queue, hints, each, running, sizes_of_hosts)
    for size in sizes:
        replays.host_blocks(size)  # raises before anything is replayed
    return [replays.run(name, make, size) for size in sizes for name, make in makers.items()]


def maker_of(name: str) -> MakePolicy | None:
    """None stands for the optimum. Raises ConfigError."""
    if name == OPTIMUM:
        return None
    policy_of(name)  # what is wrong with it is found out before anything is replayed
    return partial(policy_of, name)


def _makers(policies: Any) -> dict[str, MakePolicy | None]:
    if isinstance(policies, str) or callable(policies):
        policies = [policies]
    if not isinstance(policies, Mapping):
        named = [(one if isinstance(one, str) else _name_of(one), one) for one in policies]
        policies = dict(named)
        if len(policies) < len(named):
            names = ", ".join(name for name, _ in named)
            raise ConfigError(f"two policies of one name: {names}; give them names of your own")
    makers: dict[str, MakePolicy | None] = {}
    for name, given in policies.items():
        if isinstance(given, str):
            makers[name] = maker_of(given)
        else:
            _name_of(given)  # checks that it makes one
            makers[name] = given
    return makers


def _name_of(make: Any) -> str:
    """Raises ConfigError if the function makes no policy."""
    made = make() if callable(make) else make
    if not callable(make) or not isinstance(made, Policy):
        raise ConfigError(f"{make!r} is no function that makes an eviction policy")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the policy that {make!r} makes has no name")
    return name
