"""The Pulsar binary protocol: connections, and one module for each family of commands. README.md has the rules."""

from cepheid_broker.protocol.advertised import advertised_url, check_listener, service_urls
from cepheid_broker.protocol.listener import Listener, PortInUseError, listening_socket
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.subscribe_checks import check_subscription_name

__all__ = [
    "Listener",
    "PortInUseError",
    "Services",
    "advertised_url",
    "check_listener",
    "check_subscription_name",
    "listening_socket",
    "service_urls",
]
