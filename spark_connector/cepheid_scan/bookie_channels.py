"""A process's gRPC channels to bookies, and the ports on which they serve scans without gRPC.

Rule: one channel per bookie, certificate and process. Spark forks its workers before anything here is imported; a later fork gets
its own. Replaced certificate files are used by the next read.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any

from cepheid_rpc import READ, SCAN_PORT, TLS_MARK, channel_options, decode_scan_port, method_path
from cepheid_security import ClientTls
from cepheid_security.grpc_tls import channel_credentials
from cepheid_security.tls import FileState

CONNECT_TIMEOUT_S = 2.0
"""Time limit of handshakes, longer than a broker's: distant or busy bookies may need it."""
_BY_GRPC_S = 60.0  # an unreachable scan port is not tried again for this time

_Secured = tuple[ClientTls, FileState]

_channels: dict[tuple[str, _Secured | None], Any] = {}
_contexts: dict[_Secured, ssl.SSLContext] = {}
_doors: dict[str, tuple[ScanDoor | None, float]] = {}  # by address; None until then: there is none
_lock = threading.Lock()
_channels_pid = 0


@dataclass(frozen=True, slots=True)
class ScanDoor:
    host: str
    port: int
    token: bytes
    secured: bool = False


def open_channel(address: str, options: list[tuple[str, Any]], tls: ClientTls | None) -> Any:
    """Return a new channel to a bookie; `tls`: the certificate for addresses with TLS, None: from the environment.

    Raises SecurityConfigurationError.
    """
    import grpc

    if not address.startswith(TLS_MARK):
        return grpc.insecure_channel(address, options=options)
    credentials = channel_credentials(tls or ClientTls.from_environment())
    return grpc.secure_channel(address.removeprefix(TLS_MARK), credentials, options=options)


def tls_context(tls: ClientTls | None) -> ssl.SSLContext:
    """Return the context for scan ports. Raises SecurityConfigurationError."""
    tls = tls or ClientTls.from_environment()
    key = tls, tls.state()
    with _lock:
        if (context := _contexts.get(key)) is None:
            context = _contexts[key] = tls.context()
    return context


def read_method(address: str, tls: ClientTls | None = None) -> Any:
    """Return a bookie's read method: called with a request it returns a call, whose messages are read answers."""
    methods: Any = _channel(address, tls)  # the stubs require serializers, which bytes do not need
    return methods.unary_stream(method_path(READ))


def scan_port_call(address: str, tls: ClientTls | None = None) -> Any:
    """Return a call whose `result` is the answer for `learn_door`."""
    methods: Any = _channel(address, tls)
    return methods.unary_unary(method_path(SCAN_PORT)).future(b"")


def known_door(address: str) -> tuple[bool, ScanDoor | None]:
    """Return whether the bookie was asked for its scan port, and the answer."""
    with _lock:
        door, until = _doors.get(address, (None, 0.0))
    return door is not None or time.monotonic() < until, door


def learn_door(address: str, answer: bytes | None) -> ScanDoor | None:
    """Store the answer. None: this bookie has no scan port, or it cannot be reached. Raises MalformedGroupError."""
    door = None
    if answer is not None:
        port, token = decode_scan_port(answer)
        host = address.removeprefix(TLS_MARK).rpartition(":")[0].strip("[]")
        door = ScanDoor(host, port, token, address.startswith(TLS_MARK))
    with _lock:
        _doors[address] = door, time.monotonic() + _BY_GRPC_S
    return door


def _channel(address: str, tls: ClientTls | None) -> Any:
    global _channels_pid
    secured = None
    if address.startswith(TLS_MARK):
        tls = tls or ClientTls.from_environment()
        secured = tls, tls.state()
    with _lock:
        if _channels_pid != os.getpid():
            _channels.clear()  # they belong to the parent process: they must not be touched, not even closed
            _channels_pid = os.getpid()
        if (channel := _channels.get((address, secured))) is None:
            # The minimum interval between two attempts is also the time limit of connecting.
            options = {**dict(channel_options()), "grpc.min_reconnect_backoff_ms": int(1000 * CONNECT_TIMEOUT_S)}
            channel = _channels[address, secured] = open_channel(address, list(options.items()), tls)
    return channel


def close_channels() -> None:
    """Close the connections of this process, for callers that must leave no socket open (tests, the end of a command)."""
    with _lock:
        for channel in _channels.values():
            channel.close()
        _channels.clear()
        _doors.clear()
