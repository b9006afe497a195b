"""Settings of a broker's serving side, documented at the field."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

KIB = 1 << 10
MIB = 1 << 20

FRAME_PADDING_BYTES = 10 * KIB
"""What a frame may have beyond `max_message_bytes`: command and metadata (protocol.md §1.3; Go's client checks the same sum)."""


class TopicCreation(BaseModel, frozen=True, extra="forbid"):
    """What happens when a client uses a topic that does not exist; a namespace may have its own answer."""

    allowed: bool = Field(True, description="Create it. If not, the client gets TopicNotFound.")
    topic_type: Literal["partitioned", "non-partitioned"] = Field("non-partitioned", description="What is created.")
    partitions: PositiveInt = Field(1, description="How many, when partitioned topics are created.")


class ConnectionSettings(BaseModel, frozen=True, extra="forbid"):
    """Bounds and patience of one connection."""

    handshake_timeout_s: PositiveFloat = Field(10.0, description="A connection that has not sent CONNECT by then is closed.")
    keepalive_s: PositiveFloat = Field(
        30.0, description="A connection that is silent this long gets a PING, and is closed when it stays silent as long again."
    )
    liveness_probe_s: PositiveFloat = Field(
        3.0,
        description="How long an old connection may take to answer a PING when a new one claims its producer name or its "
        "Exclusive subscription. Longer: a client that crashed blocks its successor longer.",
    )
    publish_window_bytes: PositiveInt = Field(
        16 * MIB, description="Bytes that one connection may have published and not answered; then it is read no further."
    )
    write_high_bytes: PositiveInt = Field(
        2 * MIB, description="Bytes that wait in the socket of one connection before dispatch to it stops; it resumes at a quarter."
    )
    max_waiting_requests: PositiveInt = Field(
        10_000, description="Requests of one connection that are being worked on. Beyond, the connection is closed."
    )
    max_producers: PositiveInt = Field(10_000, description="Producers of one connection.")
    max_consumers: PositiveInt = Field(10_000, description="Consumers of one connection.")
    max_topic_watchers: PositiveInt = Field(100, description="Watchers of topic lists of one connection.")


class DispatchSettings(BaseModel, frozen=True, extra="forbid"):
    """How entries are sent to consumers."""

    read_bytes: PositiveInt = Field(1 * MIB, description="Size of one read from storage for a subscription that catches up.")
    read_ahead_bytes: PositiveInt = Field(
        2 * MIB, description="Bytes that one subscription reads ahead of what its consumers take. Soft by one read."
    )
    read_ahead_total_bytes: PositiveInt = Field(
        256 * MIB, description="The same for all subscriptions together. Beyond, each keeps no more than one small read."
    )
    read_retry_s: PositiveFloat = Field(0.5, description="Pause after a failed read before it is tried again; doubles up to 30 s.")
    pass_bytes: PositiveInt = Field(
        4 * MIB, description="How much one subscription sends before other work gets its turn. Larger: fewer turns, more jitter."
    )
    max_unacked_messages: PositiveInt = Field(
        50_000,
        description="Messages that one consumer of a Shared subscription may hold unacknowledged; dispatch to it resumes at half.",
    )
    max_permits: PositiveInt = Field(
        100_000_000, description="Permits that one consumer may pile up. More is cut off here; no client's queue is as large."
    )


class PolicySettings(BaseModel, frozen=True, extra="forbid"):
    """What holds for topics where neither they nor their namespace say anything. Numbers of 0: no limit, off."""

    retention_time_min: int = Field(0, ge=-1, description="How long acknowledged data is kept. -1: no limit.")
    retention_size_mb: int = Field(0, ge=-1, description="How much of a topic's acknowledged data is kept. -1: no limit.")
    message_ttl_s: NonNegativeInt = Field(0, description="Age at which a message counts as acknowledged by everybody.")
    backlog_quota_bytes: int = Field(-1, ge=-1, description="Backlog of one topic that counts as too much. -1: no limit.")
    backlog_quota_age_s: int = Field(-1, ge=-1, description="Age of the oldest message in a backlog, likewise. -1: no limit.")
    backlog_quota_action: Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"] = Field(
        "producer_request_hold",
        description="What then happens: producers wait, are refused, or subscriptions skip their oldest messages.",
    )
    deduplication: bool = Field(False, description="Whether messages that a producer sends again are dropped.")
    dedup_snapshot_entries: PositiveInt = Field(
        1000, description="After how many entries the sequence ids of producers are saved. Larger: a longer replay at opening."
    )
    dedup_snapshot_s: PositiveInt = Field(120, description="The same by time.")
    max_unacked_per_subscription: NonNegativeInt = Field(
        200_000, description="Messages of a Shared or Key_Shared subscription that may be unacknowledged; it resumes at half."
    )
    max_producers: NonNegativeInt = Field(0, description="Producers of one topic.")
    max_consumers: NonNegativeInt = Field(0, description="Consumers of one topic.")
    max_consumers_per_subscription: NonNegativeInt = Field(0, description="Consumers of one subscription.")
    max_subscriptions: NonNegativeInt = Field(0, description="Subscriptions of one topic.")
    subscription_types: tuple[Literal["Exclusive", "Shared", "Failover", "Key_Shared"], ...] = Field(
        (), description="Kinds of subscription that consumers may use. Empty: all."
    )
    auto_subscription_creation: bool = Field(True, description="Whether a consumer's subscription is created when it is not there.")
    delayed_delivery: bool = Field(True, description="Whether messages may ask to be delivered later.")
    schema_compatibility: Literal[
        "ALWAYS_INCOMPATIBLE",
        "ALWAYS_COMPATIBLE",
        "BACKWARD",
        "FORWARD",
        "FULL",
        "BACKWARD_TRANSITIVE",
        "FORWARD_TRANSITIVE",
        "FULL_TRANSITIVE",
    ] = Field("FULL", description="How a new version of a schema must go with the versions before it.")
    schema_auto_update: bool = Field(True, description="Whether producers may add versions of a schema.")
    schema_validation_enforced: bool = Field(
        False, description="Whether producers without a schema are refused on topics that have one."
    )
    encryption_required: bool = Field(False, description="Whether producers that do not encrypt are refused.")
    delete_inactive_topics: bool = Field(False, description="Whether topics that nobody uses are deleted.")
    inactive_topics_when: Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"] = Field(
        "delete_when_no_subscriptions", description="Which topics count as unused, besides having no clients."
    )
    inactive_topics_after_s: PositiveInt = Field(60, description="How long a topic must be unused to be deleted.")


