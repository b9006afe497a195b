"""Current metadata of a cluster, for blocking tests and benchmarks: a separate session for each question.

view = MetadataView(cluster.metadata_url)
view.ensemble("persistent://public/default/t")           # the bookies of its newest entries
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cepheid_metadata import (
    Audit,
    Fragment,
    LedgerMetadata,
    MetadataStore,
    audit_record,
    bundle_owners,
    keys,
    ledger_records,
    list_ledgers,
    list_names,
    list_repair_marks,
    read_chain,
)
from cepheid_ports import Ports
from cepheid_wire import TopicName

T = TypeVar("T")

HASH_END = 0xFFFF_FFFF


class MetadataView:
    def __init__(self, metadata_url: str) -> None:
        self.url = metadata_url

    def __repr__(self) -> str:
        return f"<MetadataView {self.url}>"

    def ledgers(self, topic: str) -> list[LedgerMetadata]:
        """Return the topic's chain, oldest first, without ledgers being deleted. Raises LookupError if there is no such topic."""

        async def ask(store: MetadataStore) -> list[LedgerMetadata]:
            found = await read_chain(store, TopicName.parse(topic))
            if found is None:
                raise LookupError(f"metadata has no topic {topic}")
            records = [await ledger_records(store).get(ledger.ledger_id) for ledger in found.record.ledgers]
            return [record.record for record in records if record is not None]

        return self._ask(ask)

    def ensemble(self, topic: str) -> tuple[str, ...]:
        """Return the ensemble of the ledger being written."""
        return self.ledgers(topic)[-1].last_fragment.ensemble

    def owner(self, topic: str) -> str:
        """Return the broker that owns the topic's bundle; "" if there is none."""
        name = TopicName.parse(topic)
        tenant, namespace = name.namespace.tenant, name.namespace.local_name
        place = zlib.crc32(str(name).encode())  # of the full name, like Pulsar's clients of the admin API

        async def ask(store: MetadataStore) -> str:
            parent = keys.bundle_key(tenant, namespace, "x").rpartition("/")[0]
            for bundle in await list_names(store, parent):
                first, last = (int(bound, 16) for bound in bundle.split("_"))
                mine = first <= place < last or place == last == HASH_END
                found = await bundle_owners(store).get((tenant, namespace, bundle)) if mine else None
                if found is not None:
                    return found.record.broker_id
            return ""

        return self._ask(ask)

    def writable_bookies(self) -> list[str]:
        """Return the registered bookies that accept entries."""
        return self._ask(lambda store: list_names(store, keys.AVAILABLE_BOOKIES_KEY))

    def readonly_bookies(self) -> list[str]:
        return self._ask(lambda store: list_names(store, keys.READONLY_BOOKIES_KEY))

    def marked_ledgers(self) -> list[int]:
        """Return the ids of the ledgers that are marked for repair."""

        async def ask(store: MetadataStore) -> list[int]:
            return [ledger_id async for ledger_id in list_repair_marks(store)]

        return self._ask(ask)

    def bookies_with_entries(self) -> set[str]:
        """Return the bookies that the record of any ledger names, except in fragments that have no entries and never will."""

        async def ask(store: MetadataStore) -> set[str]:
            named: set[str] = set()
            async for ledger_id in list_ledgers(store):
                found = await ledger_records(store).get(ledger_id)
                if found is not None:
                    named.update(name for fragment in _with_entries(found.record) for name in fragment.ensemble)
            return named

        return self._ask(ask)

    def audit(self) -> Audit | None:
        """Return the results of the auditor's last complete walk over all ledgers."""

        async def ask(store: MetadataStore) -> Audit | None:
            found = await audit_record(store).get(None)
            return None if found is None else found.record

        return self._ask(ask)

    def _ask(self, question: Callable[[MetadataStore], Awaitable[T]]) -> T:
        from cepheid_metadata.open_store import open_store  # the store's library, only when used

        async def ask() -> T:
            store = await open_store(self.url, Ports())
            try:
                return await question(store)
            finally:
                await store.aclose()

        return asyncio.run(ask())


def _with_entries(ledger: LedgerMetadata) -> list[Fragment]:
    if not ledger.is_closed:
        return list(ledger.fragments)
    assert ledger.last_entry_id is not None
    return [fragment for fragment in ledger.fragments if fragment.first_entry_id <= ledger.last_entry_id]
