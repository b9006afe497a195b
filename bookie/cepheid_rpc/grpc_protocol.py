"""What both ends of the gRPC transport must agree on: names, sizes, channel options. Does not import gRPC.

    Add       stream of add messages ──► stream of add answers     one per ledger client, pulls its next message
    ReadLac   LAC request ──► LAC answer
    Read      read request ──► stream of read answers              one per read; flow control is that of HTTP/2
    WriteLac  explicit LAC ──► status
    Recover   stream of fencing LAC and read requests ──► stream of answers in any order: see `encode_numbered`
    ScanPort  nothing ──► port for scans without gRPC (scan_protocol)

Messages are the bytes of `codec`; no serializer runs. A request that cannot be understood ends the call with INVALID_ARGUMENT and
the reason; everything a bookie decides is a `Status` inside an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVICE = "cepheid.bookie.v1.Bookie"
ADD, READ_LAC, READ, WRITE_LAC, SCAN_PORT, RECOVER = "Add", "ReadLac", "Read", "WriteLac", "ScanPort", "Recover"

MAX_GRPC_MESSAGE_BYTES = 16 << 20
"""Hard limit of one message. The soft limit (MAX_MESSAGE_BYTES, 1 MiB) plus the largest entry (5 MiB) is far below it."""

KEEPALIVE_TIME_MS = 10_000
"""Interval of keepalives. A peer that vanished is detected after about twice this time, also on an idle connection."""

MAX_STREAMS = 10_000
"""Maximum concurrent RPCs of one connection. A ledger client has one for adds, one per read, and one per wait for a LAC.

Further ones wait at the client until one has ended.
"""

MAX_METADATA_BYTES = 8 << 10
"""Maximum size of a call's headers. Our clients send a few hundred bytes."""

TLS_PROTOCOL = "grpc+tls"
"""The name of the encrypted gRPC port among the addresses of a bookie's registration; `grpc` is the one without TLS."""

TLS_MARK = "tls://"
"""Prefix of the address of an encrypted port, wherever a single address of a bookie is passed on: `tls://host:port`."""


def bookie_address(addresses: Mapping[str, str], *, prefer_tls: bool = True) -> str | None:
    """Return the address of a bookie, with TLS_MARK if it uses TLS; None: it serves only its own process."""
    secured, plain = addresses.get(TLS_PROTOCOL), addresses.get("grpc")
    if secured is not None and (prefer_tls or plain is None):
        return TLS_MARK + secured
    return plain


def method_path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def channel_options() -> list[tuple[str, Any]]:
    """Return the options of a client's channel (names: grpc_types.h)."""
    return [
        ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A bookie that restarts is back within a second or two; the default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels of one process to one address would share a TCP connection, and reads of old data would delay adds.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_connections: int, handshake_timeout_s: float) -> list[tuple[str, Any]]:
    """Return the options of a bookie's server. Both limits apply to each of its ports.

    gRPC does not count connections by address, and has no hook to do so.
    """
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", round(handshake_timeout_s * 1000)),  # TLS, and the first frame of HTTP/2
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIME_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),  # otherwise clients' keepalives count as abuse
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent share of another bookie's traffic
    ]
