"""Settings of `prefixkv proxy`: see `prefixkv/settings.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from prefixkv.errors import ConfigError
from prefixkv.serving.config import ListenSettings, check_key, is_server
from prefixkv.settings import Seconds, check_fields, doc


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """`prefixkv proxy`, but for its servers."""

    servers_key: Annotated[
        str, doc("Bearer token that the servers need; better set by PREFIXKV_SERVERS_KEY.")
    ] = ""
    answer_timeout_s: Annotated[
        Seconds, doc("A server is lost after this silence, in seconds.")
    ] = 600.0
    listen: ListenSettings = field(
        default_factory=lambda: ListenSettings(port=8000, status_port=8001),
        metadata={"flat": True},
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_key("servers_key", self.servers_key)


class ServerAt(NamedTuple):
    """A server of an engine that a proxy asks at `url`, which is its name here. `at` names it for
    the other server: the address at which a prefill server's connector listens, or the name of a
    decode server's connector."""

    url: str
    at: str

    @classmethod
    def of(cls, text: str, where: str = "") -> ServerAt:
        """Parse "URL=AT". Raises ConfigError, which begins with `where`."""
        url, _, at = text.partition("=")
        if not is_server(url) or not at:
            raise ConfigError(
                f"{where}{text!r} is no server: http://HOST:PORT=ADDRESS for prefill, "
                "http://HOST:PORT=NAME for decode"
            )
        return cls(url.rstrip("/"), at)
