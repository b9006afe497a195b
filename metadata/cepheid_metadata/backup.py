"""A backup of all metadata, read while the cluster runs.

    topic after topic: chain ► cursors ► ledgers named by both ► chain again: unchanged?  ──no──► this topic again
    schemas, the same way ► everything else, records before those that they refer to ► ledgers that no record names

No store can show its clients all keys at one moment. A restore is safe if everything that a record refers to is in the backup too.

Rules:
1. A topic's chain, its pages, cursors, mark and ledgers are read between two equal versions of the chain. A ledger is deleted only
   after a write of the chain that removes it, so each ledger that the chain or a cursor of the backup names is in the backup.
2. A ledger that its topic's chain does not name yet was created after the chain was read. It may have entries. The chain of the
   backup will never name it, and the owner of the restored topic would delete it as an orphan. So its record says that it
   belongs to no topic, like that of a restored ledger, and its entries stay readable by its id. A ledger of cursors
   that no cursor names yet is left out: a cursor's state is always saved as a whole.
3. A ledger is in the backup once: as a living one if it was seen living.
4. Keys of running processes are left out, and so is the record of an earlier restore.
5. A topic comes before its namespace and a namespace before its tenant, so what a topic needs existed when the topic was read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from cepheid_metadata import keys
from cepheid_metadata.backup_format import BackupEncoder
from cepheid_metadata.chain_pages import assemble, missing_page, page_keys, pages_of
from cepheid_metadata.deleted_ledgers import UNDELETED
from cepheid_metadata.errors import CorruptRecordError, MetadataError, NoSuchKeyError
from cepheid_metadata.founding import require_cluster
from cepheid_metadata.ledger_records import LedgerMetadata
from cepheid_metadata.listing import list_deleted_ledgers, list_ledgers
from cepheid_metadata.store import MetadataStore, Versioned
from cepheid_metadata.topic_records import Chain, CursorRecord
from cepheid_ports import Ports

log = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 100  # reads
_TOPICS_AT_ONCE = 20
_TRIES = 50
_REFERRING_FIRST = (keys.TOPICS_KEY, keys.NAMESPACES_KEY, keys.TENANTS_KEY)
_BY_THEMSELVES = (
    keys.CHAINS_KEY,
    keys.CURSORS_KEY,
    keys.INCARNATIONS_KEY,
    keys.SCHEMAS_KEY,
    keys.LEDGERS_KEY,
    keys.DELETED_LEDGERS_KEY,
    keys.RESTORED_KEY,
    keys.SECRETS_KEY,  # left out: brokers create new keys, and a backup is stored where others can read it
    *_REFERRING_FIRST,
    *keys.EPHEMERAL_KEYS,
)

_WITHOUT_LEDGERS = {"ledgers": (), "deletions": (), "messages": None, "offloaded": None, "object_deletions": None, "pages": None}

Entry = tuple[str, Versioned]


class BackupUnsettledError(MetadataError):
    """A topic is changed more often than it can be read."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "try again; if it persists, find out why this topic gets new ledgers or is opened so often"


