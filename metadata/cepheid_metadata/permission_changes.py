"""The only way to change the permissions on a namespace.

    namespace record ─┐ read
    permissions ──────┴──► change ──► one write, if neither has changed meanwhile; otherwise again

Rules
1. The write checks the version of the namespace's record. So nothing is granted in a namespace whose deletion has begun, and the
   write that deletes the namespace deletes its permissions with it.
2. Deleting a topic deletes the permissions on it, as in Pulsar: they must be granted again for a new topic of that name.
3. A namespace begins without permissions: the write that creates it deletes what an older release left under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from cepheid_metadata.errors import BadVersionError, KeyExistsError, MetadataError, NoSuchKeyError
from cepheid_metadata.permission_records import NamespacePermissions
from cepheid_metadata.repositories import namespace_permissions, namespace_records
from cepheid_metadata.store import Check, MetadataStore, Op
from cepheid_wire import TopicName

MAX_PERMISSIONS_BYTES = 500_000
"""Limit of one record: well below that of one request to ZooKeeper. Brokers read it as a whole at each change."""
_TRIES = 10


class PermissionsFullError(MetadataError):
    hint: ClassVar[str] = "grant on the namespace instead of on single topics, or spread the topics over more namespaces"


class PermissionsContendedError(MetadataError):
    """Other processes changed the record again and again."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "try again"


async def change_permissions(
    store: MetadataStore, tenant: str, namespace: str, change: Callable[[NamespacePermissions], NamespacePermissions]
) -> NamespacePermissions:
    """Store what `change` returns for the present permissions, and return it. `change` may be called again.

    Raises NoSuchKeyError (there is no such namespace), PermissionsFullError, PermissionsContendedError, and the errors of `change`.
    """
    noun = (tenant, namespace)
    namespaces, records = namespace_records(store), namespace_permissions(store)
    for _ in range(_TRIES):
        owner = await namespaces.get(noun)
        if owner is None or owner.record.deleted:
            raise NoSuchKeyError(f"namespace {tenant}/{namespace} does not exist", key=namespaces.key_of(noun))
        found = await records.get(noun)
        before = NamespacePermissions() if found is None else found.record
        after = change(before)
        if after == before:
            return before
        if (size_bytes := len(after.encode())) > MAX_PERMISSIONS_BYTES:
            message = f"the permissions on namespace {tenant}/{namespace} would have {size_bytes} bytes"
            raise PermissionsFullError(f"{message}, the limit is {MAX_PERMISSIONS_BYTES}", size_bytes=size_bytes)
        write = records.create_op(noun, after) if found is None else records.replace_op(noun, after, found.version)
        try:
            await store.multi([Check(namespaces.key_of(noun), owner.version), write])
            return after
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            continue  # another process changed one of the two records
    raise PermissionsContendedError(f"the permissions on namespace {tenant}/{namespace} were changed by others {_TRIES} times")


async def delete_topic_permissions(store: MetadataStore, topic: TopicName) -> None:
    """Delete permissions on this topic itself. Raises as `change_permissions` does, but a missing namespace is not an error."""
    name, namespace = str(topic), topic.namespace
    found = await namespace_permissions(store).get((namespace.tenant, namespace.local_name))
    if found is None or name not in found.record.topics:
        return

    def without(before: NamespacePermissions) -> NamespacePermissions:
        return before.replace(topics={other: roles for other, roles in before.topics.items() if other != name})

    with suppress(NoSuchKeyError):
        await change_permissions(store, namespace.tenant, namespace.local_name, without)


async def delete_permissions_ops(store: MetadataStore, tenant: str, namespace: str) -> list[Op]:
    """Return the operations for the write that creates or deletes the namespace; none if there are no permissions."""
    records = namespace_permissions(store)
    found = await store.get(records.key_of((tenant, namespace)))
    return [] if found is None else [records.delete_op((tenant, namespace), found.version)]
