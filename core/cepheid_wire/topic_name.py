"""Names of topics and namespaces: parsed and checked once, when they arrive.

    persistent://public/default/orders-partition-3
    └─ domain    └─ namespace   └─ local name, here of partition 3 of `orders`

Short forms that users may write: `x` is persistent://public/default/x, and `t/ns/x` is persistent://t/ns/x (protocol.md §6).
Names with a cluster in them (four parts), which Pulsar itself no longer uses, are rejected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cepheid_wire.errors import InvalidTopicNameError

PERSISTENT = "persistent"
NON_PERSISTENT = "non-persistent"
DOMAINS = (PERSISTENT, NON_PERSISTENT)

MAX_NAME_BYTES = 1024  # of the full name: it becomes a key in metadata and part of listings of limited size
PARTITION_MARK = "-partition-"
PATH_STEPS = (".", "..")
"""No tenant, namespace or topic has such a name: HTTP clients and proxies resolve them, so the path would mean another object."""

_ENTITY = re.compile(r"[-=:.A-Za-z0-9_]+")  # tenants and namespaces, as C++ clients allow (NamedEntity.cc)
_PARTITION_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_WHY_NO_PATH_STEP = "`.` and `..` cannot be names, choose another one"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PARTITION_SUFFIX = re.compile(r"(?:-partition-[0-9]+)+\Z")
_MAX_PARTITION_INDEX = (1 << 31) - 1  # MessageIdData.partition is an int32


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """`tenant/namespace`."""

    tenant: str
    local_name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.local_name}"

    @classmethod
    def parse(cls, name: str) -> NamespaceName:
        """Raises InvalidTopicNameError."""
        parts = name.split("/")
        if len(parts) != 2:
            raise InvalidTopicNameError(f"namespace {_shown(name)} is not tenant/namespace", name=_shown(name))
        return cls(_entity("tenant", parts[0], name), _entity("namespace", parts[1], name))


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """A topic; `str()` is its full name. Use `parse` to create one: the constructor does not check anything."""

    domain: str
    namespace: NamespaceName
    local_name: str

    def __str__(self) -> str:
        return f"{self.domain}://{self.namespace}/{self.local_name}"

    @classmethod
    def parse(cls, name: str) -> TopicName:
        """Parse a full or short name. Raises InvalidTopicNameError."""
        domain, separator, path = name.partition("://")
        if separator:
            parts = path.split("/")
        else:
            domain, parts = PERSISTENT, name.split("/")
            if len(parts) == 1:
                parts = ["public", "default", name]
        if domain not in DOMAINS:
            raise InvalidTopicNameError(
                f"topic {_shown(name)}: domain {_shown(domain)} is neither persistent nor non-persistent",
                name=_shown(name),
            )
        if len(parts) == 4:
            raise InvalidTopicNameError(
                f"topic {_shown(name)} has four parts; names with a cluster (tenant/cluster/namespace/topic) are not served",
                name=_shown(name),
            )
        if len(parts) != 3:
            raise InvalidTopicNameError(
                f"topic {_shown(name)} has {len(parts)} parts, not tenant/namespace/topic", name=_shown(name)
            )
        tenant, namespace, local_name = parts
        topic = cls(
            domain,
            NamespaceName(_entity("tenant", tenant, name), _entity("namespace", namespace, name)),
            _local_name(local_name, name),
        )
        if _utf8_bytes(str(topic)) > MAX_NAME_BYTES:
            raise InvalidTopicNameError(f"topic {_shown(name)}: its name is longer than {MAX_NAME_BYTES} bytes", name=_shown(name))
        return topic

    @property
    def tenant(self) -> str:
        return self.namespace.tenant

    @property
    def is_persistent(self) -> bool:
        return self.domain == PERSISTENT

    @property
    def partition_index(self) -> int:
        """Index of a partition, -1 for any other topic: `x-partition-01`, `x-partition-` and `-partition-1` are not partitions."""
        base, mark, index = self.local_name.rpartition(PARTITION_MARK)
        if not (mark and base and _PARTITION_INDEX.fullmatch(index)):
            return -1
        return int(index) if int(index) <= _MAX_PARTITION_INDEX else -1

    @property
    def is_partition(self) -> bool:
        return self.partition_index >= 0

    @property
    def base(self) -> TopicName:
        """The partitioned topic that this topic is a partition of; any other topic returns itself."""
        if not self.is_partition:
            return self
        return replace(self, local_name=self.local_name.rpartition(PARTITION_MARK)[0])

    def partition(self, index: int) -> TopicName:
        """Return partition `index` of this topic. Raises InvalidTopicNameError if this is a partition itself."""
        assert 0 <= index <= _MAX_PARTITION_INDEX, f"partition {index} of {self}"
        if self.is_partition:
            raise InvalidTopicNameError(f"topic {self} is a partition and cannot have partitions", name=str(self))
        return replace(self, local_name=f"{self.local_name}{PARTITION_MARK}{index}")


def check_tenant(name: str) -> str:
    """Return `name` if it may be the name of a tenant. Raises InvalidTopicNameError."""
    return _entity("tenant", name, name)


def _entity(kind: str, value: str, name: str) -> str:
    if not _ENTITY.fullmatch(value):
        why = f"its {kind} is empty" if not value else f"its {kind} may have only letters, digits and -=:._"
        raise InvalidTopicNameError(f"{_shown(name)}: {why}", name=_shown(name))
    if value in PATH_STEPS:
        raise InvalidTopicNameError(f"{_shown(name)}: its {kind} is {value!r}; {_WHY_NO_PATH_STEP}", name=_shown(name))
    return value


def _local_name(value: str, name: str) -> str:
    if not value:
        raise InvalidTopicNameError(f"topic {_shown(name)}: its last part is empty", name=_shown(name))
    if _CONTROL.search(value):
        raise InvalidTopicNameError(f"topic {_shown(name)} has a control character", name=_shown(name))
    if _PARTITION_SUFFIX.sub("", value) in PATH_STEPS:  # also of a partition, because its partitioned topic could not exist
        raise InvalidTopicNameError(f"topic {_shown(name)}: its last part is {value!r}; {_WHY_NO_PATH_STEP}", name=_shown(name))
    return value


def _utf8_bytes(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        raise InvalidTopicNameError(f"topic {_shown(name)} is not UTF-8", name=_shown(name)) from None


def _shown(name: str) -> str:
    """Return the name limited in length and printable, for messages and logs."""
    return ascii(name if len(name) <= 200 else name[:200] + "…")
