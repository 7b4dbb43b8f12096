"""The HTTP client of other processes: which connections its requests use, and what one costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import httpcore
import httpx
import pytest

from prefixkv.serving import client as under_test
from prefixkv.serving.client import make_client
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.scenes import in_loop

ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"


class Site:
    """A server of one host. It counts its connections, and holds what is asked of `/held` back."""

    def __init__(self) -> None:
        self.num_made = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.num_held = 0
        self.used: list[asyncio.StreamWriter] = []  # by what was answered at once
        self.go_on = asyncio.Event()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", backlog=1024)
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    def close(self) -> None:
        self._server.close()
        for writer in list(self.open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_made += 1
        self.open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/cut" in head:
                    writer.write(STREAM)
                    break
                if b"/held" in head:
                    writer.write(STREAM)
                    self.num_held += 1
                    await self.go_on.wait()
                    writer.write(b"0\r\n\r\n")
                else:
                    self.used.append(writer)
                    writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


@asynccontextmanager
async def sites(num: int = 1) -> AsyncGenerator[list[tuple[Site, str]], None]:
    made = [Site() for _ in range(num)]
    try:
        yield [(site, await site.start()) for site in made]
    finally:
        for site in made:
            site.close()


async def until(done: Callable[[], object]) -> None:
    while not done():
        await asyncio.sleep(0.002)


def run(use: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(use(), PATIENCE_S)

    asyncio.run(main())


async def all_at_once(client: httpx.AsyncClient, site: Site, url: str, num: int) -> None:
    """So many requests, none of which ends before the last has begun."""
    site.go_on.clear()
    site.num_held = 0
    asked = [asyncio.create_task(client.get(f"{url}/held")) for _ in range(num)]
    await until(lambda: site.num_held == num)
    site.go_on.set()
    assert [answer.content for answer in await asyncio.gather(*asked)] == [b"one"] * num


@in_loop
async def test_a_request_never_waits_for_another() -> None:
    async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
        await all_at_once(client, site, url, 150)
        # The answer that is left stands open, and its connection is not used meanwhile.
        site.go_on.clear()
        async with client.stream("GET", f"{url}/held"):
            made = site.num_made
            assert (await client.get(url)).content == b"ok"
            assert (await client.get(url)).content == b"ok"
            assert site.num_made == made


@in_loop
async def test_at_most_so_many_are_kept_and_the_newest_of_them() -> None:
    async with sites(2) as ((old, at), (new, other)), make_client({}, NEVER_S) as client:
        most = under_test._MAX_IDLE
        await all_at_once(client, old, at, most + 20)
        await until(lambda: len(old.open) == most)
        # Those of a server that is asked no more make room for those of one that is.
        await all_at_once(client, new, other, 30)
        await until(lambda: (len(old.open), len(new.open)) == (most - 30, 30))
        assert new.num_made == 30
        await all_at_once(client, new, other, 30)
        assert new.num_made == 30


@in_loop
async def test_the_newest_is_used_so_that_the_others_grow_old() -> None:
    async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
        await all_at_once(client, site, url, 5)
        for _ in range(5):
            await client.get(url)
        assert len(set(site.used)) == 1


@in_loop
async def test_those_that_were_idle_for_long_are_closed_by_the_next_request() -> None:
    async with sites(2) as ((old, at), (_, other)), make_client({}, NEVER_S, 0.05) as client:
        await all_at_once(client, old, at, 10)
        assert old.open
        await asyncio.sleep(0.06)
        await client.get(other)
        await until(lambda: not old.open)


@pytest.mark.parametrize("end", ["server", "client"])
@in_loop
async def test_a_connection_that_did_not_end_well_is_not_used_again(end: str) -> None:
    async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
        if end == "server":
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"{url}/cut")
        else:
            async with client.stream("GET", f"{url}/held") as answer:
                assert await anext(answer.aiter_raw()) == b"one"
        site.go_on.set()
        await until(lambda: not site.open)
        assert (await client.get(url)).content == b"ok"
        assert site.num_made == 2


@in_loop
async def test_a_request_that_is_cancelled_or_cannot_connect_leaves_nothing() -> None:
    async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
        asked = asyncio.create_task(client.get(f"{url}/held"))
        await until(lambda: site.num_held)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        site.go_on.set()
        await until(lambda: not site.open)
        site.close()
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
        transport = client._transport
        assert isinstance(transport, under_test._Connections)
        assert not transport._idle
        assert not transport._by_origin
        assert not transport._busy


@in_loop
async def test_a_closed_client_has_closed_what_was_idle_and_ended_what_was_not() -> None:
    async with sites() as ((site, url),):
        async with make_client({}, NEVER_S) as client:
            await all_at_once(client, site, url, 5)
            site.go_on.clear()
            site.num_held = 0
            asked = asyncio.create_task(client.get(f"{url}/held"))
            await until(lambda: site.num_held)
        with pytest.raises(httpx.HTTPError):
            await asked
        site.go_on.set()
        await until(lambda: not site.open)


@in_loop
async def test_what_is_given_back_to_a_closed_client_is_closed() -> None:
    async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
        transport = client._transport
        answer = await transport.handle_async_request(client.build_request("GET", url))
        # Its body has come, and nobody has read it.
        await transport.aclose()
        await answer.aclose()
        await until(lambda: not site.open)
        assert isinstance(transport, under_test._Connections)
        assert not transport._idle
        assert not transport._busy


def test_what_a_request_costs_does_not_grow_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """httpx's pool asks the kernel about each idle connection for each request."""
    looks: list[object] = []
    has_expired = httpcore.AsyncHTTPConnection.has_expired
    monkeypatch.setattr(
        httpcore.AsyncHTTPConnection, "has_expired",
        lambda one: looks.append(one) or has_expired(one),
    )  # fmt: skip

    async def use() -> None:
        async with sites() as ((site, url),), make_client({}, NEVER_S) as client:
            for _ in range(3):
                await all_at_once(client, site, url, 100)
        assert len(looks) <= 3 * 300  # at its begin, at its end, and once where it connects

    run(use)
    assert looks
