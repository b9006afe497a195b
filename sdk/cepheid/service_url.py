"""The URL that `connect` takes: pulsar://HOST[:PORT][,HOST[:PORT]…]. Several hosts are tried in turn."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from cepheid.errors import UsageError
from cepheid_ports import host_port

DEFAULT_PORT = 6650


@dataclass(frozen=True, slots=True)
class Address:
    """Where a broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_service_url(url: str) -> tuple[Address, ...]:
    """Return the addresses of a service URL, at least one. Raises UsageError."""
    scheme, separator, rest = url.partition("://")
    if scheme == "pulsar+ssl":
        raise UsageError(f"{url!r}: this client has no TLS yet: use a pulsar:// address")
    if scheme != "pulsar" or not separator:
        raise UsageError(f"{url!r} is not a service URL: expected pulsar://HOST:PORT[,HOST:PORT…]")
    return tuple(_address(part, url) for part in rest.rstrip("/").split(","))


def _address(part: str, url: str) -> Address:
    try:
        split = urlsplit(f"//{part}")
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    if not host or split.path:
        raise UsageError(f"{url!r} is not a service URL: {part!r} is not HOST or HOST:PORT")
    return Address(host, DEFAULT_PORT if port is None else port)
