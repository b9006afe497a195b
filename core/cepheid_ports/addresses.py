"""Host and port as one string."""

from __future__ import annotations

HOST_PATTERN = r"^[A-Za-z0-9._:%-]{1,255}$"
"""A host name or address that can be given to other processes; an IPv6 address without brackets."""


def host_port(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address in brackets, because it contains colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]") or address
