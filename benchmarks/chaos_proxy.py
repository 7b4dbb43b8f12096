"""A TCP proxy on loopback that can be cut, stalled and pointed elsewhere: the wire between two
control planes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on a port of its own and passes every connection on to `backend`.

    Methods may be called from any thread: what they do is done by the proxy's. `close` ends it.
    """

    def __init__(self) -> None:
        self.backend: tuple[str, int] | None = None
        self._refusing = False
        self._ends: set[asyncio.StreamWriter] = set()
        self._open = [asyncio.Event(), asyncio.Event()]  # to the backend, from the backend
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.resume()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def point_to(self, endpoint: str) -> None:
        """Where connections go that come from now on."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.backend = (host, int(port))

    def cut(self) -> None:
        """End every connection there is."""
        self._do(self._abort)

    def _abort(self) -> None:
        for end in self._ends:
            end.transport.abort()

    def refuse(self, refusing: bool) -> None:
        """Whether new connections are turned away at once."""
        self._refusing = refusing

    def stall(self, forth: bool = True, back: bool = True) -> None:
        """Keep back what comes from one side, the other, or both; connections stay."""
        for wanted, gate in zip((forth, back), self._open, strict=True):
            if wanted:
                self._do(gate.clear)

    def resume(self) -> None:
        for gate in self._open:
            self._do(gate.set)

    def heal(self) -> None:
        """Pass on everything again."""
        self.refuse(False)
        self.resume()

    def close(self) -> None:
        self.resume()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._do(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._abort()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*passing, return_exceptions=True)

    def _do(self, what: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(what)

    async def _accept(self, asked: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        ends = {near}
        try:
            if self.backend is not None and not self._refusing:
                answered, far = await asyncio.open_connection(*self.backend)
                ends.add(far)
                self._ends |= ends
                async with asyncio.TaskGroup() as group:
                    for source, target, gate in zip(
                        (asked, answered), (far, near), self._open, strict=True
                    ):
                        group.create_task(self._pump(source, target, gate))
        except* OSError:  # what ends one way ends the other
            pass
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    @staticmethod
    async def _pump(
        source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await gate.wait()
            target.write(data)
            await target.drain()
        raise ConnectionResetError
