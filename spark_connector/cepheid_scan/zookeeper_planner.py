"""Plans from ZooKeeper itself, for readers with access to it: from the same records as brokers, without opening topics.

    chains, ledgers, registrations ──a group of reads together──► typed records ──► histories
    open ledger ──► LAC of all bookies of its last fragment ──► its end

A topic that lost its broker ends at the last LAC known to a bookie; later entries appear when the next owner recovers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cepheid_decode.errors import BadOptionError, PlanUnavailableError
from cepheid_decode.history import Fragment, HistoryPlan, LedgerHistory, SchemaVersion, TopicHistory
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import PlanSource, TopicSelection
from cepheid_ledger import master_key_of, readable_end
from cepheid_metadata import (
    BookieRegistration,
    Chain,
    ChainLedger,
    CursorRecord,
    DeletedLedger,
    LedgerMetadata,
    MetadataError,
    OffloadedLedger,
    SchemaDefinition,
    SchemaHistory,
    TopicRecord,
    keys,
)
from cepheid_metadata.chain_pages import assemble, missing_page, page_keys, pages_of
from cepheid_metadata.secret_records import TicketKeys
from cepheid_rpc import bookie_address
from cepheid_scan.ledger_ends import LacCalls, LedgerEnd, newest_ends
from cepheid_scan.planner import no_such_topics, parse_topic, selected
from cepheid_scan.zookeeper_reads import ZooKeeperReads
from cepheid_security import ClientTls
from cepheid_security.read_tickets import LAST_ENTRY, ReadTicket, TicketKey, sign_ticket, signing_key
from cepheid_wire import PERSISTENT, NamespaceName, TopicName

_ATTEMPTS = 3  # to read a chain that is being trimmed
_LAC_TIMEOUT_S = 5.0
_PAUSE_S = 0.5
TICKET_ROLE = "zookeeper-reader"
_TICKET_LIFE_MS = 3_600_000
_IDS_PER_PARENT, _MOST_ID_PARENTS = 10_000, 20  # keys of ledgers end with four digits
_VERSION_BYTES = 8  # of a schema version, as in entries


class ZooKeeperPlanner:
    def __init__(self, source: PlanSource) -> None:
        self._reads = ZooKeeperReads(source)
        self._lac_calls = LacCalls(source.tls)
        self._has_certificate = (source.tls or ClientTls.from_environment()).certificate_file is not None
        self._retry_s = source.retry_s
        self._closed_ledgers: dict[int, LedgerMetadata] = {}
        if self._reads.values([keys.CLUSTER_KEY]) == [None]:
            self.close()  # every topic would look as if it did not exist
            raise BadOptionError(
                f"{self._reads} does not contain a cluster: does its address end with the cluster's root, zk://…/root?"
            )

    def close(self) -> None:
        self._lac_calls.close()
        self._reads.close()

    # Topics

    def topics(self, selection: TopicSelection) -> list[str]:
        return selected(selection, self._partitions, self._listed)

    def _partitions(self, names: Sequence[TopicName]) -> dict[str, int]:
        """Return the numbers of partitions. A partition belongs to its topic, or was created by its own name."""
        own = self._reads.records([keys.topic_key(name) for name in names], TopicRecord)
        base = self._reads.records([keys.topic_key(name.base) for name in names], TopicRecord)
        found: dict[str, int] = {}
        for name, record, above in zip(names, own, base, strict=True):
            if name.is_partition and above is not None and above.partitions > name.partition_index and not above.deleted:
                found[str(name)] = 0
            elif record is not None and not record.deleted:
                found[str(name)] = record.partitions
        return found

    def _listed(self, namespace: NamespaceName) -> dict[str, int]:
        parent = keys.domain_key(keys.TOPICS_KEY, namespace.tenant, namespace.local_name, PERSISTENT)
        buckets = [f"{parent}/{bucket}" for bucket in self._reads.children([parent])[0]]
        below = self._reads.children(buckets)
        names = [TopicName(PERSISTENT, namespace, keys.decode_name(name)) for bucket in below for name in bucket]
        plain = [name for name in names if not name.local_name.startswith("__")]  # reserved by clients for themselves
        return self._partitions(plain)

    # Locations

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        names = [parse_topic(topic) for topic in topics]
        there = self._partitions(names)
        if missing := [str(name) for name in names if there.get(str(name)) is None]:
            raise no_such_topics(missing, self._listed(parse_topic(missing[0]).namespace))
        for _ in range(_ATTEMPTS):
            chains = self._chains(names)
            ledgers = None if chains is None else self._ledgers([each for chain in chains if chain for each in _on_bookies(chain)])
            if chains is not None and ledgers is not None:
                histories = _histories(names, chains, ledgers)
                break
        else:
            raise PlanUnavailableError(f"the chains of {len(names)} topics changed {_ATTEMPTS} times while they were read")
        versions = {str(base): self._schemas(base) for base in dict.fromkeys(name.base for name in names)} if schemas else {}
        complete = self._with_ends(self._with_tickets(histories), ledgers)
        registered = self._bookies()  # last: some may have restarted while ends were requested
        racks = {one.bookie_id: one.rack for one in registered if one.rack is not None}
        return HistoryPlan(complete, _addresses(registered, self._has_certificate), schemas=versions, racks=racks)

    def _with_tickets(self, histories: Sequence[TopicHistory]) -> list[TopicHistory]:
        """Return the histories with tickets signed here: a reader with access to metadata has the key. Unchanged without a key."""
        (record,) = self._reads.records([keys.TICKET_KEYS_KEY], TicketKeys)
        if record is None:
            return list(histories)
        now_ms = time.time_ns() // 1_000_000
        key = signing_key([TicketKey(each.key_id, each.secret, each.signs_from_ms) for each in record.keys], now_ms)
        assert key is not None, "a record of keys has at least one"

        def with_ticket(ledger: LedgerHistory) -> LedgerHistory:
            last = LAST_ENTRY if ledger.is_open else ledger.last_entry_id
            ticket = ReadTicket(ledger.ledger_id, 0, last, TICKET_ROLE, now_ms + _TICKET_LIFE_MS)
            return replace(ledger, ticket=sign_ticket(key, ticket)) if ledger.is_on_bookies and last >= 0 else ledger

        return [replace(history, ledgers=tuple(map(with_ticket, history.ledgers))) for history in histories]

    def _chains(self, names: Sequence[TopicName]) -> list[Chain | None] | None:
        """Return the chains with the ledgers of their pages; None: one of them changed while it was read."""
        chain_keys = [keys.chain_key(name) for name in names]
        records = self._reads.records(chain_keys, Chain)
        named = [[] if record is None else page_keys(record, key) for key, record in zip(chain_keys, records, strict=True)]
        values = iter(self._reads.values([key for group in named for key in group]))
        chains: list[Chain | None] = []
        try:
            for key, record, group in zip(chain_keys, records, named, strict=True):
                pages = None if record is None else pages_of(record, key, [next(values) for _ in group])
                if record is not None and pages is None:
                    if self._reads.records([key], Chain) == [record]:
                        raise missing_page(record, key)
                    return None
                chains.append(None if record is None or pages is None else assemble(record, pages, key).chain)
        except MetadataError as error:
            raise PlanUnavailableError(f"{self._reads}: {error}", **error.facts) from None
        return chains

    def _ledgers(self, recorded: Sequence[ChainLedger]) -> dict[int, LedgerMetadata] | None:
        """Return ledgers by id; None: one of them was deleted after the chain was read."""
        wanted = [ledger.ledger_id for ledger in recorded if ledger.ledger_id not in self._closed_ledgers]
        found = self._reads.records([keys.ledger_key(ledger_id) for ledger_id in wanted], LedgerMetadata)
        fresh = {ledger_id: ledger for ledger_id, ledger in zip(wanted, found, strict=True) if ledger is not None}
        ledgers = {
            ledger.ledger_id: fresh.get(ledger.ledger_id) or self._closed_ledgers.get(ledger.ledger_id) for ledger in recorded
        }
        # Ledgers that left the chains are forgotten; open ones change.
        self._closed_ledgers = {
            ledger_id: ledger for ledger_id, ledger in ledgers.items() if ledger is not None and ledger.is_closed
        }
        known = {ledger_id: ledger for ledger_id, ledger in ledgers.items() if ledger is not None}
        return known if len(known) == len(ledgers) else None

    def _with_ends(self, histories: Sequence[TopicHistory], ledgers: Mapping[int, LedgerMetadata]) -> tuple[TopicHistory, ...]:
        """Return the histories with the ends of open ledgers; only the last ledger of a chain is open."""
        unknown = [
            history.ledgers[-1]
            for history in histories
            if history.ledgers and history.ledgers[-1].is_open and not ledgers[history.ledgers[-1].ledger_id].is_closed
        ]
        ends = self._newest_ends(unknown)
        ended = {
            ledger.ledger_id: replace(ledger, last_entry_id=end.last_entry_id, size_bytes=end.size_bytes)
            for ledger, end in zip(unknown, ends, strict=True)
        }
        return tuple(
            replace(history, ledgers=tuple(ended.get(ledger.ledger_id, ledger) for ledger in history.ledgers))
            for history in histories
        )

    def _newest_ends(self, ledgers: Sequence[LedgerHistory]) -> list[LedgerEnd]:
        """Return the ends, waiting for bookies that are being restarted."""
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                return newest_ends(ledgers, _addresses(self._bookies(), self._has_certificate), _LAC_TIMEOUT_S, self._lac_calls)
            except PlanUnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _bookies(self) -> list[BookieRegistration]:
        """Return the registered bookies, without those that are down or serve only their own process."""
        parents = (keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY)
        listed = self._reads.children(parents)
        found = self._reads.records(
            [f"{parent}/{name}" for parent, names in zip(parents, listed, strict=True) for name in names], BookieRegistration
        )
        return [one for one in found if one is not None and bookie_address(one.addresses) is not None]

    def _schemas(self, topic: TopicName) -> tuple[SchemaVersion, ...]:
        (history,) = self._reads.records([keys.schemas_key(topic)], SchemaHistory)
        rows = () if history is None else history.versions
        versions: list[SchemaVersion] = []
        for row in rows:
            parts = self._reads.values([keys.schema_part_key(topic, row.token, part) for part in range(row.parts)])
            if any(part is None for part in parts):
                continue  # deleted after the history was read
            encoded = b"".join(part for part in parts if part is not None)
            definition = SchemaDefinition.decode(encoded, keys.schema_part_key(topic, row.token, 0))
            version = row.version.to_bytes(_VERSION_BYTES, "big")
            versions.append(SchemaVersion(version, definition.type, definition.data, definition.properties))
        return tuple(versions)

    # Positions of subscriptions

    def subscription_position(self, topic: str, subscription: str) -> MessagePosition:
        """Return the position as last saved: that of a busy subscription may be further on."""
        name = parse_topic(topic)
        (cursor,) = self._reads.records([keys.cursor_key(name, subscription)], CursorRecord)
        if cursor is None:
            there = ", ".join(sorted(map(keys.decode_name, self._reads.children([keys.cursors_key(name)])[0]))) or "none"
            raise BadOptionError(f"{topic} has no subscription {subscription!r}: it has {there}", topic=topic)
        return MessagePosition(max(0, cursor.mark_delete.ledger_id), cursor.mark_delete.entry_id + 1)

    # Deleted ledgers

    def deleted_ledger_end(self, ledger_id: int) -> int | None:
        (deleted,) = self._reads.records([keys.deleted_ledger_key(ledger_id)], DeletedLedger)
        return None if deleted is None else deleted.ledger.last_entry_id

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        first, last = ids.start // _IDS_PER_PARENT, (ids.stop - 1) // _IDS_PER_PARENT
        if last - first >= _MOST_ID_PARENTS:
            return None
        there = self._listed_ids(keys.ledger_key, first, last, ids)
        living = self._reads.records([keys.ledger_key(ledger_id) for ledger_id in there], LedgerMetadata)
        listed = self._listed_ids(keys.deleted_ledger_key, first, last, ids)  # after the living ones, which become these
        deleted = self._reads.records([keys.deleted_ledger_key(ledger_id) for ledger_id in listed], DeletedLedger)
        found = [*living, *(None if one is None else one.ledger for one in deleted)]
        asked = {"topic": topic, "incarnation": incarnation, "use": "entries"}.items()  # cursors have ledgers, too
        ours = (one for one in found if one is not None and asked <= one.custom.items())
        return {one.ledger_id: one.last_entry_id for one in ours if one.last_entry_id is not None and one.last_entry_id >= 0}

    def _listed_ids(self, key_of: Callable[[int], str], first: int, last: int, ids: range) -> list[int]:
        """Return those of `ids` that have a key. `first`, `last`: of the parents that may contain them."""
        starts = [number * _IDS_PER_PARENT for number in range(first, last + 1)]
        below = self._reads.children([key_of(start).rpartition("/")[0] for start in starts])
        found = [start + int(name) for start, names in zip(starts, below, strict=True) for name in names]
        return [ledger_id for ledger_id in found if ledger_id in ids]


def _on_bookies(chain: Chain) -> list[ChainLedger]:
    """Return the ledgers with a record: one that is only an object has none."""
    return [ledger for ledger in chain.ledgers if chain.is_on_bookies(ledger.ledger_id)]


def _addresses(registered: Iterable[BookieRegistration], has_certificate: bool) -> dict[str, str]:
    """Return the addresses of bookies, with TLS if they have it. A reader without a certificate prefers their open ports."""
    found = {one.bookie_id: bookie_address(one.addresses, prefer_tls=has_certificate) for one in registered}
    return {bookie: address for bookie, address in found.items() if address is not None}


def _histories(
    names: Iterable[TopicName], chains: Iterable[Chain | None], ledgers: Mapping[int, LedgerMetadata]
) -> list[TopicHistory]:
    """Return the histories. A partition that was never used has no chain."""
    shared: dict[str, str] = {}
    return [
        TopicHistory(
            str(name),
            name.partition_index,
            "" if chain is None else chain.incarnation,
            ()
            if chain is None
            else tuple(
                _ledger(ledger, ledgers.get(ledger.ledger_id), chain.offload_of(ledger.ledger_id), shared)
                for ledger in chain.ledgers
            ),
        )
        for name, chain in zip(names, chains, strict=True)
    ]


def _ledger(
    recorded: ChainLedger, metadata: LedgerMetadata | None, offload: OffloadedLedger | None, shared: dict[str, str]
) -> LedgerHistory:
    """Return a ledger. `shared`: one object per bookie, since pickled tasks repeat objects for two bytes. Without metadata it is
    only an object.
    """
    url, object_bytes = ("", 0) if offload is None else (offload.url, offload.object_bytes)
    if metadata is None:
        assert recorded.entries is not None, "only ledgers that ended are offloaded"
        end, size_bytes, closed_at_ms = recorded.entries - 1, recorded.size_bytes, recorded.closed_at_ms
        return LedgerHistory(recorded.ledger_id, end, False, size_bytes, closed_at_ms, object_url=url, object_bytes=object_bytes)
    closed_at = metadata.last_entry_id if metadata.last_entry_id is not None else -1
    return LedgerHistory(
        ledger_id=recorded.ledger_id,
        last_entry_id=readable_end(recorded.entries, closed_at),
        is_open=recorded.is_open,
        size_bytes=(metadata.length_bytes or 0) if recorded.is_open else recorded.size_bytes,
        closed_at_ms=None if recorded.is_open else recorded.closed_at_ms,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        fragments=tuple(
            Fragment(fragment.first_entry_id, tuple(shared.setdefault(bookie, bookie) for bookie in fragment.ensemble))
            for fragment in metadata.fragments
        ),
        master_key=master_key_of(metadata),
        object_url=url,
        object_bytes=object_bytes,
    )
