"""Describe why a TLS handshake failed, for logs and the audit log."""

from __future__ import annotations

import ssl

_NOT_TLS = frozenset(
    ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL_VERSION", "RECORD_LAYER_FAILURE",
     "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL", "RECORD_TOO_SMALL", "BAD_RECORD_TYPE", "UNEXPECTED_MESSAGE")
)  # fmt: skip
"""OpenSSL's reasons for a first message that is not TLS. Its releases differ in which one they give."""

TLS_HELLO = b"\x16\x03"
"""The first bytes of a client that speaks TLS."""


def failure_of(error: OSError, timeout_s: float, plain_hint: str) -> str:
    """Return why a handshake failed. `plain_hint` says where clients without TLS should connect."""
    if isinstance(error, TimeoutError) or "taking longer" in str(error):
        return f"no TLS handshake within {timeout_s:g} s"
    if isinstance(error, ssl.SSLError):
        if (error.reason or "") in _NOT_TLS:
            return f"it does not speak TLS, and this port has nothing else; {plain_hint}"
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error) or "the client closed the connection in the handshake"


def is_refusal(error: OSError) -> bool:
    """Return whether the handshake was refused. False: the client disconnected, as TCP checks of load balancers do."""
    if isinstance(error, ssl.SSLEOFError):
        return False
    return isinstance(error, ssl.SSLError | TimeoutError) or "taking longer" in str(error)  # the loops' own words at a timeout
