"""Settings of every process that has a broker: bounds in the type, meaning in the description.

`cepheid broker` reads `BrokerRoleSettings`, `cepheid standalone` reads `StandaloneSettings` (standalone.py). The broker uses what
they read: its parts get the whole tree or the table that they need. docs/settings.md is generated from it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cepheid_ledger import LedgerSettings
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_ports import HOST_PATTERN, RACK_PATTERN
from cepheid_security.peer_settings import ReadTicketSettings
from cepheid_security.settings import AuditSettings, AuthenticationSettings, AuthorizationSettings, TlsSettings
from cepheid_tiered import StoreLocation, StoreLocationError

KIB = 1 << 10
MIB = 1 << 20

FRAME_PADDING_BYTES = 10 * KIB
"""Room in a frame beyond `max_message_bytes`, for command and metadata (protocol.md §1.3; Go's client checks the same sum)."""

RENAMED: Mapping[str, str] = {"topic_creation": "topic_creation.allowed"}
"""Settings renamed since the previous release: old names are still accepted in this release, with a warning."""

HostOrDomain = Annotated[str, Field(pattern=r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]{0,253}$")]

_ANY_ADDRESS = ("0.0.0.0", "::", "")


class TopicCreation(BaseModel, frozen=True, extra="forbid"):
    """What happens when a client uses a topic that does not exist. A namespace may override it."""

    allowed: bool = Field(
        True, description="Whether the topic is created. Set it to false where topics are created by administrators only."
    )
    topic_type: Literal["partitioned", "non-partitioned"] = Field("non-partitioned", description="Kind of topic that is created.")
    partitions: PositiveInt = Field(1, description="Number of partitions, where partitioned topics are created.")


class ConnectionSettings(BaseModel, frozen=True, extra="forbid"):
    """Bounds and timeouts of each client connection."""

    handshake_timeout_s: PositiveFloat = Field(
        10.0,
        description="Time for the TLS handshake of a new connection, and the time in which it must then have authenticated. After "
        "it the connection is closed.",
    )
    max_unauthenticated: PositiveInt = Field(
        2000,
        description="Connections that have not authenticated yet: in the TLS handshake, or before CONNECT is answered. Beyond it "
        "new ones are closed at once.",
    )
    max_unauthenticated_per_address: PositiveInt = Field(
        500, description="Connections from one address that have not authenticated yet, except loopback. Beyond it as above."
    )
    keepalive_s: PositiveFloat = Field(
        30.0,
        description="Silence after which a connection gets a PING. It is closed when it stays silent for as long again. Shorter: "
        "producers and consumers of a vanished client are removed sooner.",
    )
    liveness_probe_s: PositiveFloat = Field(
        3.0,
        description="Time that an old connection may take to answer a PING when a new one claims its producer name or its "
        "Exclusive subscription. Longer: a client that crashed blocks its successor longer.",
    )
    publish_window_bytes: PositiveInt = Field(
        16 * MIB,
        description="Bytes that one connection may have published without a receipt. Beyond it the broker stops reading from the "
        "connection. Raise it for single producers with a high throughput over a long distance.",
    )
    write_high_bytes: PositiveInt = Field(
        2 * MIB,
        description="Bytes that may wait in the socket of one connection before dispatch to it stops. It resumes at a quarter.",
    )
    max_waiting_requests: PositiveInt = Field(
        10_000, description="Requests of one connection in progress. Beyond it the connection is closed."
    )
    max_producers: PositiveInt = Field(10_000, description="Producers on one connection.")
    max_consumers: PositiveInt = Field(10_000, description="Consumers on one connection.")
    max_topic_watchers: PositiveInt = Field(
        100, description="Watchers of topic lists (consumers with a pattern) on one connection."
    )


class DispatchSettings(BaseModel, frozen=True, extra="forbid"):
    """How entries are sent to consumers."""

    read_bytes: PositiveInt = Field(1 * MIB, description="Size of one read from storage for a subscription that catches up.")
    read_ahead_bytes: PositiveInt = Field(
        2 * MIB,
        description="Bytes that one subscription reads ahead of its consumers. It may be exceeded by one read.",
    )
    read_ahead_total_bytes: PositiveInt = Field(
        256 * MIB,
        description="Bytes that all subscriptions together read ahead. Beyond it each is limited to one small read. Lower it on "
        "machines with little memory.",
    )
    read_retry_s: PositiveFloat = Field(0.5, description="First pause before a failed read is tried again. It doubles up to 30 s.")
    pass_bytes: PositiveInt = Field(
        4 * MIB,
        description="Bytes that one subscription sends before others get their turn. Each entry counts 16 KiB more than its size. "
        "Larger: fewer turns, less even latencies.",
    )
    catch_up_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Share of the broker's event loop for subscriptions that catch up while clients publish 500 entries a second "
        "or more; it is larger while they publish less. Higher: they catch up sooner, and publishing is slower meanwhile. "
        "1: no limit.",
    )
    max_unacked_messages: PositiveInt = Field(
        50_000,
        description="Messages that one consumer of a Shared or Key_Shared subscription may hold unacknowledged, unless a policy "
        "says otherwise. Beyond it dispatch to the consumer stops; it resumes at half.",
    )
    max_permits: PositiveInt = Field(
        100_000_000, description="Permits that one consumer may accumulate. The receive queue of a client is never this large."
    )


class PolicySettings(BaseModel, frozen=True, extra="forbid"):
    """What applies to a topic where neither the topic nor its namespace has a policy. 0 means no limit, or off."""

    retention_time_min: int = Field(0, ge=-1, description="Minutes for which acknowledged data is kept. -1: without limit.")
    retention_size_mb: int = Field(0, ge=-1, description="Megabytes of acknowledged data that a topic keeps. -1: without limit.")
    message_ttl_s: NonNegativeInt = Field(0, description="Age from which a message counts as acknowledged by all subscriptions.")
    backlog_quota_bytes: int = Field(-1, ge=-1, description="Backlog from which a topic is above its quota. -1: no quota.")
    backlog_quota_age_s: int = Field(
        -1, ge=-1, description="Age of the oldest message in a backlog from which a topic is above its quota. -1: no quota."
    )
    backlog_quota_action: Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"] = Field(
        "producer_request_hold",
        description="What happens above the quota: producers wait, producers get an error, or subscriptions skip their oldest "
        "messages.",
    )
    deduplication: bool = Field(False, description="Whether messages that a producer sends again are dropped.")
    dedup_snapshot_entries: PositiveInt = Field(
        1000,
        description="Number of entries after which the sequence ids of producers are saved. Larger: more to read again when a "
        "topic is opened.",
    )
    dedup_snapshot_s: PositiveInt = Field(120, description="Time after which the sequence ids of producers are saved.")
    max_unacked_per_subscription: NonNegativeInt = Field(
        200_000,
        description="Messages of a Shared or Key_Shared subscription that may be unacknowledged. Beyond it its dispatch stops; it "
        "resumes at half.",
    )
    max_producers: NonNegativeInt = Field(0, description="Producers of one topic.")
    max_consumers: NonNegativeInt = Field(0, description="Consumers of one topic.")
    max_consumers_per_subscription: NonNegativeInt = Field(0, description="Consumers of one subscription.")
    max_subscriptions: NonNegativeInt = Field(
        0, description="Subscriptions of one topic. `max_subscriptions_per_topic` applies in any case."
    )
    subscription_types: tuple[Literal["Exclusive", "Shared", "Failover", "Key_Shared"], ...] = Field(
        (), description="Types of subscription that consumers may use. Empty: all types."
    )
    auto_subscription_creation: bool = Field(
        True, description="Whether a subscription is created when its first consumer connects."
    )
    delayed_delivery: bool = Field(True, description="Whether producers may ask for messages to be delivered later.")
    schema_compatibility: Literal[
        "ALWAYS_INCOMPATIBLE",
        "ALWAYS_COMPATIBLE",
        "BACKWARD",
        "FORWARD",
        "FULL",
        "BACKWARD_TRANSITIVE",
        "FORWARD_TRANSITIVE",
        "FULL_TRANSITIVE",
    ] = Field("FULL", description="How a new version of a schema must be compatible with earlier versions.")
    schema_auto_update: bool = Field(True, description="Whether producers may add versions of a schema.")
    schema_validation_enforced: bool = Field(
        False, description="Whether producers without a schema are refused by topics that have one."
    )
    encryption_required: bool = Field(False, description="Whether producers that do not encrypt are refused.")
    delete_inactive_topics: bool = Field(False, description="Whether unused topics are deleted.")
    inactive_topics_when: Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"] = Field(
        "delete_when_no_subscriptions", description="When a topic without clients counts as unused."
    )
    inactive_topics_after_s: PositiveInt = Field(60, description="Time for which a topic must be unused before it is deleted.")


