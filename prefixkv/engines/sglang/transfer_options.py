"""Settings of the transfer backend, as JSON in `PREFIXKV_TRANSFER`: SGLang's command line takes no
options of a plug-in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from prefixkv import ControlConfig, TransportConfig
from prefixkv.errors import ConfigError
from prefixkv.settings import check_fields, convert

VARIABLE: Final = "PREFIXKV_TRANSFER"

_JSON: Final = f"`{{}}` in {VARIABLE}"
OPTION_NAMES: Final = {
    "page_size": "--page-size",
    "tp_size": "--tp-size",
    "model": f"--served-model-name, --kv-cache-dtype, or {_JSON.format('model')}",
    "dtype": "--kv-cache-dtype, or --dtype",
    "attention": "--attention-backend, or --model-path",
    "opaque": "--kv-cache-dtype, --attention-backend, or --model-path",
    "num_layers": "--model-path",
    "num_kv_heads": "--model-path",
    "head_dim": "--model-path",
    "transport backend": _JSON.format("transport.backend"),
    "staging": _JSON.format("transport.staging_bytes"),
    "lease_bytes": _JSON.format("transport.lease_bytes"),
    "slot_bytes": _JSON.format("transport.lease_bytes"),
    "decode workers": _JSON.format("control.max_peers"),
}
"""Options of SGLang by field of a handshake: `ModelConfig.option_names`."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Settings of the transfer backend: a JSON object in `PREFIXKV_TRANSFER`."""

    name: str = ""
    """Name of this server, unique, the same after a restart. Empty: its address and port."""
    bind: str = ""
    """Where each rank of a prefill server listens, with a port of `*`. Empty: the loopback
    interface, or the machine's address where keys are set or `control.network_is_isolated`."""
    model: str = ""
    """What both servers have to agree on. Empty: the last part of the served model's name."""
    fence_folder: str = ""
    """Folder where an operator declares peers dead. Empty: nowhere."""
    control: ControlConfig = field(default_factory=ControlConfig)
    """Times and bounds of the control plane."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """How KV travels."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, text: str) -> TransferOptions:
        """Raises ConfigError, which names the setting, for one that is unknown or out of range.

        >>> TransferOptions.of('{"transport": {"interface": "eth0"}}').transport.interface
        'eth0'
        """
        try:
            given = json.loads(text or "{}")
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} is no JSON: {error}") from None
        return convert(cls, given, VARIABLE)

    def address(self, local_ip: str) -> str:
        """Return the address at which a rank binds its transfers. `local_ip` is the machine's.

        >>> TransferOptions().address("10.0.0.5")
        'tcp://127.0.0.1:*'
        """
        if self.bind:
            return self.bind
        # Without keys any process that reaches the port counts as a peer: other hosts only on
        # request.
        remote = self.control.curve is not None or self.control.network_is_isolated
        return reached_at("tcp://0.0.0.0:*", local_ip if remote else "127.0.0.1")


def reached_at(endpoint: str, local_ip: str) -> str:
    """Return the address that leads to an endpoint: the machine's, where that is on all of them.

    >>> reached_at("tcp://0.0.0.0:5000", "10.0.0.5"), reached_at("tcp://[::]:5000", "fd00::5")
    ('tcp://10.0.0.5:5000', 'tcp://[fd00::5]:5000')
    """
    host, _, port = endpoint.rpartition(":")
    if host in ("tcp://0.0.0.0", "tcp://[::]"):
        host = f"tcp://[{local_ip}]" if ":" in local_ip else f"tcp://{local_ip}"
    return f"{host}:{port}"
