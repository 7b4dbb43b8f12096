"""The settings of the transfer backend, from `PREFIXKV_TRANSFER`: SGLang's command line takes no
options of a plug-in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from prefixkv import ControlConfig, TransportConfig
from prefixkv.engines.options import made
from prefixkv.spi import ConfigError, check_kind, check_types

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
    "bytes held for it": _JSON.format("control.max_peer_bytes"),
}
"""Map from a field of a handshake to the option of SGLang that sets it. `ModelConfig.option_names`
has it, so that a refusal names what an operator can change."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Settings of the transfer backend, as JSON in an environment variable.

    `name` is the server's unique name, the same after a restart; "": its address and port. `bind`
    is the address at which each rank of a prefill server listens, with a port of `*`; "": the
    loopback interface, or the machine's address where keys are set or `allow_remote_without_keys`.
    Both servers have to agree on `model`; "": the last part of the model's served name.
    `fence_folder` is the folder in which an operator names dead peers (`fences.py`); "": none.
    `control` and `transport` are the fields of `ControlConfig` and `TransportConfig`.
    """

    name: str = ""
    bind: str = ""
    model: str = ""
    fence_folder: str = ""
    control: ControlConfig = field(default_factory=ControlConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)

    def __post_init__(self) -> None:
        check_types(self)
        check_kind("control", self.control, ControlConfig)
        check_kind("transport", self.transport, TransportConfig)

    @classmethod
    def of(cls, text: str) -> TransferOptions:
        """Return the options in a JSON text.

        Raises ConfigError, which names the option, for one that is unknown or out of range.

        >>> TransferOptions.of('{"transport": {"interface": "eth0"}}').transport.interface
        'eth0'
        """
        try:
            said = json.loads(text or "{}")
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} is no JSON: {error}") from None
        return made(cls, VARIABLE, said)

    def address(self, local_ip: str) -> str:
        """Return the address at which a rank binds, on a machine with the address `local_ip`.

        >>> TransferOptions().address("10.0.0.5")
        'tcp://127.0.0.1:*'
        """
        if self.bind:
            return self.bind
        # Without keys any process that reaches the port counts as a peer: other hosts only on
        # request.
        remote = self.control.curve is not None or self.control.allow_remote_without_keys
        host = local_ip if remote else "127.0.0.1"
        return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