@dataclass(slots=True)
class _Topic:
    """The records of one topic at one moment."""

    entries: list[Entry]
    chain: Chain | None
    """The chain; None: its record cannot be read."""
    ledgers: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class MetadataBackup:
    """One backup. Call `lines` once."""

    def __init__(self, store: MetadataStore, ports: Ports) -> None:
        self._store = store
        self._ports = ports
        self._encoder = BackupEncoder()
        self._ledgers: set[int] = set()
        self._chains: dict[str, Chain] = {}  # by incarnation; without their ledgers, to save memory

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the backup. Only a backup that is read to its end is complete.

        Raises ClusterNotFoundError before the first line; BackupUnsettledError, NewerFormatError, and the errors of the store.
        """
        identity = await require_cluster(self._store)
        await self._store.sync(keys.CLUSTER_KEY)
        yield self._encoder.head(identity.name, identity.cluster_id, self._ports.wall_ms())
        async for key, found in self._entries():
            yield self._encoder.entry(key, found)
        yield self._encoder.end()

    async def _entries(self) -> AsyncIterator[Entry]:
        async for entry in self._topics():
            yield entry
        async for key in self._walk(keys.SCHEMAS_KEY, depth=4):
            for entry in await self._schemas(key):
                yield entry
        for root in _REFERRING_FIRST:
            async for entry in self._tree(root):
                yield entry
        for name in await self._store.children("/"):
            async for entry in self._tree(f"/{name}", without=_BY_THEMSELVES):
                yield entry
        async for entry in self._unnamed_ledgers():
            yield entry
        counter = await self._store.get(keys.LEDGER_IDS_KEY)
        if counter is not None:
            yield keys.LEDGER_IDS_KEY, counter

    async def _topics(self) -> AsyncIterator[Entry]:
        async for group in _groups(self._walk(keys.CHAINS_KEY, depth=5), _TOPICS_AT_ONCE):
            for topic in await _all(self._topic(key) for key in group):
                if topic is None:
                    continue
                self._ledgers |= topic.ledgers
                if topic.chain is not None:
                    self._chains[topic.chain.incarnation] = topic.chain.replace(**_WITHOUT_LEDGERS)
                if topic.missing:
                    missing = sorted(topic.missing)
                    hint = "the cluster itself has no record of them, so their entries cannot be read"
                    log.error("backup.ledgers_missing", extra={"key": topic.entries[0][0], "ledgers": missing, "hint": hint})
                    self._encoder.missing_ledgers += missing
                for entry in topic.entries:
                    yield entry

    async def _topic(self, key: str) -> _Topic | None:
        """Read a topic at one moment (rule 1). None: the topic does not exist any more."""
        for _ in range(_TRIES):
            found = await self._store.get(key)
            if found is None:
                return None
            topic = await self._read_topic(key, found)
            if await self._store.get(key) == found:
                return topic
        raise BackupUnsettledError(f"{key} was changed {_TRIES} times while it was read", key=key)

    async def _read_topic(self, key: str, found: Versioned) -> _Topic:
        topic = _Topic([(key, found)], None)
        cursors = await self._values(f"{keys.CURSORS_KEY}{key.removeprefix(keys.CHAINS_KEY)}")
        topic.entries += cursors
        try:
            chain = await self._whole_chain(topic, key, found)
            named = {ledger.ledger_id for ledger in chain.ledgers if chain.is_on_bookies(ledger.ledger_id)}
            waiting = set(chain.deletions)
            records = [CursorRecord.decode(cursor.value, cursor_key) for cursor_key, cursor in cursors]
        except CorruptRecordError as error:  # it is kept unchanged; what it names is kept like ledgers that no record names
            if await self._store.get(key) == found:  # otherwise it is read again
                log.error("backup.record_unreadable", extra={"key": key, "error": str(error)})
            return topic
        topic.chain = chain
        named |= {cursor.cursor_ledger_id for cursor in records if cursor.cursor_ledger_id is not None}
        mark_key = keys.incarnation_key(chain.incarnation)
        mark = await self._store.get(mark_key)
        if mark is not None:
            topic.entries.append((mark_key, mark))
        read = await self._ledgers_of(sorted(named | waiting), keys.ledger_key)
        topic.entries += read.values()
        topic.ledgers = set(read)
        topic.missing = named - topic.ledgers
        return topic

    async def _whole_chain(self, topic: _Topic, key: str, found: Versioned) -> Chain:
        """Return the chain with the ledgers of its pages, which are added to the topic's entries. Raises CorruptRecordError."""
        try:
            record = Chain.decode(found.value, key)
        except CorruptRecordError:
            topic.entries += await self._values(key)  # they are kept unchanged, too
            raise
        if not record.pages:
            return record
        topic.entries += (there := await self._values(key))
        values = {page_key: page.value for page_key, page in there}
        pages = pages_of(record, key, [values.get(page_key) for page_key in page_keys(record, key)])
        if pages is None:
            raise missing_page(record, key)
        return assemble(record, pages, key).chain

    async def _schemas(self, key: str) -> list[Entry]:
        """Read the schema history of a topic and its definitions at one moment: each change of them changes the history."""
        for _ in range(_TRIES):
            found = await self._store.get(key)
            if found is None:
                return []
            entries = [(key, found), *await self._values(key)]
            if await self._store.get(key) == found:
                return entries
        raise BackupUnsettledError(f"{key} was changed {_TRIES} times while it was read", key=key)

    async def _unnamed_ledgers(self) -> AsyncIterator[Entry]:
        """Yield ledgers that no record names (rules 2 and 3). The living are listed twice: one may be undeleted between the
        listings."""
        deleted: set[int] = set()
        for listed, key_of in (
            (list_ledgers, keys.ledger_key),
            (list_deleted_ledgers, keys.deleted_ledger_key),
            (list_ledgers, keys.ledger_key),
        ):
            async for ids in _groups(listed(self._store), _AT_ONCE):
                new = [ledger_id for ledger_id in ids if ledger_id not in self._ledgers and ledger_id not in deleted]
                read = await self._ledgers_of(new, key_of)  # without those that are moved to the other tree at this moment
                if listed is list_deleted_ledgers:
                    deleted |= read.keys()
                    for entry in read.values():
                        yield entry
                    continue
                self._ledgers |= read.keys()
                for key, found in read.values():
                    if (kept := self._unnamed(key, found)) is not None:
                        yield key, kept

    def _unnamed(self, key: str, found: Versioned) -> Versioned | None:
        try:
            ledger = LedgerMetadata.decode(found.value, key)
        except CorruptRecordError as error:
            log.error("backup.record_unreadable", extra={"key": key, "error": str(error)})
            return found
        chain = self._chains.get(ledger.custom.get("incarnation", ""))
        epoch = ledger.custom.get("epoch", "")
        if chain is None or UNDELETED in ledger.custom or not epoch.isdecimal() or int(epoch) < chain.epoch:
            return found
        if ledger.custom.get("use") == "cursors":
            return None
        kept = ledger.replace(custom={**ledger.custom, UNDELETED: str(self._ports.wall_ms())})
        return Versioned(kept.encode(), found.version)

    async def _ledgers_of(self, ledger_ids: Sequence[int], key_of: Callable[[int], str]) -> dict[int, Entry]:
        found = dict(await self._read([key_of(ledger_id) for ledger_id in ledger_ids]))
        return {ledger_id: (key, found[key]) for ledger_id in ledger_ids if (key := key_of(ledger_id)) in found}

    async def _tree(self, root: str, without: Sequence[str] = ()) -> AsyncIterator[Entry]:
        """Yield all records at and below `root`, each before those below it."""
        pending = [root]
        while pending:
            group = [key for key in pending[-_AT_ONCE:] if key not in without]
            del pending[-_AT_ONCE:]
            for entry in await self._read(group):
                if entry[1].value:
                    yield entry
            for key, names in zip(group, await _all(map(self._children, group)), strict=True):
                pending += [f"{key}/{name}" for name in names]

    async def _walk(self, root: str, *, depth: int) -> AsyncIterator[str]:
        """Yield all keys that are `depth` segments below `root`."""
        pending = [(root, depth)]
        while pending:
            key, left = pending.pop()
            if not left:
                yield key
                continue
            pending += [(f"{key}/{name}", left - 1) for name in await self._children(key)]

    async def _values(self, parent: str) -> list[Entry]:
        return await self._read([f"{parent}/{name}" for name in await self._children(parent)])

    async def _children(self, key: str) -> list[str]:
        try:
            return await self._store.children(key)
        except NoSuchKeyError:
            return []

    async def _read(self, wanted: Sequence[str]) -> list[Entry]:
        """Return the records of the existing keys among these, in the same order."""
        entries: list[Entry] = []
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            found = await _all(map(self._store.get, part))
            entries += [(key, one) for key, one in zip(part, found, strict=True) if one is not None]
        return entries


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all of them as `asyncio.gather` does; if one fails, the others are cancelled."""

    async def run(one: Awaitable[T]) -> T:
        return await one

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(one)) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _groups(items: AsyncIterator[T], size: int) -> AsyncIterator[list[T]]:
    group: list[T] = []
    async for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
