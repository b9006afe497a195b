"""The address that clients are told: set by the operator, else the one listened on, else the one that they reached."""

from __future__ import annotations

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.settings import BrokerSettings
from cepheid_ports import host_port

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def advertised_url(scheme: str, settings: BrokerSettings, port: int, reached_host: str) -> str:
    """`reached_host` is the local address of the client's connection. `port` is the one that clients reach."""
    host = settings.advertised_host or (reached_host if settings.host in _ANY_ADDRESS else settings.host)
    return f"{scheme}://{host_port(host, port)}"


def service_urls(settings: BrokerSettings, port: int, tls_port: int, reached_host: str) -> dict[str, str]:
    """Return the URLs of the binary protocol by scheme. A port of 0 is not open."""
    urls = {}
    if port:
        urls["pulsar"] = advertised_url("pulsar", settings, settings.advertised_port or port, reached_host)
    if tls_port:
        urls["pulsar+ssl"] = advertised_url("pulsar+ssl", settings, settings.advertised_tls_port or tls_port, reached_host)
    return urls


def check_listener(name: str) -> None:
    """A client that names a listener needs the address of that one; any other may be out of its reach. Raises NotAllowedError."""
    if name:
        raise NotAllowedError(f"this broker has no listener {name[:100]!r}; use the client without one")
