"""The URL for `connect`: pulsar://HOST[:PORT][,HOST[:PORT]…], or pulsar+ssl:// with TLS. Several hosts are tried in turn."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from cepheid.errors import UsageError
from cepheid_ports import host_port

DEFAULT_PORT = 6650
DEFAULT_TLS_PORT = 6651


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a broker."""

    host: str
    port: int
    over_tls: bool = False

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_service_url(url: str) -> tuple[Address, ...]:
    """Return the addresses of a service URL, at least one. Raises UsageError."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("pulsar", "pulsar+ssl") or not separator:
        raise UsageError(f"{url!r} is not a service URL: expected pulsar://HOST:PORT[,HOST:PORT…], or pulsar+ssl:// with TLS")
    return tuple(_address(part, url, over_tls=scheme == "pulsar+ssl") for part in rest.rstrip("/").split(","))


def _address(part: str, url: str, *, over_tls: bool) -> Address:
    try:
        split = urlsplit(f"//{part}")
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    if not host or split.path:
        raise UsageError(f"{url!r} is not a service URL: {part!r} is not HOST or HOST:PORT")
    default = DEFAULT_TLS_PORT if over_tls else DEFAULT_PORT
    return Address(host, default if port is None else port, over_tls)
