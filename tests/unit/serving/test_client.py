"""The HTTP client of other processes: no request waits for another, and what ends its answer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final
from unittest.mock import patch

import aiohttp
import pytest

from prefixkv.serving.client import make_client, pieces_of
from tests.support.patience import NEVER_S
from tests.support.scenes import in_loop

ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"


class Site:
    """A server of one host. It counts its connections, and holds what is asked of `/held` back."""

    def __init__(self) -> None:
        self.num_made = self.num_held = 0
        self.heads: list[bytes] = []
        self.go_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_made += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                if b"/lost" in head:
                    break
                is_stream = any(path in head for path in (b"/cut", b"/held", b"/broken"))
                writer.write(STREAM if is_stream else ANSWER)
                if b"/cut" in head:
                    break
                if b"/broken" in head:
                    await self.go_on.wait()
                    writer.write(b"no chunk\r\n")
                    await reader.read()
                if b"/held" in head:
                    self.num_held += 1
                    await self.go_on.wait()
                    writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def read(client: aiohttp.ClientSession, url: str) -> bytes:
    async with client.get(url) as answer:
        return await answer.read()


@asynccontextmanager
async def asking(
    silence_s: float = NEVER_S, key: str = ""
) -> AsyncGenerator[tuple[Site, str, aiohttp.ClientSession], None]:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", backlog=1024)
    host, port = server.sockets[0].getsockname()
    async with make_client(key, silence_s) as client:
        yield site, f"http://{host}:{port}", client
    server.close()


@in_loop
async def test_a_request_never_waits_for_another() -> None:
    async with asking(key="k") as (site, url, client):
        asked = [asyncio.create_task(read(client, f"{url}/held")) for _ in range(150)]
        while site.num_held < 150:
            await asyncio.sleep(0.002)
        site.go_on.set()
        assert await asyncio.gather(*asked) == [b"one"] * 150
        # An answer that is left stands open, and its connection is not used meanwhile.
        site.go_on.clear()
        async with client.get(f"{url}/held"):
            made = site.num_made
            for _ in range(2):
                assert await read(client, url) == b"ok"
            assert site.num_made == made, "one that was kept"
        assert all(b"Bearer k" in head for head in site.heads)


@in_loop
async def test_each_end_of_an_answer_but_its_own_is_an_error_of_the_client() -> None:
    async with asking(silence_s=0.05) as (site, url, client):
        for path in ("cut", "lost", "held"):  # "held" is silent
            with pytest.raises(aiohttp.ClientError):
                await read(client, f"{url}/{path}")
        made = site.num_made
        assert await read(client, url) == b"ok"
        assert site.num_made == made + 1, "no connection is used that has broken"
    async with make_client("", NEVER_S) as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("http://127.0.0.1:1")


@pytest.mark.parametrize("status", [301, 307])
@in_loop
async def test_a_redirect_is_a_failure(status: int) -> None:
    """Prompts go to the servers that are named in the settings, and nowhere else."""
    async with asking() as (site, url, client):
        head = f"HTTP/1.1 {status} x\r\nlocation: {url}/else\r\ncontent-length: 0\r\n\r\n"
        with (
            patch(f"{__name__}.ANSWER", head.encode()),
            pytest.raises(aiohttp.ClientError, match="/else"),
        ):
            await client.post(url, data=b"prompt")
        assert len(site.heads) == 1


@in_loop
async def test_a_stream_that_is_broken_and_goes_on_ends_by_its_silence() -> None:
    got: list[bytes] = []

    async def hear(client: aiohttp.ClientSession, url: str) -> None:
        async with client.get(url) as answer:
            async for piece in pieces_of(client, answer):
                got.append(piece)
                site.go_on.set()

    async with asking(silence_s=0.2) as (site, url, client):
        with pytest.raises(aiohttp.SocketTimeoutError):
            await hear(client, f"{url}/broken")
        assert got == [b"one"]
