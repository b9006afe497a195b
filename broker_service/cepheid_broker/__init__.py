"""The broker: serves topics to Pulsar clients, and keeps no data of its own. broker_service/README.md has the map."""

from cepheid_broker.broker import Broker
from cepheid_broker.errors import BrokerError
from cepheid_broker.settings import BrokerSettings

__all__ = ["Broker", "BrokerError", "BrokerSettings"]
