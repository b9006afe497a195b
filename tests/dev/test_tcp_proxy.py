"""The proxy of the bad days: what each command does to bytes and connections."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.tcp_proxy import TcpProxy


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            while data := self.request.recv(65_536):
                self.request.sendall(data)
        except OSError:
            pass


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            with TcpProxy(f"127.0.0.1:{server.server_address[1]}") as made:
                yield made
        finally:
            server.shutdown()
            serving.join()


def connect(proxy: TcpProxy, timeout_s: float = 60.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout_s)


def receive(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (data := connection.recv(65_536)):
        got += data
    return got


def test_everything_passes(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        sent = b"x" * 3_000_000
        sending = threading.Thread(target=connection.sendall, args=(sent,))
        sending.start()
        assert receive(connection, len(sent)) == sent
        sending.join()
        assert proxy.open_connections == 1


def test_a_cut_breaks_what_is_open_and_lets_new_ones_through(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with connect(proxy) as connection:
        connection.sendall(b"b")
        assert receive(connection, 1) == b"b"


def test_refused_by_the_first_bytes_until_healed(proxy: TcpProxy) -> None:
    with connect(proxy) as wanted, connect(proxy) as unwanted:
        for connection in (wanted, unwanted):
            connection.sendall(b"good" if connection is wanted else b"bad!")
            receive(connection, 4)
        proxy.refuse_who_says(b"bad")
        with pytest.raises(ConnectionResetError):
            unwanted.recv(1)
        wanted.sendall(b"bad!")  # not its first bytes
        assert receive(wanted, 4) == b"bad!"
    with connect(proxy) as connection:
        connection.sendall(b"so bad")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    proxy.heal()
    with connect(proxy) as connection:
        connection.sendall(b"bad")
        assert receive(connection, 3) == b"bad"


def test_refused_until_healed(proxy: TcpProxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    port = proxy.port
    proxy.heal()
    assert proxy.port == port
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"


def test_what_stalled_is_delivered_in_order(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        proxy.stall()
        connection.sendall(b"one ")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(b"two")
        proxy.heal()
        connection.settimeout(60)
        assert receive(connection, 7) == b"one two"


def test_delay_goes_both_ways(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        proxy.delay(0.05)
        began = time.monotonic()
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        assert time.monotonic() - began >= 0.1


def test_answers_are_lost_and_their_connection_is_broken_when_healed(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        proxy.drop_answers()
        connection.sendall(b"a")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.heal()
        connection.settimeout(60)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_closed_side_closes_the_other(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
    deadline = time.monotonic() + 60
    while proxy.open_connections and time.monotonic() < deadline:
        time.sleep(0.005)
    assert proxy.open_connections == 0
