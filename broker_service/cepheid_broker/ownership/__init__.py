"""Which broker serves a topic, and how brokers call each other. README.md has the rules."""

from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundle_split import check_may_split, divided
from cepheid_broker.ownership.bundles import (
    MAX_BUNDLES,
    Bundle,
    Division,
    boundaries,
    bundle_of,
    bundles_of,
    division_of,
    preference,
    topic_hash,
)
from cepheid_broker.ownership.hand_over import OPEN_LIMIT_S, HandOverCall, Heir
from cepheid_broker.ownership.hand_over import PATH as HAND_OVER_PATH
from cepheid_broker.ownership.isolation import IsolationRules, compile_policy, names_of
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import (
    KEEPS_CONNECTION,
    BundleSplitError,
    DestinationRefusedError,
    Here,
    NotOwnerError,
    Ownership,
    SoleOwnership,
    SplitRefusedError,
    There,
    health_topic,
)
from cepheid_broker.ownership.peer_calls import (
    ACTING_FOR,
    ACTING_FOR_HEADER,
    PeerCalls,
    PeerSilentError,
    PeerUnreachableError,
    RemoteRefusedError,
    token_from,
    topic_path,
)
from cepheid_broker.ownership.peer_link import PeerLinks
from cepheid_broker.ownership.placement import Placement
from cepheid_broker.ownership.remote_parts import RemoteParts, clients_in

__all__ = [
    "ACTING_FOR",
    "ACTING_FOR_HEADER",
    "HAND_OVER_PATH",
    "KEEPS_CONNECTION",
    "MAX_BUNDLES",
    "OPEN_LIMIT_S",
    "BrokerLiveness",
    "Bundle",
    "BundleOwnership",
    "BundleSplitError",
    "DestinationRefusedError",
    "Division",
    "HandOverCall",
    "Heir",
    "Here",
    "IsolationRules",
    "NotOwnerError",
    "OwnerReach",
    "Ownership",
    "PeerCalls",
    "PeerLinks",
    "PeerSilentError",
    "PeerUnreachableError",
    "Placement",
    "RemoteParts",
    "RemoteRefusedError",
    "SoleOwnership",
    "SplitRefusedError",
    "There",
    "boundaries",
    "bundle_of",
    "bundles_of",
    "check_may_split",
    "clients_in",
    "compile_policy",
    "divided",
    "division_of",
    "health_topic",
    "names_of",
    "preference",
    "token_from",
    "topic_hash",
    "topic_path",
]
