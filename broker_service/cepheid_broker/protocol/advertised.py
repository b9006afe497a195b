"""The advertised address: set by the operator, else the one listened on, else the one that the client reached."""

from __future__ import annotations

from collections.abc import Mapping

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.settings import BrokerSettings
from cepheid_ports import host_port
from cepheid_wire import pulsar_api_pb2 as pb

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def advertised_url(scheme: str, settings: BrokerSettings, port: int, reached_host: str) -> str:
    """Return the URL for clients. `reached_host`: local address of the client's connection. `port`: the one that clients reach."""
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


def assign(close: pb.CommandCloseProducer | pb.CommandCloseConsumer, moved_to: Mapping[str, str] | None) -> None:
    """Set the broker to which a client connects at once, without a lookup (protocol.md §19).

    Clients that do not know these fields look the topic up. `moved_to`: addresses by scheme; a client uses its own connection's.
    """
    addresses = moved_to or {}
    if (plain := addresses.get("pulsar")) is not None:
        close.assignedBrokerServiceUrl = f"pulsar://{plain}"
    if (over_tls := addresses.get("pulsar+ssl")) is not None:
        close.assignedBrokerServiceUrlTls = f"pulsar+ssl://{over_tls}"


def check_listener(name: str) -> None:
    """Refuse a listener name: its client needs that listener's address, as others may be unreachable. Raises NotAllowedError."""
    if name:
        raise NotAllowedError(f"this broker has no listener {name[:100]!r}; use the client without one")
