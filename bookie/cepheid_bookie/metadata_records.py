"""What the bookie reads and writes in metadata, as its own narrow interfaces want it."""

from __future__ import annotations

from collections.abc import Collection

from cepheid_bookie.cookie import FORMAT_VERSION, Cookie
from cepheid_metadata import BookieCookie, MetadataStore, bookie_cookies, keys, ledger_records, list_ledgers


class MetadataCookies:
    """Implements `CookieRecords`. `directories` are for people: what identifies the disks is the incarnation."""

    def __init__(self, store: MetadataStore, directories: dict[str, tuple[str, ...]]) -> None:
        self._records = bookie_cookies(store)
        self._directories = directories

    async def load(self, bookie_id: str) -> Cookie | None:
        found = await self._records.get(bookie_id)
        if found is None:
            return None
        record = found.record
        return Cookie(record.bookie_id, record.cluster_id, record.incarnation, record.layout_version)

    async def create(self, cookie: Cookie) -> None:
        record = BookieCookie(
            layout_version=FORMAT_VERSION,
            bookie_id=cookie.bookie_id,
            incarnation=cookie.incarnation,
            cluster_id=cookie.cluster_id,
            directories=self._directories,
        )
        await self._records.create(cookie.bookie_id, record)


class MetadataLedgers:
    """Implements `LedgersInMetadata`."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._records = ledger_records(store)

    async def listing(self) -> Collection[int]:
        await self._store.sync(keys.LEDGERS_KEY)  # a follower may lag behind a creation whose data we hold
        return {ledger_id async for ledger_id in list_ledgers(self._store)}

    async def exists(self, ledger_id: int) -> bool:
        await self._store.sync(self._records.key_of(ledger_id))
        return await self._records.exists(ledger_id)
