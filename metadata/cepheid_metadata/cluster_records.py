"""Records of the cluster: its identity, tenants and namespaces with their policies, bookies and brokers."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.record import Record, RecordPart


class ClusterIdentity(Record):
    """Made once. Bookies' cookies carry the id, so that a directory of another cluster is refused."""

    NAME: ClassVar[str] = "cluster identity"

    cluster_id: str = Field(min_length=1, description="Random.")
    name: str = Field(min_length=1)
    created_at_ms: NonNegativeInt


class ClusterRecord(Record):
    """Where a cluster is reached. Empty: not served."""

    NAME: ClassVar[str] = "cluster"

    service_url: str = ""
    service_url_tls: str = ""
    broker_service_url: str = ""
    broker_service_url_tls: str = ""


class TenantRecord(Record):
    NAME: ClassVar[str] = "tenant"

    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


class RetentionPolicy(RecordPart):
    """What is kept of data that every subscription has acknowledged: within the time *and* the size. -1: no limit."""

    time_limit_min: int = Field(ge=-1)
    size_limit_mb: int = Field(ge=-1)


class PersistencePolicy(RecordPart):
    ensemble_size: PositiveInt
    write_quorum: PositiveInt
    ack_quorum: PositiveInt
    max_mark_delete_rate_per_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            sizes = f"E {self.ensemble_size}, Qw {self.write_quorum}, Qa {self.ack_quorum}"
            raise ValueError(f"{sizes}: E >= Qw >= Qa does not hold")
        return self


class AutoTopicCreation(RecordPart):
    """A namespace's own answer to "may a client create a topic by using it?"."""

    allowed: bool
    topic_type: Literal["partitioned", "non-partitioned"] = "non-partitioned"
    partitions: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allowed and (self.topic_type == "partitioned") != (self.partitions is not None):
            raise ValueError("partitions are given exactly when created topics are partitioned")
        return self


class NamespaceRecord(Record):
    """Policies; None: the broker's default holds."""

    NAME: ClassVar[str] = "namespace"

    bundles: PositiveInt = 4
    replication_clusters: tuple[str, ...] = ()
    retention: RetentionPolicy | None = None
    persistence: PersistencePolicy | None = None
    auto_topic_creation: AutoTopicCreation | None = None
    properties: dict[str, str] = Field(default_factory=dict)
    deleted: bool = Field(False, description="Being deleted: creates in it are refused.")


class BookieCookie(Record):
    """Identity of a bookie and its disks, here and in each of its directories."""

    NAME: ClassVar[str] = "bookie cookie"

    layout_version: PositiveInt
    bookie_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Random: a blank disk under a known id has another.")
    cluster_id: str = Field(min_length=1)
    directories: dict[str, tuple[str, ...]] = Field(description='By use: {"journal": […], "entry_log": […], "index": […]}.')


class BookieRegistration(Record):
    """Ephemeral: the bookie runs. Its key says whether it takes writes."""

    NAME: ClassVar[str] = "bookie registration"

    bookie_id: str = Field(min_length=1)
    incarnation: str
    addresses: dict[str, str] = Field(description='By protocol: {"grpc": "host:port", "http": "host:port"}.')


class BrokerRegistration(Record):
    """Ephemeral: the broker runs."""

    NAME: ClassVar[str] = "broker registration"

    broker_id: str = Field(min_length=1)
    addresses: dict[str, str] = Field(description='By scheme: {"pulsar": "host:port", "http": "host:port"}.')
    release: str = ""
    started_at_ms: NonNegativeInt
