"""Host and port as one text."""

from __future__ import annotations

HOST_PATTERN = r"^[A-Za-z0-9._:%-]{1,255}$"
"""A name or an address that others can be told; an IPv6 address without brackets."""


def host_port(host: str, port: int) -> str:
    """`host:port`; an IPv6 address in brackets, since it is full of colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]") or address