class DeduplicationSettings(BaseModel, frozen=True, extra="forbid"):
    """Bounds of what is remembered of producers, where a policy turns deduplication on."""

    idle_s: PositiveFloat = Field(
        6 * 3600.0,
        description="A producer name that nobody used for so long is forgotten: what it sends again after that is stored again.",
    )
    max_names: PositiveInt = Field(
        10_000, description="Producer names of one topic that are remembered; beyond, those that nobody uses go, oldest first."
    )


class BrokerSettings(BaseModel, frozen=True, extra="forbid"):
    """One per broker process."""

    cluster: str = Field("standalone", min_length=1, description="Name of the cluster, as the admin API shows it.")
    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0: all of them.")
    port: NonNegativeInt = Field(6650, le=65535, description="Port of the binary protocol. 0: any free one.")
    advertised_host: str | None = Field(
        None,
        description="Host that lookups tell clients. Unset: `host`, or, when that is all addresses, the one that the client "
        "reached. Set it when clients come through a proxy or a port mapping.",
    )
    advertised_port: NonNegativeInt | None = Field(
        None, le=65535, description="Port that lookups tell clients. Unset: the one listened on."
    )
    max_message_bytes: PositiveInt = Field(
        5 * MIB,
        ge=64 * KIB,
        le=128 * MIB,
        description="Largest message, told to clients when they connect. Bookies must accept entries 10 KiB larger.",
    )
    publish_buffer_bytes: PositiveInt = Field(
        128 * MIB,
        description="Bytes that all connections together may have published and not answered; then none of them is read. Below "
        "the append window of managed ledgers, so that backpressure comes before refusals.",
    )
    max_connections: PositiveInt = Field(50_000, description="Connections at one time; more are refused.")
    topic_creation: TopicCreation = TopicCreation()
    max_subscriptions_per_topic: PositiveInt = Field(10_000, description="Subscriptions of one topic.")
    request_timeout_s: PositiveFloat = Field(
        25.0,
        description="How long opening a topic, a subscription or a seek may take. Below the 30 s after which clients give up, so "
        "that they get an answer.",
    )
    topic_retry_s: PositiveFloat = Field(
        0.2, description="Pause before a topic whose ledger failed is opened again; doubles at each failure up to 10 s."
    )
    close_timeout_s: PositiveFloat = Field(10.0, description="How long an orderly stop waits for publishes under way, per topic.")
    reader_seek_grace_s: PositiveFloat = Field(
        60.0, description="How long a reader's position outlives it after a seek, so that it finds it when it subscribes again."
    )
    inactive_check_s: PositiveFloat = Field(
        60.0, description="How often open topics are looked at for those that nobody uses, where a policy has them deleted."
    )
    lease_check_s: PositiveFloat = Field(
        30.0, description="How often the leases on open topics (subscriptions by which Spark keeps what it reads) are looked at."
    )
    lease_silence_s: PositiveFloat = Field(
        180.0,
        description="How long a lease whose time is over must have been without a renewal before it is dropped. Holders renew each "
        "minute: a broker with a wrong clock takes nothing from one that lives.",
    )
    backlog_check_s: PositiveFloat = Field(
        1.0,
        description="How often open topics are looked at for messages past their time to live and backlogs above their quota. "
        "Longer: a little less work for brokers with very many topics.",
    )
    rate_window_s: PositiveFloat = Field(10.0, description="Over how long the rates in statistics are averaged.")
    connection: ConnectionSettings = ConnectionSettings()
    dispatch: DispatchSettings = DispatchSettings()
    deduplication: DeduplicationSettings = DeduplicationSettings()
    policies: PolicySettings = PolicySettings()

    @property
    def max_frame_bytes(self) -> int:
        return self.max_message_bytes + FRAME_PADDING_BYTES
