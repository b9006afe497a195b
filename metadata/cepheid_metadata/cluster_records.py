"""Records of the cluster: its identity, tenants and namespaces with their policies, bookies and brokers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.policy_records import (
    OTHER_QUOTA_LIMITS,
    TOPIC_POLICIES,
    AutoTopicCreation,
    OtherQuotaLimits,
    TopicPolicyFields,
)
from cepheid_metadata.record import GrownRecord, Record

_LARGEST_HASH = 0xFFFFFFFF


class ClusterIdentity(Record):
    """The identity of a cluster, created once. Bookies' cookies carry its id, so that a directory of another cluster is refused."""

    NAME: ClassVar[str] = "cluster identity"

    cluster_id: str = Field(min_length=1, description="Random.")
    name: str = Field(min_length=1)
    created_at_ms: NonNegativeInt


class ClusterRecord(Record):
    """The addresses of a cluster. Empty: not served."""

    NAME: ClassVar[str] = "cluster"

    service_url: str = ""
    service_url_tls: str = ""
    broker_service_url: str = ""
    broker_service_url_tls: str = ""


class TenantRecord(Record):
    NAME: ClassVar[str] = "tenant"

    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


class NamespaceRecord(TopicPolicyFields, OtherQuotaLimits, GrownRecord):
    """A namespace and its policies; None: the broker's default applies."""

    NAME: ClassVar[str] = "namespace"
    FORMAT: ClassVar[int] = 5
    ADDED: ClassVar[Mapping[str, int]] = {
        **{
            name: 2
            for name in (*TOPIC_POLICIES, "schema_auto_update", "encryption_required", "max_topics")
            if name not in ("retention", "persistence")
        },
        "offload": 3,
        "bundle_starts": 4,
        **dict.fromkeys(OTHER_QUOTA_LIMITS, 5),
    }

    bundles: PositiveInt = Field(4, description="Number of bundles.")
    bundle_starts: tuple[NonNegativeInt, ...] | None = Field(
        None, description="First hash of each bundle, once one was split. None: they are equal ranges."
    )
    replication_clusters: tuple[str, ...] = ()
    auto_topic_creation: AutoTopicCreation | None = None
    properties: dict[str, str] = Field(default_factory=dict)
    deleted: bool = Field(False, description="The namespace is being deleted: nothing can be created in it.")
    schema_auto_update: bool | None = None
    encryption_required: bool | None = None
    max_topics: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _check_bundles(self) -> Self:
        starts = self.bundle_starts
        if starts is not None:
            ascends = all(before < after for before, after in pairwise(starts))
            if len(starts) != self.bundles or starts[0] != 0 or starts[-1] > _LARGEST_HASH or not ascends:
                raise ValueError(f"bundle_starts must be {self.bundles} hashes that begin with 0 and ascend, got {starts[:10]}")
        return self


class BookieCookie(GrownRecord):
    """Identity of a bookie and its disks, here and in each of its directories."""

    NAME: ClassVar[str] = "bookie cookie"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"limbo_below": 2}

    layout_version: PositiveInt
    bookie_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Random: a blank disk under a known id has a different one.")
    cluster_id: str = Field(min_length=1)
    directories: dict[str, tuple[str, ...]] = Field(description='By use: {"journal": […], "entry_log": […], "index": […]}.')
    limbo_below: PositiveInt | None = Field(
        None, description="The bookie lost its entries of ledgers below this id (accepted empty disk)."
    )


class BookieLife(Record):
    """A counter that the bookie increments, on its disks first: disks that are behind are an old copy that was put back."""

    NAME: ClassVar[str] = "bookie life"

    life: PositiveInt


class DecommissionedBookie(Record):
    """A bookie that was emptied and has ended, until one with the same name starts: no ledger needs its directories."""

    NAME: ClassVar[str] = "decommissioned bookie"

    bookie_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Incarnation in its cookie: other directories of this bookie may be needed.")
    at_ms: NonNegativeInt


class BookieRegistration(GrownRecord):
    """Ephemeral: the bookie runs. Its key shows whether it accepts writes."""

    NAME: ClassVar[str] = "bookie registration"
    FORMAT: ClassVar[int] = 4
    ADDED: ClassVar[Mapping[str, int]] = {"process": 2, "rack": 3, "free_bytes": 4, "total_bytes": 4}

    bookie_id: str = Field(min_length=1)
    incarnation: str
    addresses: dict[str, str] = Field(description='By protocol: {"grpc": "host:port", "http": "host:port"}.')
    process: str | None = Field(None, description="Random, for one run: identifies the registration of an earlier run.")
    rack: str | None = Field(None, description="Where it runs, `region/rack` or a rack: copies are spread over racks.")
    free_bytes: NonNegativeInt | None = Field(None, description="Free space of its data disk when it last reported it.")
    total_bytes: NonNegativeInt | None = Field(None, description="Size of its data disk; 0 if the file system does not report it.")


class BrokerRegistration(GrownRecord):
    """Ephemeral: the broker runs."""

    NAME: ClassVar[str] = "broker registration"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"draining": 2}

    broker_id: str = Field(min_length=1)
    addresses: dict[str, str] = Field(description='By scheme: {"pulsar": "host:port", "http": "host:port"}.')
    release: str = ""
    started_at_ms: NonNegativeInt
    draining: bool | None = Field(None, description="It gives its bundles away and takes none, until it ends or this is cancelled.")
