"""A port that a test or a benchmark tells a server is taken by nothing else until it listens."""

import socket

import pytest
import zmq

from tests.support.ports import free_port


def test_a_port_stays_the_callers_and_a_server_listens_there() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for host in ("127.0.0.1", "", "127.0.0.1"):  # again where a server has been
        with (
            socket.create_server((host, port)) as server,
            socket.create_connection(("127.0.0.1", port)) as client,
            server.accept()[0] as accepted,
        ):
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"
    with zmq.Context() as context, context.socket(zmq.REP) as socket_:
        socket_.bind(f"tcp://127.0.0.1:{port}")
