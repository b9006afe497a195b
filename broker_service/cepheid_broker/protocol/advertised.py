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


def check_listener(name: str) -> None:
    """A client that names a listener needs the address of that one; any other may be out of its reach. Raises NotAllowedError."""
    if name:
        raise NotAllowedError(f"this broker has no listener {name[:100]!r}; use the client without one")
