"""A cluster is founded once, by the first process; every process finds the same identity from then on.

found_cluster ──► exists? ─yes─► that one         require_cluster ──► exists? ─no─► ClusterNotFoundedError
                   └─no─► create, or lose the race and read the winner's
"""

from __future__ import annotations

from typing import ClassVar

from cepheid_metadata.cluster_records import ClusterIdentity
from cepheid_metadata.errors import KeyExistsError, MetadataError, StoreUnavailableError
from cepheid_metadata.repositories import cluster_identity, restored_record
from cepheid_metadata.store import MetadataStore
from cepheid_metadata.upgrade import begin_with_newest_format
from cepheid_ports import Ports


class ClusterNotFoundedError(MetadataError):
    """The metadata store has no cluster: a role that started on it may have the wrong address."""

    hint: ClassVar[str] = (
        "check the address and its chroot; a new cluster is created by `cepheid init --metadata URL`; if there was one, the store "
        "lost its contents: restore a backup with `cepheid metadata restore`"
    )


class OtherClusterError(MetadataError):
    """The metadata store has a cluster with another name."""

    hint: ClassVar[str] = "check the metadata address; each cluster needs a store, or a chroot, of its own"


class UnfinishedRestoreError(MetadataError):
    """A backup was restored into this store only in part."""

    hint: ClassVar[str] = "run `cepheid metadata restore` again with the same backup: it continues where it was interrupted"


async def found_cluster(store: MetadataStore, name: str, ports: Ports) -> ClusterIdentity:
    """Return the cluster's identity, created if there is none. Any number of concurrent callers get the same.

    Raises OtherClusterError, UnfinishedRestoreError.
    """
    records = cluster_identity(store)
    identity = ClusterIdentity(cluster_id=f"{ports.random.getrandbits(64):016x}", name=name, created_at_ms=ports.wall_ms())
    if await records.get(None) is None:
        if await restored_record(store).exists(None):
            raise UnfinishedRestoreError("a restore of metadata into this store was interrupted")
        try:
            await records.create(None, identity)
            await begin_with_newest_format(store)
        except KeyExistsError:
            pass  # another process founds it at the same time
        except StoreUnavailableError as error:
            if not error.outcome_unknown:
                raise
    found = await require_cluster(store)
    if found.name != name:
        raise OtherClusterError(f"the metadata store holds cluster {found.name!r}, not {name!r}", found=found.name, wanted=name)
    return found


async def require_cluster(store: MetadataStore) -> ClusterIdentity:
    """Return the cluster's identity. Raises ClusterNotFoundedError."""
    records = cluster_identity(store)
    found = await records.get(None)
    if found is None:
        await store.sync(records.key_of(None))  # a follower may lag behind the founding
        found = await records.get(None)
    if found is None:
        raise ClusterNotFoundedError("the metadata store holds no cluster")
    return found.record
