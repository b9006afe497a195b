"""The storage format of a cluster: what its bookies may write to their disks, and what its brokers may answer.

    release that knows format 2, in a cluster of format 1: reads both, writes 1
        every bookie runs it ──finish_upgrade──► format 2: each bookie writes 2 from its next start on, and no older release
                                                           can read its disks from then on
    a new cluster begins with the newest format

Rules:
1. Without a record the format is 1: an older release founded the cluster.
2. The format never falls. A release that does not know it refuses to start (NewerStorageFormatError).
3. A bookie reports which format it knows, with the random id of its process, which its registration has as well. A registration
without such a report is of an older release. The report is persistent: an older release ignores it, the next process replaces it.
Brokers report it with the time of their start (process_reports.py).
4. Processes that do not run do not count: an older release that is started on such a disk finds what it wrote itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from cepheid_metadata import keys
from cepheid_metadata.errors import BadVersionError, KeyExistsError, MetadataError, NoSuchKeyError
from cepheid_metadata.listing import list_names
from cepheid_metadata.process_reports import running_brokers
from cepheid_metadata.record import Record
from cepheid_metadata.repositories import Records, available_bookies, readonly_bookies
from cepheid_metadata.store import MetadataStore

OLDEST_STORAGE_FORMAT = 1
NEWEST_STORAGE_FORMAT = 3
"""2: the journal's segments are of format 2 (cepheid_bookie/journal_format.py).
3: with security, plans have signed tickets instead of master keys (cepheid_broker/admin/plan.py); backlog quotas keep the limit of
the other type (cepheid_broker/admin/backlog_quotas.py)."""
SIGNED_TICKETS_SINCE = 3


class StorageFormat(Record):
    """The format that bookies of this cluster may write. Absent: the oldest."""

    NAME: ClassVar[str] = "storage format"

    storage_format: PositiveInt


class KnownFormat(Record):
    """The newest format that one process of a bookie knows."""

    NAME: ClassVar[str] = "known storage format"

    storage_format: PositiveInt
    process: str


class NewerStorageFormatError(MetadataError):
    """The cluster's upgrade was finished by a newer release."""

    hint: ClassVar[str] = "start a newer release: after `cepheid cluster finish-upgrade` there is no way back to an older one"


class UpgradeNotPossibleError(MetadataError):
    """Processes of an older release still run."""

    hint: ClassVar[str] = "start the new release for all brokers and bookies, then run `cepheid cluster finish-upgrade` again"


@dataclass(frozen=True, slots=True)
class UpgradeState:
    """The progress of an upgrade."""

    storage_format: int
    newest: int
    older: tuple[str, ...]
    """Running bookies and brokers that do not know the newest format."""


def storage_format_record(store: MetadataStore) -> Records[None, StorageFormat]:
    """Return the record of the format: there is one, with the noun None."""
    return Records(store, lambda _: keys.STORAGE_FORMAT_KEY, StorageFormat)


def known_formats(store: MetadataStore) -> Records[str, KnownFormat]:
    """Return the known formats by bookie id."""
    return Records(store, keys.known_format_key, KnownFormat)


async def begin_with_newest_format(store: MetadataStore) -> None:
    """Call this once, after founding a cluster. After a crash in between, the cluster begins with the oldest format."""
    try:
        await storage_format_record(store).create(None, StorageFormat(storage_format=NEWEST_STORAGE_FORMAT))
    except KeyExistsError:
        pass  # an earlier attempt, whose answer was lost


async def read_storage_format(store: MetadataStore) -> int:
    """Return the format that bookies may write. Raises NewerStorageFormatError if this release does not know it."""
    await store.sync(keys.STORAGE_FORMAT_KEY)
    found = await storage_format_record(store).get(None)
    storage_format = OLDEST_STORAGE_FORMAT if found is None else found.record.storage_format
    if storage_format > NEWEST_STORAGE_FORMAT:
        message = f"the cluster has storage format {storage_format}; this release knows formats up to {NEWEST_STORAGE_FORMAT}"
        raise NewerStorageFormatError(message, storage_format=storage_format)
    return storage_format


async def report_known_format(store: MetadataStore, bookie_id: str, process: str) -> None:
    """Call this before the bookie registers with this process id (rule 3)."""
    records, record = known_formats(store), KnownFormat(storage_format=NEWEST_STORAGE_FORMAT, process=process)
    while True:
        found = await records.get(bookie_id)
        try:
            if found is None:
                await records.create(bookie_id, record)
            elif found.record != record:
                await records.replace(bookie_id, record, found.version)
            return
        except (KeyExistsError, BadVersionError, NoSuchKeyError):
            continue  # an earlier process of this bookie that is about to end


async def upgrade_state(store: MetadataStore) -> UpgradeState:
    """Return the progress of the upgrade. Raises NewerStorageFormatError, and the errors of unreadable registrations."""
    current = await read_storage_format(store)
    older: list[str] = []
    for parent_key, places in (
        (keys.AVAILABLE_BOOKIES_KEY, available_bookies(store)),
        (keys.READONLY_BOOKIES_KEY, readonly_bookies(store)),
    ):
        for name in await list_names(store, parent_key):
            registered, known = await places.get(name), await known_formats(store).get(name)
            if registered is None:
                continue  # it ended, or moved to the other place
            is_new = known is not None and known.record.process == (registered.record.process or "")
            if known is None or not is_new or known.record.storage_format < NEWEST_STORAGE_FORMAT:
                older.append(name)
    brokers = await running_brokers(store)
    older += [name for name, report in brokers.items() if report is None or report.storage_format < NEWEST_STORAGE_FORMAT]
    return UpgradeState(current, NEWEST_STORAGE_FORMAT, tuple(sorted(set(older))))


async def finish_upgrade(store: MetadataStore) -> UpgradeState:
    """Let bookies write the newest format from their next start on; return the state before. Idempotent.

    Raises UpgradeNotPossibleError, and the errors of `upgrade_state`.
    """
    state = await upgrade_state(store)
    if state.storage_format == state.newest:
        return state
    if state.older:
        message = f"{', '.join(state.older)} {'runs' if len(state.older) == 1 else 'run'} an older release"
        raise UpgradeNotPossibleError(message, bookies=state.older)
    records, record = storage_format_record(store), StorageFormat(storage_format=state.newest)
    found = await records.get(None)
    if found is None:
        await records.create(None, record)
    else:
        await records.replace(None, record, found.version)
    return state
