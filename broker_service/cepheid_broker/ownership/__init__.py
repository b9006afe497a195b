"""Which broker serves a topic, and how brokers call each other. README.md has the rules."""

from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundles import Bundle, boundaries, bundle_of, bundles_of
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import KEEPS_CONNECTION, Here, NotOwnerError, Ownership, SoleOwnership, There, health_topic
from cepheid_broker.ownership.peer_calls import (
    ACTING_FOR,
    ACTING_FOR_HEADER,
    PeerCalls,
    PeerUnreachableError,
    RemoteRefusedError,
    token_from,
    topic_path,
)
from cepheid_broker.ownership.peer_link import PeerLinks
from cepheid_broker.ownership.remote_parts import RemoteParts, clients_in

__all__ = [
    "ACTING_FOR",
    "ACTING_FOR_HEADER",
    "KEEPS_CONNECTION",
    "BrokerLiveness",
    "Bundle",
    "BundleOwnership",
    "Here",
    "NotOwnerError",
    "OwnerReach",
    "Ownership",
    "PeerCalls",
    "PeerLinks",
    "PeerUnreachableError",
    "RemoteParts",
    "RemoteRefusedError",
    "SoleOwnership",
    "There",
    "boundaries",
    "bundle_of",
    "bundles_of",
    "clients_in",
    "health_topic",
    "token_from",
    "topic_path",
]
