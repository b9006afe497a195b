"""Records of the cluster: its identity, tenants and namespaces with their policies, bookies and brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from cepheid_metadata.policy_records import TOPIC_POLICIES, AutoTopicCreation, TopicPolicyFields
from cepheid_metadata.record import GrownRecord, Record


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


class NamespaceRecord(TopicPolicyFields, GrownRecord):
    """Policies; None: the broker's default holds."""

    NAME: ClassVar[str] = "namespace"
    FORMAT: ClassVar[int] = 3
    ADDED: ClassVar[Mapping[str, int]] = {
        **{
            name: 2
            for name in (*TOPIC_POLICIES, "schema_auto_update", "encryption_required", "max_topics")
            if name not in ("retention", "persistence")
        },
        "offload": 3,
    }

    bundles: PositiveInt = 4
    replication_clusters: tuple[str, ...] = ()
    auto_topic_creation: AutoTopicCreation | None = None
    properties: dict[str, str] = Field(default_factory=dict)
    deleted: bool = Field(False, description="Being deleted: creates in it are refused.")
    schema_auto_update: bool | None = None
    encryption_required: bool | None = None
    max_topics: NonNegativeInt | None = None


class BookieCookie(GrownRecord):
    """Identity of a bookie and its disks, here and in each of its directories."""

    NAME: ClassVar[str] = "bookie cookie"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"limbo_below": 2}

    layout_version: PositiveInt
    bookie_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Random: a blank disk under a known id has another.")
    cluster_id: str = Field(min_length=1)
    directories: dict[str, tuple[str, ...]] = Field(description='By use: {"journal": […], "entry_log": […], "index": […]}.')
    limbo_below: PositiveInt | None = Field(
        None, description="It lost what it held of ledgers below this id (accepted empty disk)."
    )


class BookieLife(Record):
    """Counted up by the bookie, on its disks first: disks that are behind are an old copy that was put back."""

    NAME: ClassVar[str] = "bookie life"

    life: PositiveInt


class BookieRegistration(GrownRecord):
    """Ephemeral: the bookie runs. Its key says whether it takes writes."""

    NAME: ClassVar[str] = "bookie registration"
    FORMAT: ClassVar[int] = 4
    ADDED: ClassVar[Mapping[str, int]] = {"process": 2, "rack": 3, "free_bytes": 4, "total_bytes": 4}

    bookie_id: str = Field(min_length=1)
    incarnation: str
    addresses: dict[str, str] = Field(description='By protocol: {"grpc": "host:port", "http": "host:port"}.')
    process: str | None = Field(None, description="Random, of one run: tells the registration of an earlier run from this one's.")
    rack: str | None = Field(None, description="Where it runs, `region/rack` or a rack: copies are spread over racks.")
    free_bytes: NonNegativeInt | None = Field(None, description="Free space of its data disk when it last reported it.")
    total_bytes: NonNegativeInt | None = Field(None, description="Size of its data disk; 0 where the file system does not say.")


class BrokerRegistration(GrownRecord):
    """Ephemeral: the broker runs."""

    NAME: ClassVar[str] = "broker registration"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"draining": 2}

    broker_id: str = Field(min_length=1)
    addresses: dict[str, str] = Field(description='By scheme: {"pulsar": "host:port", "http": "host:port"}.')
    release: str = ""
    started_at_ms: NonNegativeInt
    draining: bool | None = Field(None, description="Gives its bundles away and takes none, until it ends or is told otherwise.")
