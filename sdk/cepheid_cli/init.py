"""`cepheid init`: founds a cluster in a metadata store. Again, and by many at once, is the same as once."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from typing import ClassVar

from cepheid_cli.log_lines import start_logging
from cepheid_ports import CepheidError, Ports

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:=-]{1,200}")


class ClusterNameError(CepheidError):
    """It would not survive URLs and metrics."""

    hint: ClassVar[str] = "letters, digits and _ . : = -, at most 200"


def run_init(metadata: str, cluster: str, service_url: str, admin_url: str, wait_s: float, auth: str | None = None) -> None:
    """Raises ClusterNameError, OtherClusterError, and what opening the store raises."""
    if not NAME_PATTERN.fullmatch(cluster):
        raise ClusterNameError(f"{cluster[:100]!r} cannot be the name of a cluster")
    start_logging(logging.WARNING)  # it may wait for the metadata store for long, and says so
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(asyncio.run(_found(metadata, cluster, service_url, admin_url, wait_s, auth)))


async def _found(metadata: str, cluster: str, service_url: str, admin_url: str, wait_s: float, auth: str | None) -> str:
    """Found the cluster; when the metadata store goes away meanwhile, wait for it and begin again, for `wait_s` altogether."""
    from cepheid_metadata import SessionLostError, StoreUnavailableError

    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return await _found_once(metadata, cluster, service_url, admin_url, max(0.0, deadline - loop.time()), auth)
        except (StoreUnavailableError, SessionLostError) as error:
            if loop.time() + _PAUSE_S >= deadline:
                raise
            log.warning("metadata.waited_for", extra={"error": str(error), "left_s": round(deadline - loop.time(), 1)})
            await asyncio.sleep(_PAUSE_S)


async def _found_once(metadata: str, cluster: str, service_url: str, admin_url: str, wait_s: float, auth: str | None) -> str:
    from cepheid_broker.first_objects import create_first_objects
    from cepheid_metadata import found_cluster
    from cepheid_metadata.patient_open import open_patiently

    ports = Ports()
    store = await open_patiently(metadata, ports, session_timeout_s=4.0, wait_s=wait_s, auth=auth)
    try:
        identity = await found_cluster(store, cluster, ports)
        await create_first_objects(
            store, cluster, admin_urls=list(filter(None, [admin_url])), service_urls=list(filter(None, [service_url]))
        )
    finally:
        await store.aclose()
    return f"cluster {identity.name} ({identity.cluster_id}) is there: start bookies and brokers"
