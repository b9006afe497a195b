"""`cepheid init`: creates a cluster in a metadata store. It may be repeated, also concurrently, without effect.

A metadata store that lost its contents looks like a new one. If the data of a bookie is available, its stamp distinguishes them: no
cluster is created beside data of another one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cepheid_cli.log_lines import start_logging
from cepheid_ports import CepheidError, Ports

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_SAY_EVERY_S = 30.0
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:=-]{1,200}")


class ClusterNameError(CepheidError):
    """The name would not be valid in URLs and metrics."""

    hint: ClassVar[str] = "letters, digits and _ . : = -, at most 200"


class ClusterLostError(CepheidError):
    """A bookie has data of a cluster that is not in the metadata store."""

    hint: ClassVar[str] = (
        "check the metadata address; if the store lost its contents, restore a backup with `cepheid metadata restore`; only to "
        "give up all data, empty the directories of every bookie"
    )


@dataclass(frozen=True, slots=True)
class Founding:
    """What to create, and the conditions for it."""

    metadata: str
    cluster: str
    service_url: str = ""
    admin_url: str = ""
    auth: str | None = None
    join: bool = False
    """Wait for a cluster that another process creates."""
    data_dir: Path | None = None
    """Data directory of a bookie, which may not exist yet."""


def run_init(founding: Founding, wait_s: float) -> None:
    """Create the cluster.

    Raises ClusterNameError, OtherClusterError, ClusterLostError, NewerStorageFormatError, and store errors.
    """
    if not NAME_PATTERN.fullmatch(founding.cluster):
        raise ClusterNameError(f"{founding.cluster[:100]!r} is not a valid name of a cluster")
    start_logging(logging.WARNING)  # it may wait long for the metadata store, and logs that
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(asyncio.run(_found(founding, wait_s)))


async def _found(founding: Founding, wait_s: float) -> str:
    """Create the cluster; if the metadata store becomes unavailable, wait for it and begin again, for `wait_s` in total."""
    from cepheid_metadata import ClusterNotFoundedError, SessionLostError, StoreUnavailableError

    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    said: dict[type[Exception], float] = {}
    while True:
        try:
            return await _found_once(founding, max(0.0, deadline - loop.time()))
        except (ClusterNotFoundedError, StoreUnavailableError, SessionLostError) as error:
            if loop.time() + _PAUSE_S >= deadline:
                raise
            if loop.time() - said.get(type(error), -_SAY_EVERY_S) >= _SAY_EVERY_S:
                said[type(error)] = loop.time()
                log.warning("metadata.waited_for", extra={"error": str(error), "left_s": round(deadline - loop.time(), 1)})
            await asyncio.sleep(_PAUSE_S)


async def _found_once(founding: Founding, wait_s: float) -> str:
    from cepheid_bookie.cookie import stamped_cluster
    from cepheid_broker.first_objects import create_first_objects
    from cepheid_metadata import cluster_identity, found_cluster, keys, require_cluster
    from cepheid_metadata.patient_open import open_patiently
    from cepheid_metadata.upgrade import read_storage_format

    ports = Ports()
    store = await open_patiently(founding.metadata, ports, session_timeout_s=4.0, wait_s=wait_s, auth=founding.auth)
    try:
        stamped = None if founding.data_dir is None else stamped_cluster(founding.data_dir)
        if stamped is not None:
            await store.sync(keys.CLUSTER_KEY)
            found = await cluster_identity(store).get(None)
            if found is None or found.record.cluster_id != stamped:
                held = "no cluster" if found is None else f"cluster {found.record.cluster_id}"
                message = f"{founding.data_dir} has data of cluster {stamped}, and {founding.metadata} holds {held}"
                raise ClusterLostError(f"{message}: no cluster was created", stamped=stamped)
        if founding.join:
            await require_cluster(store)
        identity = await found_cluster(store, founding.cluster, ports)
        await read_storage_format(store)  # an older release could not start on a cluster whose upgrade is finished
        await create_first_objects(
            store,
            founding.cluster,
            admin_urls=list(filter(None, [founding.admin_url])),
            service_urls=list(filter(None, [founding.service_url])),
        )
    finally:
        await store.aclose()
    return f"cluster {identity.name} ({identity.cluster_id}) is ready: start bookies and brokers"
