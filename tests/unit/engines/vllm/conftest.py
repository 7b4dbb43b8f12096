"""Pairs of stand-in engines over real NIXL, that have given every block back when the test ends."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.patience import until
from tests.unit.engines.vllm.standin import Engine, Request


class Servers:
    """A prefill and a decode server, and what a proxy does with them."""

    def __init__(self, decode: dict[str, Any], prefill: dict[str, Any]) -> None:
        self.prefill = Engine("prefill-0", producer=True, **prefill)
        self.decode = Engine("decode-0", consumer=True, **decode)
        self._rooms = itertools.count(1)

    @property
    def address(self) -> str:
        return self.prefill.worker.prefill.endpoint

    def requests(self, rid: str, tokens: list[int], **more: Any) -> tuple[Request, Request]:
        """For decode and for prefill, under a new room."""
        room = next(self._rooms)
        load = {"do_remote_prefill": True, "room": room, "prefill": self.address}
        send = {"do_remote_decode": True, "room": room, "decode": self.decode.options.name}
        return Request(rid, tokens, load, **more), Request(rid, tokens, send, **more)

    def ask(self, rid: str, tokens: list[int], **more: Any) -> Request:
        """Both are asked at once. Returns decode's."""
        load, send = self.requests(rid, tokens, **more)
        self.decode.add(load)
        self.prefill.add(send)
        return load

    def step(self) -> None:
        self.prefill.step()
        self.decode.step()

    def until(self, done: Callable[[], object]) -> None:
        until(done, step=self.step)

    def until_ended(self, *rids: str) -> None:
        self.until(lambda: all(rid in self.decode.outputs for rid in rids))

    def settle(self) -> None:
        """Nothing is under way any more, and no block is kept."""
        engines = self.decode, self.prefill
        self.until(lambda: all(engine.idle for engine in engines))
        for engine in engines:
            kept = "host_blocks"  # for requests to come
            assert not {name for name, n in engine.scheduler.gauges().items() if n} - {kept}
            assert engine.num_used == 0
            assert len(engine.scheduler.flights) == 0
            assert not engine.scheduler._answers
            assert not engine.scheduler.compute.rids

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


MakeServers = Callable[..., Servers]


@pytest.fixture
def make_servers() -> Iterator[MakeServers]:
    """make_servers(decode={...}, prefill={...}): options of `Engine`."""
    made: list[Servers] = []

    def make(
        decode: dict[str, Any] | None = None, prefill: dict[str, Any] | None = None
    ) -> Servers:
        made.append(Servers(decode or {}, prefill or {}))
        return made[-1]

    yield make
    for servers in made:
        servers.close()


@pytest.fixture
def servers(make_servers: MakeServers) -> Servers:
    return make_servers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """A test of `servers` that has ended well leaves nothing."""
    yield
    if "servers" in item.funcargs:
        item.funcargs["servers"].settle()
