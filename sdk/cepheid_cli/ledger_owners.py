"""Metadata about the ledgers and the identity of a stopped bookie, for `cepheid bookie-shell`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepheid_cli.admin.units import shown_time
from cepheid_cli.ledger_access import record_of
from cepheid_cli.ledger_source import StoreSource, ledger_source
from cepheid_ledger import master_key_of
from cepheid_metadata import MetadataStore, require_cluster

if TYPE_CHECKING:
    from cepheid_bookie import Cookie, MetadataCookies


class LedgerOwners:
    """Views of all ledgers by id (`cepheid_metadata.ledger_views`), living and deleted.

    `unreadable`: their records are damaged. `missing`: bookies that keep ledgers because metadata lacks too many, with the number.
    """

    def __init__(self, views: dict[int, dict[str, Any]], unreadable: dict[int, str], missing: dict[str, int]) -> None:
        self._views = views
        self._unreadable = unreadable
        self._missing = missing

    def of(self, ledger_id: int) -> str:
        """Return the topic of a ledger, and its use unless it holds the topic's entries."""
        view = self._views.get(ledger_id)
        if view is None:
            return "(its record in metadata is damaged)" if ledger_id in self._unreadable else "(not in metadata)"
        custom = view["ledger"]["custom"]
        use = custom.get("use", "entries")
        return str(custom.get("topic", "(no topic)")) + (f" ({use})" if use != "entries" else "")

    def why_kept(self, ledger_id: int, bookie_id: str | None) -> str:
        """Return why a ledger is kept on this bookie, and until when if known."""
        view = self._views.get(ledger_id)
        if view is None and ledger_id in self._unreadable:
            return f"its record in metadata cannot be read: {self._unreadable[ledger_id]}"
        if view is None and bookie_id in self._missing:
            return (
                f"metadata lacks {self._missing[bookie_id]:,} ledgers of this bookie, too many to delete without confirmation: "
                f"cepheid bookies confirm-missing {bookie_id}"
            )
        if view is None:
            return "nothing, as metadata does not have it: collected after two passes of the running bookie"
        owner = self.of(ledger_id)
        if "purge_after_ms" in view:
            return f"{owner}: deleted, can be brought back until {shown_time(view['purge_after_ms'])}, then collected"
        ledger = view["ledger"]
        is_named = any(bookie_id in fragment["ensemble"] for fragment in ledger["fragments"])
        if ledger["state"] == "CLOSED" and bookie_id is not None and not is_named:
            return f"{owner}: copies that were replaced on other bookies, collected by the running bookie"
        return f"{owner}: {ledger['state']}, until the topic no longer needs it"


async def read_owners(metadata_url: str) -> LedgerOwners:
    async with ledger_source("", metadata_url) as source:
        views: dict[int, dict[str, Any]] = {}
        unreadable: dict[int, str] = {}
        for deleted in (True, False):  # a ledger that is restored in between counts as living
            above: int | None = -1
            while above is not None:
                page = await source.page(above, deleted=deleted)
                views.update({view["ledger"]["ledger_id"]: view for view in page["ledgers"]})
                unreadable.update({record["ledger_id"]: record["error"] for record in page["damaged"]})
                above = page["next"]
        assert isinstance(source, StoreSource), "it has a URL of metadata"
        missing = {view["bookie_id"]: view["missing"] for view in await source.missing_ledgers() if not view["confirmed"]}
    return LedgerOwners(views, unreadable, missing)


@asynccontextmanager
async def bookie_records(
    metadata_url: str, data_dir: Path, journal_dir: Path | None
) -> AsyncIterator[tuple[MetadataStore, MetadataCookies]]:
    """Open the store; yield it with its records of bookies."""
    from cepheid_bookie import MetadataCookies
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    directories: dict[str, tuple[str, ...]] = {"data": (str(data_dir),)}
    if journal_dir is not None:
        directories["journal"] = (str(journal_dir),)
    store = await open_store(metadata_url, Ports(), must_exist=True)
    try:
        await require_cluster(store)
        yield store, MetadataCookies(store, directories)
    finally:
        await store.aclose()


async def read_master_keys(store: MetadataStore) -> dict[int, bytes]:
    """Return the key of every ledger with a readable record, living or deleted."""
    keys: dict[int, bytes] = {}
    source = StoreSource(store)
    for deleted in (True, False):
        above: int | None = -1
        while above is not None:
            page = await source.page(above, deleted=deleted)
            keys.update({view["ledger"]["ledger_id"]: master_key_of(record_of(view)) for view in page["ledgers"]})
            above = page["next"]
    return keys


async def recorded_cookie(metadata_url: str, bookie_id: str) -> tuple[Cookie | None, int]:
    """Return the cookie of a bookie in metadata, and its number of lives."""
    async with bookie_records(metadata_url, Path(), Path()) as (_, records):
        return await records.load(bookie_id), await records.load_life(bookie_id)
