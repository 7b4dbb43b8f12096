"""Settings of the connector, as `kv_connector_extra_config` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prefixkv import ControlConfig, HostConfig, TransportConfig
from prefixkv.errors import ConfigError
from prefixkv.settings import CountOrZero, Seconds, SecondsOrZero, check_fields, convert, parse_size
from prefixkv.spi import DEFAULT_POLICY, explain_policy

ANY_HOST: Final = ("", "tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://::")
"""Forms of `bind` for every address of the host."""

_MODEL: Final = "--model, or `model` in kv_connector_extra_config"
_EXTRA: Final = "`{}` in kv_connector_extra_config"
OPTION_NAMES: Final = {
    "page_size": "--block-size",
    "tp_size": "--tensor-parallel-size",
    "model": _MODEL,
    "weights_version": _EXTRA.format("weights_version"),
    "kv_scales": "--kv-cache-dtype",
    "dtype": "--kv-cache-dtype, or --dtype",
    "attention": "--attention-backend, or --model",
    "num_layers": "--model, or --disable-hybrid-kv-cache-manager",
    "groups": "--model, or --disable-hybrid-kv-cache-manager",
    "num_kv_heads": "--model",
    "head_dim": "--model",
    # The words of `compat.block_format`; a new word there needs a line here.
    "opaque": "--attention-backend, and what else a block's bytes depend on",
    "opaque.vllm": "the version of vLLM",
    "opaque.kernels": "--attention-backend",
    "opaque.layout": "VLLM_KV_CACHE_LAYOUT",
    "opaque.kv_cache_dtype": "--kv-cache-dtype",
    "opaque.quantization": "--kv-cache-dtype",
    "opaque.head_size": "--model",
    "opaque.dtype": "--dtype",
    "opaque.state_dtypes": "--mamba-cache-dtype, or --mamba-ssm-cache-dtype",
    "opaque.state_layout": "VLLM_SSM_CONV_STATE_LAYOUT",
    "opaque.instructions": "--block-size, --dtype, or another CPU",
    "transport backend": _EXTRA.format("transport.backend"),
    "staging": _EXTRA.format("transport.staging_bytes"),
    "lease_bytes": _EXTRA.format("transport.lease_bytes"),
    "slot_bytes": _EXTRA.format("transport.lease_bytes"),
    "decode workers": _EXTRA.format("control.max_peers"),
}
"""Options of vLLM by field of a handshake: `ModelConfig.option_names`."""


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What vLLM's own settings say of a server."""

    is_producer: bool
    is_consumer: bool
    num_ranks: int = 1  # workers, each of which has a share of every block
    max_len: int = 0  # tokens of a request; 0: not known
    step_tokens: int = 2048  # the most that a step computes
    publishes: bool = False  # cache events


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Settings of the connector; each is a key of `kv_connector_extra_config`."""

    name: str
    """This server's unique name, the same after a restart: prefill requests name the decode server
    by it."""
    bind: str = ""
    """Address at which a prefill server listens. Empty: the loopback interface, port `kv_port` of
    vLLM's configuration. Another address needs keys (`control.curve`) or
    `control.network_is_isolated`."""
    advertise: str = ""
    """Address at which decode servers reach a prefill server that draws rooms itself. Empty:
    `bind`, with this host's address where `bind` names none."""
    model: str = ""
    """What both servers have to agree on; give it where the paths differ. Empty: vLLM's `--model`.
    """
    weights_version: str = "0"
    """Which weights the server begins with: KV of another version is refused."""
    join_flights: bool = True
    """A request waits for another request's load of the same blocks."""
    recompute_below: CountOrZero = 0
    """Decode computes what it lacks itself where that is at most this many tokens, whatever it
    costs. Excludes `compute_below`."""
    offer_timeout_s: Seconds = 120.0
    """How long the blocks of a prompt are kept for a decode server to open its room, where prefill
    has drawn it."""
    offer_grace_s: SecondsOrZero = 10.0
    """How long of that they are kept from other requests, while no promised prompt and no load
    waits here."""
    policy: str = ""
    """Rule by which cached blocks are evicted (docs/policies.md). Empty: vLLM's own."""
    control: ControlConfig = field(default_factory=ControlConfig)
    """Times and bounds of the control plane."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """How KV travels: `{"interface": "eth0"}` for servers on two machines."""
    compute_below: CountOrZero = 0
    """Decode computes what it lacks itself where that is at most this many tokens and measured to
    be the better way; 0: never. 16384 is a `DecodeNode`'s default."""
    host_memory: str = ""
    """Memory of each worker's host for blocks that vLLM evicts: "8GiB", or "4x" (times vLLM's
    blocks). For servers that decode. Empty: none."""
    host_policy: str = ""
    """Rule by which host memory evicts. Empty: as `policy`, or `adaptive` where that is vLLM's own.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        # "": the engine keeps its own rule.
        if self.policy and (why := explain_policy(self.policy)):
            raise ConfigError(f"policy: {why}")
        if self.compute_below and self.recompute_below:
            raise ConfigError(
                f"compute_below: is {self.compute_below}, and recompute_below "
                f"{self.recompute_below}: leave out recompute_below, which computes on decode "
                "whatever that costs"
            )
        if self.host_policy and (why := explain_policy(self.host_policy)):
            raise ConfigError(f"host_policy: {why}")
        if self.host_policy and not self.host_memory:
            raise ConfigError(f"host_policy: is {self.host_policy!r}, and there is no host_memory")
        if self.host is not None and not self.join_flights:
            raise ConfigError(
                "join_flights: must be true with host_memory: no block is loaded from there twice "
                "at once"
            )

    @property
    def host(self) -> HostConfig | None:
        """None where there is none. Raises ConfigError for what is no size."""
        if not self.host_memory:
            return None
        number, unit = parse_size(self.host_memory) or (0.0, "")
        if not unit:
            raise ConfigError(
                f"host_memory: {self.host_memory!r} is no size: 8GiB, or 4x (times vLLM's blocks)"
            )
        # 0 stands for "not given" there.
        if not (number if unit == "x" else int(number)):
            raise ConfigError(f"host_memory: {self.host_memory!r} is none; leave it out")
        policy = self.host_policy or self.policy or DEFAULT_POLICY
        if unit == "x":
            return HostConfig(times=number, policy=policy)
        return HostConfig(num_bytes=int(number), policy=policy)

    @property
    def reached_at(self) -> str:
        """Address for decode servers; "" where no option has it."""
        if self.advertise:
            return self.advertise
        has_port = self.bind.rpartition(":")[2] not in ("", "*", "0")
        return self.bind if has_port and self.bind.rpartition(":")[0] not in ANY_HOST else ""

    @property
    def is_on_every_address(self) -> bool:
        """True if `bind` has a port and no address, and `advertise` has none either."""
        host, _, port = self.bind.rpartition(":")
        return not self.advertise and host in ANY_HOST and port not in ("", "*", "0")

    @classmethod
    def of(cls, extra: Mapping[str, Any], kv_port: int) -> ConnectorOptions:
        """Raises ConfigError for a setting that is unknown or out of range, or without a name."""
        given = dict(extra)
        if not given.get("name"):
            raise ConfigError(
                'kv_connector_extra_config has no "name": give each server one of its own, which '
                "it keeps when it is restarted"
            )
        if not given.get("bind"):
            given["bind"] = f"tcp://127.0.0.1:{kv_port}"
        return convert(cls, given, "kv_connector_extra_config")
