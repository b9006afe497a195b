"""Services that all connections of a broker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cepheid_broker.authorizer import Authorizer
from cepheid_broker.ownership import Ownership
from cepheid_broker.publish_window import PublishBudget
from cepheid_broker.schemas import SchemaRegistry
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics import TopicCatalog, Topics, TopicWatches
from cepheid_ports import Ports, RefusalLog, TaskOwner
from cepheid_security.audit import AuditLog
from cepheid_security.authenticator import Authenticator
from cepheid_security.failed_attempts import FailedAttempts


@dataclass(frozen=True, slots=True)
class Services:
    settings: BrokerSettings
    catalog: TopicCatalog
    topics: Topics
    ownership: Ownership
    schemas: SchemaRegistry
    topic_watches: TopicWatches
    publish_budget: PublishBudget
    refusals: RefusalLog
    tasks: TaskOwner
    ports: Ports
    listening_port: Callable[[], int]
    """Port without TLS; 0: not open."""
    admin_url: Callable[[str, bool], str]
    """URL of this broker's admin API for a client that reached it at this local address, with or without TLS; "" if it has none."""
    tls_port: Callable[[], int] = lambda: 0
    """Port with TLS; 0: not open."""
    authenticator: Authenticator | None = None
    """None: clients are not authenticated."""
    failed_attempts: FailedAttempts = field(default_factory=FailedAttempts)
    authorizer: Authorizer | None = None
    """None: every client may do everything."""
    audit: AuditLog = field(default_factory=AuditLog)
