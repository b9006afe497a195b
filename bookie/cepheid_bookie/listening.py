"""Sockets that listen, for the ports of a bookie that are not gRPC's."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a non-blocking listening socket; `::` also accepts IPv4, as gRPC's does. Raises OSError.

    It may block while a name is resolved, which is fine at a start; the loop's own resolver would leave a thread behind.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=takes_both)
    listening.setblocking(False)
    return listening
