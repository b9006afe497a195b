"""Reports of running processes about themselves: the storage format that they know, and how they are secured.

    broker, bookie ── after its registration ──► report, persistent, with the id of the process
                                                     └── read together with the registration: a report of another process does
                                                         not count, so an older release, which does not report, is noticed

`cepheid cluster finish-upgrade` and `cepheid secure enable` continue only if every running process has reported what they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt

from cepheid_metadata import keys
from cepheid_metadata.cluster_records import BookieRegistration, BrokerRegistration
from cepheid_metadata.errors import BadVersionError, KeyExistsError, NoSuchKeyError
from cepheid_metadata.listing import list_names
from cepheid_metadata.record import GrownRecord, RecordPart
from cepheid_metadata.repositories import Records, available_bookies, broker_records, readonly_bookies
from cepheid_metadata.store import MetadataStore


class SecurityFacts(RecordPart):
    """How a process is secured. Fields that do not apply to its kind are False."""

    zookeeper_user: bool = False
    """It authenticates in ZooKeeper."""
    zookeeper_private: bool = False
    """Only this user can access what it creates there."""
    tls: bool = False
    """It has ports with TLS."""
    plain: bool = False
    """It has ports without TLS."""
    authentication: bool = False
    """Clients must authenticate."""
    anonymous: bool = False
    """Clients without credentials are served under a role of their own."""
    authorization: bool = False
    """Permissions are checked."""
    enforced: bool = False
    """What is not permitted is denied."""


class ProcessReport(GrownRecord):
    """The report of one process when it started."""

    NAME: ClassVar[str] = "process report"
    FORMAT: ClassVar[int] = 3
    ADDED: ClassVar[Mapping[str, int]] = {"zookeeper_tls": 2, "revocation_lists": 3}

    process: str
    storage_format: PositiveInt
    security: SecurityFacts = SecurityFacts()
    zookeeper_tls: bool | None = None
    """Whether it uses TLS to ZooKeeper. None: it does not, or is of an older release, which cannot read reports with this field."""
    revocation_lists: bool | None = None
    """Whether it looks certificates of clients up in revocation lists. None: it does not, or is of an older release, as above."""


def broker_reports(store: MetadataStore) -> Records[str, ProcessReport]:
    """Return the reports of brokers by id."""
    return Records(store, keys.broker_report_key, ProcessReport)


def bookie_reports(store: MetadataStore) -> Records[str, ProcessReport]:
    """Return the reports of bookies by id."""
    return Records(store, keys.bookie_report_key, ProcessReport)


def broker_process(registration: BrokerRegistration) -> str:
    """Return the id of a broker's process: a registration has none, but no two processes of a broker start at the same time."""
    return str(registration.started_at_ms)


async def report(records: Records[str, ProcessReport], name: str, own: ProcessReport) -> None:
    """Replace the report of an earlier process by this one's."""
    while True:
        found = await records.get(name)
        try:
            if found is None:
                await records.create(name, own)
            elif found.record != own:
                await records.replace(name, own, found.version)
            return
        except (KeyExistsError, BadVersionError, NoSuchKeyError):
            continue  # an earlier process of this name that is about to end


async def report_of(records: Records[str, ProcessReport], name: str, process: str) -> ProcessReport | None:
    """Return the report of this process; None: there is none, so it is of an older release, or has just started."""
    found = await records.get(name)
    return found.record if found is not None and found.record.process == process else None


async def running_brokers(store: MetadataStore) -> dict[str, ProcessReport | None]:
    """Return the running brokers, with their reports."""
    found: dict[str, ProcessReport | None] = {}
    for name in await list_names(store, keys.BROKERS_KEY):
        registered = await broker_records(store).get(name)
        if registered is not None:
            found[name] = await report_of(broker_reports(store), name, broker_process(registered.record))
    return found


async def running_bookies(store: MetadataStore) -> dict[str, ProcessReport | None]:
    """Return the running bookies, with their reports."""
    found: dict[str, ProcessReport | None] = {}
    for parent_key, places in (
        (keys.AVAILABLE_BOOKIES_KEY, available_bookies(store)),
        (keys.READONLY_BOOKIES_KEY, readonly_bookies(store)),
    ):
        for name in await list_names(store, parent_key):
            registered = await places.get(name)
            if registered is not None:
                found[name] = await report_of(bookie_reports(store), name, _bookie_process(registered.record))
    return found


def _bookie_process(registration: BookieRegistration) -> str:
    return registration.process or ""