class TieredSettings(BaseModel, frozen=True, extra="forbid"):
    """Old ledgers in an object store. The first five apply to topics where neither topic nor namespace says something else."""

    url: str | None = Field(
        None,
        description="Object store and prefix for the ended ledgers of topics: `s3://bucket/prefix?region=…&endpoint=…`, "
        "`gs://bucket/prefix`, `abfs://container/prefix` or `file:///path`. Credentials do not belong here: they are read from the "
        "environment. Unset: only what a policy says is offloaded.",
    )
    after_bytes: int = Field(
        -1, ge=-1, description="Bytes of the newest ledgers of a topic that stay on bookies alone. -1: no offload by size."
    )
    after_s: int = Field(-1, ge=-1, description="Age of a ledger's end from which it is offloaded. -1: no offload by age.")
    keep_s: NonNegativeInt = Field(
        4 * 3600, description="Time for which bookies keep a ledger after it was offloaded and verified. Then they delete it."
    )
    read_from: Literal["bookies", "objects"] = Field(
        "bookies",
        description="Copy that is read while there are both. `objects`: consumers that catch up take no bandwidth of bookies.",
    )
    read_cache_bytes: PositiveInt = Field(
        16 * MIB,
        description="Memory for entries that were fetched from objects, of all topics: those that no consumer has read yet and, in "
        "up to half of it, those read last. What is read ahead of consumers is in `managed_ledger.catch_up_bytes`.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            return str(StoreLocation.parse(url))
        except StoreLocationError as error:
            raise ValueError(str(error)) from None


class DeduplicationSettings(BaseModel, frozen=True, extra="forbid"):
    """What a topic remembers of its producers, where a policy turns deduplication on."""

    idle_s: PositiveFloat = Field(
        6 * 3600.0,
        description="Time after which an unused producer name is forgotten. What it sends again later than that is stored again: "
        "raise it for producers that come back after longer breaks.",
    )
    max_names: PositiveInt = Field(
        10_000,
        description="Producer names that one topic remembers. Beyond it the names that have been unused longest are forgotten.",
    )


class BalanceSettings(BaseModel, frozen=True, extra="forbid"):
    """How load is spread over brokers (docs/ownership.md). All of them can be changed while brokers run."""

    enabled: bool = Field(
        True, description="Whether bundles are moved and split by themselves. `cepheid cluster balance` does it once."
    )
    interval_s: float = Field(
        5.0,
        gt=0,
        le=300,
        description="Time between two rounds in which the leader asks all brokers for their load. Longer: a new broker gets its "
        "share later.",
    )
    tolerance: float = Field(
        0.2,
        gt=0,
        le=1,
        description="How far the load of a broker may be from the mean, as a share of the mean. Beyond it bundles are moved.",
    )
    moves_at_once: PositiveInt = Field(
        8,
        description="Bundles that are moved in one round. Lower it where clients feel that topics move. While there is more to "
        "move, rounds follow after a fifth of `balance.interval_s`.",
    )
    split_topics: NonNegativeInt = Field(
        1000, description="Open topics of a bundle from which it is split. 0: bundles are not split by their number of topics."
    )


class AdminSettings(BaseModel, frozen=True, extra="forbid"):
    """The admin API of the broker."""

    max_partitions: PositiveInt = Field(10_000, description="Partitions that one topic may be given.")
    max_connections: PositiveInt = Field(
        1024,
        description="Connections to the admin port at one time. Beyond it requests are answered with 503, except the probes "
        "`/health`, `/ready` and `/status.html`.",
    )
    max_connections_per_address: PositiveInt = Field(
        128,
        description="Connections to the admin port from one address, except loopback. Beyond it as above. Raise it where many "
        "clients come through one address, such as that of a proxy.",
    )
    header_timeout_s: PositiveFloat = Field(
        10.0, description="Time that the request line and the headers of a request may take. After it the connection is closed."
    )
    transfer_timeout_s: PositiveFloat = Field(
        30.0,
        description="Time that the body of a request may take, and time for which a client may leave an answer unread. After it "
        "the connection is closed.",
    )
    keepalive_s: PositiveFloat = Field(
        5.0, description="Time for which a connection may stay open without a request. After it the connection is closed."
    )
    health_timeout_s: PositiveFloat = Field(
        10.0, description="Time that the health check may take to publish a message and to read it back."
    )
    stop_grace_s: PositiveFloat = Field(
        2.0, description="Time for which a stop waits for requests in progress, in whole seconds and at least 1 s."
    )


class BrokerSettings(BaseModel, frozen=True, extra="forbid"):
    """What `cepheid broker` and `cepheid standalone` have in common."""

    host: str = Field("127.0.0.1", description="Address on which clients and the admin API are served. `0.0.0.0`: all addresses.")
    port: NonNegativeInt = Field(6650, le=65535, description="Port of the binary protocol. 0: any free port.")
    admin_port: NonNegativeInt = Field(8080, le=65535, description="Port of the admin API and of metrics. 0: any free port.")
    advertised_host: str | None = Field(
        None,
        pattern=HOST_PATTERN,
        description="Host that clients are told to connect to. Set it when clients come through a proxy or a port mapping. Unset: "
        "`host`; if that is all addresses, the one that the client used.",
    )
    advertised_port: NonNegativeInt | None = Field(
        None, le=65535, description="Port that clients are told to connect to. Unset: the port that is listened on."
    )
    advertised_tls_port: NonNegativeInt | None = Field(
        None, le=65535, description="Port with TLS that clients are told to connect to. Unset: the port that is listened on."
    )
    rack: str | None = Field(
        None,
        pattern=RACK_PATTERN,
        description="Where this process runs: `region/rack`, or a rack without a region. Entries are read from bookies in the same "
        "rack first, then from those in the same region. In `cepheid standalone` it is the rack of its bookies, too.",
    )
    admin_allowed_hosts: tuple[HostOrDomain, ...] = Field(
        (),
        description="Further names under which the admin API may be called, such as that of a proxy or of a Kubernetes service; "
        "`.x.org` stands for all names below x.org. Addresses, localhost, the name of the machine, `host` and `advertised_host` "
        "are always accepted, other names are refused. Web pages of the listed hosts may call the API as well.",
    )
    max_connections: PositiveInt = Field(
        50_000, description="Client connections at one time. Beyond it new ones are closed at once."
    )
    max_connections_per_address: PositiveInt = Field(
        10_000,
        description="Client connections from one address at one time, except loopback. Beyond it new ones are closed at once. "
        "Raise it where very many clients come through one address, such as that of a proxy.",
    )
    # An entry must fit into one message between brokers and bookies (16 MiB) beside a chunk of 8 MiB that is read with it.
    max_message_bytes: PositiveInt = Field(
        5 * MIB,
        ge=64 * KIB,
        le=7 * MIB,
        description="Largest message. Clients learn it when they connect. Set the same value on all brokers of a cluster.",
    )
    publish_buffer_bytes: PositiveInt = Field(
        128 * MIB,
        description="Bytes that all connections together may have published without a receipt. Beyond it none of them is read. "
        "Keep it below `managed_ledger.append_window_bytes`, so that producers are slowed down instead of refused.",
    )
    tail_cache_bytes: PositiveInt = Field(
        128 * MIB,
        description="Memory for the newest entries of all topics. Consumers that keep up are served from it: raise it when "
        "`cepheid_broker_tail_cache_misses_total` grows although they are only a little late.",
    )
    max_subscriptions_per_topic: PositiveInt = Field(
        10_000,
        description="Subscriptions of one topic, whatever policies allow. To raise it, raise `managed_ledger.max_cursors` as well.",
    )
    request_timeout_s: PositiveFloat = Field(
        25.0,
        description="Time that opening a topic, a subscription or a seek may take. Keep it below the 30 s after which clients "
        "give up, so that they get the reason.",
    )
    topic_retry_s: PositiveFloat = Field(
        0.2,
        description="First pause before a topic whose ledger failed is opened again. It doubles at each failure, up to 10 s.",
    )
    drain_timeout_s: NonNegativeFloat = Field(
        20.0,
        le=3600,
        description="Time within which a broker that stops hands its topics over to others, so that clients notice nothing. What "
        "is left then is closed, and its clients look it up again. 0: nothing is handed over.",
    )
    close_timeout_s: PositiveFloat = Field(
        10.0, description="Time for which an orderly stop waits for publishes in progress, for each topic."
    )
    reader_seek_grace_s: PositiveFloat = Field(
        60.0,
        description="Time for which the position of a reader is kept after a seek disconnected it, so that it continues there "
        "when it connects again.",
    )
    inactive_check_s: PositiveFloat = Field(
        60.0, description="Interval between checks of open topics for unused ones, where a policy has them deleted."
    )
    closed_topic_check_s: NonNegativeFloat = Field(
        600.0,
        description="Pause between passes over topics that no client has open. Those with ledgers to offload or to trim, or with "
        "expired messages, are opened, and closed again when that is done. 0: no passes, so this waits for a client. Longer: fewer "
        "reads of metadata, two for each topic in each pass.",
    )
    closed_topics_at_once: PositiveInt = Field(
        2, description="Topics that such a pass has open at the same time. Raise it when passes do not keep up."
    )
    manifest_interval_s: PositiveFloat = Field(
        60.0,
        description="Interval at which the manifest of an offloaded topic is written again while its cursors change. A restore "
        "from the bucket alone has cursors of at most this age. An offload that completes is written at once.",
    )
    lease_check_s: PositiveFloat = Field(
        30.0,
        description="Interval between checks of the leases on open topics. Leases are the subscriptions with which Spark keeps "
        "what it reads.",
    )
    lease_silence_s: PositiveFloat = Field(
        180.0,
        description="Time without a renewal after which an expired lease is dropped. Holders renew every minute, so a broker "
        "whose clock is wrong does not take a lease from a holder that is alive.",
    )
    backlog_check_s: PositiveFloat = Field(
        1.0,
        description="Interval between checks of open topics for messages past their time to live and for backlogs above their "
        "quota. Longer: less work for a broker with very many topics.",
    )
    rate_window_s: PositiveFloat = Field(10.0, description="Time over which the rates in statistics are averaged.")
    topic_creation: TopicCreation = Field(
        TopicCreation(), description="What happens when a client uses a topic that does not exist."
    )
    connection: ConnectionSettings = Field(ConnectionSettings(), description="Bounds and timeouts of each client connection.")
    dispatch: DispatchSettings = Field(DispatchSettings(), description="How entries are sent to consumers.")
    policies: PolicySettings = Field(PolicySettings(), description="What applies where topic and namespace have no policy.")
    deduplication: DeduplicationSettings = Field(
        DeduplicationSettings(), description="What a topic remembers of its producers, where deduplication is on."
    )
    tiered: TieredSettings = Field(TieredSettings(), description="Old ledgers in an object store (docs/tiered-storage.md).")
    managed_ledger: ManagedLedgerSettings = Field(
        ManagedLedgerSettings(), description="The chain of ledgers of a topic, and its cursors."
    )
    ledger: LedgerSettings = Field(LedgerSettings(), description="Writing, reading and recovering ledgers.")
    admin: AdminSettings = Field(AdminSettings(), description="Bounds of the admin API.")
    tls: TlsSettings = Field(TlsSettings(), description="Encrypted ports.")
    authentication: AuthenticationSettings = Field(AuthenticationSettings(), description="Who may connect.")
    authorization: AuthorizationSettings = Field(AuthorizationSettings(), description="What clients may do.")
    audit: AuditSettings = Field(AuditSettings(), description="The audit log.")
    read_tickets: ReadTicketSettings = Field(ReadTicketSettings(), description="Permissions to read history from bookies.")

    @property
    def signs_tickets(self) -> bool:
        """Whether plans have signed tickets instead of master keys: in every cluster that has set up any security."""
        return self.authentication.enabled or self.tls.enabled

    @property
    def has_plain_ports(self) -> bool:
        """Whether the ports without TLS are open."""
        return not self.tls.enabled or self.tls.plain_ports

    @property
    def max_frame_bytes(self) -> int:
        return self.max_message_bytes + FRAME_PADDING_BYTES


class BrokerRoleSettings(BrokerSettings):
    """One broker of a cluster as a process."""

    metadata: str = Field(
        min_length=1, description="Address of the cluster's metadata store: `zk://host:port[,host:port…][/root]`."
    )
    # The C++ client reconnects about 3.1 s and 6.3 s after its broker died, then at 12.7 s: the session has to expire before 6.3 s.
    # kazoo's own thread sends the heartbeats, so that a busy loop does not cost the session.
    metadata_session_timeout_s: PositiveFloat = Field(
        4.0,
        le=3600,
        description="Silence after which the metadata store treats this broker as dead and others serve its topics. Longer: it "
        "survives longer pauses, and clients of a dead broker wait longer.",
    )
    metadata_wait_s: PositiveFloat = Field(
        60.0, description="Time for which a start waits for a metadata store that it cannot reach, before it gives up."
    )
    metadata_auth_file: str | None = Field(
        None,
        description="File with the ZooKeeper user of this cluster, as `digest:user:password`. What the cluster creates is then "
        "readable by this user alone. Unset: what the environment variable `CEPHEID_METADATA_AUTH` says.",
    )
    metadata_private: bool = Field(
        True,
        description="Whether what this process creates in ZooKeeper is for the user of `metadata_auth_file` alone. `false` only "
        "while other processes of the cluster still run without that user.",
    )
    broker_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._:-]{1,200}$",
        description="Name in metadata and in the admin API. Unset: the advertised host and admin port.",
    )
    advertised_admin_port: NonNegativeInt | None = Field(
        None,
        le=65535,
        description="Port of the admin API that other brokers and clients are told. Unset: the port that is listened on.",
    )
    advertised_tls_admin_port: NonNegativeInt | None = Field(
        None,
        le=65535,
        description="Port of the admin API with TLS that other brokers and clients are told. Unset: the port that is listened on.",
    )
    ensemble_size: PositiveInt = Field(
        3,
        le=64,
        description="E: bookies over which a new ledger is spread, unless a policy says otherwise. As many must be writable.",
    )
    write_quorum: PositiveInt = Field(3, le=64, description="Qw: bookies that store each entry. At most `ensemble_size`.")
    ack_quorum: PositiveInt = Field(
        2,
        le=64,
        description="Qa: bookies that must have stored an entry before it is acknowledged. At most `write_quorum`. No "
        "acknowledged entry is lost as long as fewer than Qa bookies are lost at once.",
    )

    balance: BalanceSettings = Field(BalanceSettings(), description="How load is spread over brokers.")
    processes: PositiveInt = Field(
        1,
        le=64,
        description="Broker processes that `cepheid broker` starts and supervises on this machine. Above 1, process i has the id "
        "`broker_id`-i, the port `port` + i, an admin port of its own, `admin_port` + 1 + i, and all memory bounds for itself. "
        "`admin_port` is answered by all of them. One process uses one core.",
    )
    processes_stop_s: PositiveFloat = Field(
        60.0, description="Time that several `processes` have for an orderly stop, before those that still run are killed."
    )

    @model_validator(mode="after")
    def _check_quorums(self) -> Self:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise ValueError(
                f"ensemble_size must be at least write_quorum, and write_quorum at least ack_quorum, "
                f"got {self.ensemble_size}, {self.write_quorum} and {self.ack_quorum}"
            )
        return self

    @model_validator(mode="after")
    def _check_ports_of_processes(self) -> Self:
        """Refuse settings with which two of several processes would listen on one port."""
        if self.processes == 1:
            return self
        given = {"port": (self.port, 0), "admin_port": (self.admin_port, 1)} if self.has_plain_ports else {}
        if self.tls.enabled:
            given |= {"tls.port": (self.tls.port, 0), "tls.admin_port": (self.tls.admin_port, 1)}
        taken: dict[int, str] = {}
        for name, (first, shared) in given.items():
            last = first + self.processes - 1 + shared
            if first and last > 65_535:
                raise ValueError(f"{self.processes} processes need the ports {first} to {last} from {name} on: choose a lower one")
            for port in range(first, last + 1) if first else ():
                if port in taken:
                    raise ValueError(
                        f"{self.processes} processes would use port {port} twice, counted from {taken[port]} and from {name}: "
                        f"set these at least {self.processes + 1} apart"
                    )
                taken[port] = name
        return self

    def for_process(self, index: int) -> Self:
        """Return the settings of one of several `processes`: its own id, ports and audit file."""

        def moved(port: int | None, by: int) -> int | None:
            return port + by if port else port  # 0: any free port

        audit = self.audit
        if audit.file is not None and audit.file != "-":
            path = Path(audit.file)
            audit = audit.model_copy(update={"file": str(path.with_name(f"{path.stem}-{index}{path.suffix}"))})
        tls = {"port": moved(self.tls.port, index), "admin_port": moved(self.tls.admin_port, 1 + index)}
        return self.model_copy(
            update={
                "processes": 1,
                "broker_id": None if self.broker_id is None else f"{self.broker_id}-{index}",
                "port": moved(self.port, index),
                "admin_port": moved(self.admin_port, 1 + index),
                "advertised_port": moved(self.advertised_port, index),
                "advertised_tls_port": moved(self.advertised_tls_port, index),
                "advertised_admin_port": moved(self.advertised_admin_port, 1 + index),
                "advertised_tls_admin_port": moved(self.advertised_tls_admin_port, 1 + index),
                "tls": self.tls.model_copy(update=tls),
                "audit": audit,
            }
        )

    @property
    def shown_host(self) -> str:
        return self.advertised_host or (socket.gethostname() if self.host in _ANY_ADDRESS else self.host)

    @property
    def registration_patience_s(self) -> float:
        """Time to wait for an old registration: that of a dead process lasts at most one session timeout."""
        return 2 * self.metadata_session_timeout_s

    @property
    def ledger_config(self) -> ManagedLedgerConfig:
        return ManagedLedgerConfig(ensemble_size=self.ensemble_size, write_quorum=self.write_quorum, ack_quorum=self.ack_quorum)
