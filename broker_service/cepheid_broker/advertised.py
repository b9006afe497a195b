"""The address that clients are told: set by the operator, else the one listened on, else the one that they reached."""

from __future__ import annotations

from cepheid_broker.settings import BrokerSettings

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def advertised_url(scheme: str, settings: BrokerSettings, port: int, reached_host: str) -> str:
    """`reached_host` is the local address of the client's connection. `port` is the one that clients reach."""
    host = settings.advertised_host or (reached_host if settings.host in _ANY_ADDRESS else settings.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
