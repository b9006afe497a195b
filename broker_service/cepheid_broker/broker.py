"""A broker: its parts are created here, started in order and stopped in reverse. It contains no logic of its own.

start:  topics' clock ──► protocol port
aclose: bundles moved ──► no new connections ──► topics unloaded (receipts out, clients notified, cursors saved) ──► all closed

Among other brokers it has an `ownership` that is started once the ports are open; only then does it get topics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from cepheid_broker.authorizer import Authorizer
from cepheid_broker.balancing import LoadBalancer, OwnLoad
from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.ownership import (
    BundleOwnership,
    Division,
    Ownership,
    PeerCalls,
    RemoteParts,
    SoleOwnership,
    There,
    division_of,
)
from cepheid_broker.policies import PolicyFollower, broker_policies
from cepheid_broker.protocol import Listener, Services, advertised_url
from cepheid_broker.publish_window import PublishBudget
from cepheid_broker.schemas import SchemaRegistry
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics import (
    BacklogChecks,
    ClosedTopics,
    InactiveTopics,
    LeaseExpiry,
    PartitionedTopics,
    TopicCatalog,
    TopicChangeMarks,
    TopicManifests,
    Topics,
    TopicWatches,
)
from cepheid_broker.traffic import TrafficFigures
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgers
from cepheid_metadata import MetadataStore, delete_topic_permissions, namespace_records
from cepheid_ports import Ports, RefusalLog, TaskOwner
from cepheid_security import AuthenticationError, Principal, ServerTls
from cepheid_security.audit import AuditLog
from cepheid_security.authenticator import Authenticator
from cepheid_tiered.bucket import Bucket
from cepheid_wire import NamespaceName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    connections: int
    connections_accepted: int
    connections_refused: int
    connections_unauthenticated: int
    handshakes_failed: int
    authentications_failed: int
    topics_open: int
    topic_failures: int
    publish_buffer_bytes: int
    publish_pauses: int
    read_ahead_bytes: int
    catch_up_paused_s: float
    requests_running: int
    published: TrafficFigures
    delivered: TrafficFigures
    repeated_entries: int
    subscriptions_unreadable: int


class Broker:
    def __init__(
        self,
        settings: BrokerSettings,
        cluster: str,
        store: MetadataStore,
        managed_ledgers: ManagedLedgers,
        ports: Ports,
        *,
        ledger_config: ManagedLedgerConfig | None = None,
        ownership: Ownership | None = None,
        tls: ServerTls | None = None,
        authenticator: Authenticator | None = None,
        audit: AuditLog | None = None,
        peers: PeerCalls | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        """`bucket`: object stores for the manifests of offloaded topics; None: their libraries are not installed."""
        self.ownership: Ownership = ownership or SoleOwnership()
        self._authenticator = authenticator
        self.settings = settings
        self.cluster = cluster
        self.store = store
        self.managed_ledgers = managed_ledgers
        self.ports = ports
        self.ledger_config = ledger_config or ManagedLedgerConfig()
        policies = broker_policies(settings, self.ledger_config)
        self.catalog = TopicCatalog(store, settings.topic_creation, policies, ports)
        self._tasks = TaskOwner("broker")
        self.policies = PolicyFollower(store, policies, self._tasks)
        self.topics = Topics(self.catalog, managed_ledgers, self.policies, settings, cluster, self._tasks, ports, self.ownership)
        self.peers = peers or PeerCalls(settings.request_timeout_s)
        self.ownership.peers = self.peers
        remote = RemoteParts(self.ownership, self.peers)
        self.partitioned = PartitionedTopics(store, self.catalog, self.topics, remote, self._tasks, settings.request_timeout_s)
        self.catalog.on_marked_found.append(self.partitioned.finish_deleting)
        self.inactive = InactiveTopics(
            self.catalog, self.topics, self.partitioned, self._tasks, settings.inactive_check_s, ports.random
        )
        self.leases = LeaseExpiry(self.topics.loaded, self._tasks, settings.lease_check_s, settings.lease_silence_s)
        marks = None
        if self.ownership.is_shared:
            marks = TopicChangeMarks(store, lambda: self.ownership.broker_id, self._tasks, ports)
            self.catalog.on_changed.append(marks.note)
        self.topic_watches = TopicWatches(self.catalog.shown_topics_of, self._tasks, marks)
        self.catalog.on_changed.append(self.topic_watches.on_changed)
        self.schemas = SchemaRegistry(store, ports)
        self.topics.on_deleting.append(self.schemas.on_topic_deleting)
        self.manifests: TopicManifests | None = None
        if bucket is not None:
            self.manifests = TopicManifests(self.topics.loaded, store, bucket, self._tasks, ports, settings.manifest_interval_s)
            self.topics.on_deleting.append(self.manifests.on_topic_deleting)
        self.audit = audit or AuditLog()
        self.authorizer: Authorizer | None = None
        """None: every client may do everything."""
        if settings.authorization.enabled:
            authorization = settings.authorization
            self.authorizer = Authorizer(
                authorization.roles, authorization.stale_s, store, self._tasks, enforced=authorization.enforced
            )
            self.topics.on_deleting.append(partial(delete_topic_permissions, store))
        self._publish_budget = PublishBudget(settings.publish_buffer_bytes)
        self._refusals = RefusalLog()
        services = Services(
            settings=settings,
            catalog=self.catalog,
            topics=self.topics,
            ownership=self.ownership,
            schemas=self.schemas,
            topic_watches=self.topic_watches,
            publish_budget=self._publish_budget,
            refusals=self._refusals,
            tasks=self._tasks,
            ports=ports,
            listening_port=lambda: self._listener.port,
            admin_url=self._admin_url,
            tls_port=lambda: self._listener.tls_port,
            authenticator=authenticator,
            authorizer=self.authorizer,
            audit=self.audit,
        )
        self._listener = Listener(services, tls)
        self.backlog_checks = BacklogChecks(self.topics.loaded, settings.backlog_check_s, settings.request_timeout_s)
        self.closed_topics = ClosedTopics(
            store, self.catalog, self.topics, managed_ledgers, self.backlog_checks, self.manifests, ports,
            check_s=settings.closed_topic_check_s, at_once=settings.closed_topics_at_once,
        )  # fmt: skip
        self.own_load = OwnLoad(self.ownership, self.topics.loaded, self._division_of, ports)
        self.balancer: LoadBalancer | None = None
        """Set by the assembly if there are several brokers."""
        self._tick: asyncio.TimerHandle | None = None
        self.admin_port: Callable[[], int] | None = None
        """Port of the admin API of this process, set when it is opened. 0: not open."""
        self.admin_tls_port: Callable[[], int] | None = None

    def __repr__(self) -> str:
        return f"<Broker {self._listener!r}, {self.topics!r}>"

    @property
    def port(self) -> int:
        """Port of the binary protocol, known once started. 0: not open (only the one with TLS is)."""
        return self._listener.port

    @property
    def tls_port(self) -> int:
        """Port of the binary protocol with TLS; 0: not open."""
        return self._listener.tls_port

    def _admin_url(self, reached_host: str, over_tls: bool) -> str:
        """Return the URL of the admin API for a client of the binary protocol: with TLS if it uses TLS; "" if there is none."""
        own = There(self.ownership.broker_id, self.ownership.brokers.get(self.ownership.broker_id, {}))
        if (registered := own.admin_url(over_tls=over_tls)) is not None:
            return registered
        ports = {"http": self.admin_port, "https": self.admin_tls_port}
        for scheme in ("https", "http") if over_tls else ("http", "https"):
            port_of = ports[scheme]
            if port_of is not None and (port := port_of()):
                return advertised_url(scheme, self.settings, port, reached_host)
        return ""

    def end_revoked(self) -> None:
        """Close the connections whose token or certificate was revoked since they were opened."""
        self._listener.end_revoked()

    def why_revoked(self, principal: Principal | None) -> str | None:
        """Return why the credentials of a client, or the role that it speaks for, hold no longer; None: they do."""
        if self._authenticator is not None and principal is not None:
            try:
                self._authenticator.revoked.check(principal)
            except AuthenticationError as error:
                return str(error)
        return None

    async def start(self) -> None:
        """Open the ports and start background checks. Raises PortInUseError."""
        await self._listener.start()
        self._schedule_tick()
        self.backlog_checks.start()
        self.closed_topics.start()
        log.info("broker.started", extra={"host": self.settings.host, "port": self.port})

    async def aclose(self) -> None:
        """Hand the topics over and close everything; every step is taken, even after a cancellation or a failed step."""
        async with AsyncExitStack() as steps:  # run in reverse order
            steps.callback(log.info, "broker.stopped")
            steps.push_async_callback(self._tasks.aclose)
            if self.authorizer is not None:
                steps.push_async_callback(self.authorizer.aclose)
            steps.push_async_callback(self._listener.aclose)
            steps.callback(self._listener.close_connections, "the broker stops")
            steps.push_async_callback(self.ownership.aclose)
            steps.push_async_callback(self.topics.aclose)
            steps.push_async_callback(self.backlog_checks.aclose)
            steps.callback(self._end_ticks)
            steps.callback(self._listener.stop_accepting)
            steps.push_async_callback(self.ownership.release_all, self.settings.drain_timeout_s)
            steps.push_async_callback(self.closed_topics.aclose)  # first: it would need the topics that it has open

    def statistics(self) -> BrokerFigures:
        return BrokerFigures(
            connections=len(self._listener.connections),
            connections_accepted=self._listener.accepted,
            connections_refused=self._listener.refused,
            connections_unauthenticated=self._listener.unauthenticated,
            handshakes_failed=self._listener.failed_handshakes,
            authentications_failed=0 if self._authenticator is None else self._authenticator.failures,
            topics_open=len(list(self.topics.loaded())),
            topic_failures=self.topics.failures,
            publish_buffer_bytes=self._publish_budget.used_bytes,
            publish_pauses=self._publish_budget.pauses,
            read_ahead_bytes=self.topics.dispatch.budget.used_bytes,
            catch_up_paused_s=self.topics.dispatch.turns.paused_s,
            requests_running=len(self._tasks),
            published=self.topics.totals.published.figures(),
            delivered=self.topics.totals.delivered.figures(),
            repeated_entries=self.topics.totals.repeated.entries,
            subscriptions_unreadable=sum(
                subscription.is_unreadable for topic in self.topics.loaded() for subscription in topic.subscriptions.values()
            ),
        )

    async def _division_of(self, namespace: NamespaceName) -> Division:
        """Return the division of a namespace into bundles. Raises BrokerError."""
        if isinstance(self.ownership, BundleOwnership):
            return await self.ownership.division(namespace)
        found = await namespace_records(self.store).get((namespace.tenant, namespace.local_name))
        if found is None:
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        return division_of(found.record)

    def _schedule_tick(self) -> None:
        self._tick = asyncio.get_running_loop().call_later(self.settings.rate_window_s, self._on_tick)

    def _end_ticks(self) -> None:
        if self._tick is not None:
            self._tick.cancel()

    def _on_tick(self) -> None:
        self._schedule_tick()  # first: a defect in one topic's figures must not stop rates, watches and maintenance of all
        self.topics.on_tick(self.settings.rate_window_s)
        self.own_load.on_tick()
        self.topic_watches.on_tick(self.settings.rate_window_s)
        self.inactive.on_tick(self.settings.rate_window_s)
        self.leases.on_tick(self.settings.rate_window_s)
        if self.manifests is not None:
            self.manifests.on_tick()
