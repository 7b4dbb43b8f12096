"""A TCP proxy on loopback that can be cut, stalled and pointed elsewhere: the wire between two
control planes."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK_BYTES = 1 << 16


class _Pair:
    """Both ends of a connection, and the pumps that still work on it; the last one closes them."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = (near, far)
        self.num_pumps = 2

    def shut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on a port of its own and passes every connection on to `backend`.

    Methods may be called from any thread. `close` ends every thread.
    """

    def __init__(self) -> None:
        self.backend: tuple[str, int] | None = None
        self.num_cut = 0
        self._refusing = False
        self._closed = False
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._open = [threading.Event(), threading.Event()]  # to the backend, from the backend
        self.resume()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def point_to(self, endpoint: str) -> None:
        """Where connections go that come from now on."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.backend = (host, int(port))

    def cut(self) -> None:
        """End every connection there is."""
        with self._lock:
            self.num_cut += len(self._pairs)
            for pair in self._pairs:
                pair.shut()

    def refuse(self, refusing: bool) -> None:
        """Whether new connections are turned away at once."""
        self._refusing = refusing

    def stall(self, forth: bool = True, back: bool = True) -> None:
        """Keep back what comes from one side, the other, or both; connections stay."""
        for wanted, gate in zip((forth, back), self._open, strict=True):
            if wanted:
                gate.clear()

    def resume(self) -> None:
        for gate in self._open:
            gate.set()

    def heal(self) -> None:
        """Pass on everything again."""
        self.refuse(False)
        self.resume()

    def close(self) -> None:
        self._closed = True
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            far = self._connect()
            if far is None:
                near.close()
                continue
            pair = _Pair(near, far)
            pumps = [
                threading.Thread(target=self._pump, args=(pair, 0), daemon=True),
                threading.Thread(target=self._pump, args=(pair, 1), daemon=True),
            ]
            with self._lock:
                self._pairs.add(pair)
            self._threads = [thread for thread in self._threads if thread.is_alive()] + pumps
            for pump in pumps:
                pump.start()

    def _connect(self) -> socket.socket | None:
        if self.backend is None or self._refusing or self._closed:
            return None
        try:
            return socket.create_connection(self.backend)
        except OSError:
            return None

    def _pump(self, pair: _Pair, direction: int) -> None:
        source, target = pair.ends if direction == 0 else pair.ends[::-1]
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._open[direction].wait()
                target.sendall(data)
        pair.shut()
        with self._lock:
            pair.num_pumps -= 1
            if not pair.num_pumps:
                self._pairs.discard(pair)
                for end in pair.ends:
                    end.close()
