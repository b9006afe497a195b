"""Where commands learn of ledgers and bookies: from a broker's admin API, or from the metadata store when no broker runs.

Entries come from neither: they are read straight from the bookies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from cepheid_cli.admin_client import AdminClient, AdminError
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_metadata import MetadataStore

_PAGE = 1000


class NoSuchLedgerHereError(CepheidError):
    """There is no such ledger, living or deleted."""


class LedgerSource(Protocol):
    """Views as cepheid_metadata.ledger_views describes them."""

    async def page(self, above: int, *, deleted: bool) -> dict[str, Any]: ...

    async def one(self, ledger_id: int) -> dict[str, Any]:
        """Raises NoSuchLedgerHereError."""

    async def undelete(self, ledger_id: int) -> None:
        """Raises NoSuchLedgerHereError."""

    async def purge(self, ledger_id: int) -> None:
        """Give up a deleted ledger. Raises NoSuchLedgerHereError."""

    async def bookies(self) -> list[dict[str, Any]]: ...

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        """Have the copies on these bookies checked, and made again where they are bad."""

    async def is_marked(self, ledger_id: int) -> bool:
        """Return whether the ledger waits for repair."""

    async def repair_is_off(self) -> bool: ...


class AdminSource:
    def __init__(self, url: str) -> None:
        self._admin = AdminClient(url)

    async def page(self, above: int, *, deleted: bool) -> dict[str, Any]:
        found: dict[str, Any] = self._admin.get("/cepheid/v1/ledgers", above=above, limit=_PAGE, deleted=deleted)
        return found

    async def one(self, ledger_id: int) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", f"/cepheid/v1/ledgers/{ledger_id}")
        return found

    async def undelete(self, ledger_id: int) -> None:
        self._ask("POST", f"/cepheid/v1/ledgers/{ledger_id}/undelete")

    async def purge(self, ledger_id: int) -> None:
        self._ask("POST", f"/cepheid/v1/ledgers/{ledger_id}/purge")

    async def bookies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._admin.get("/cepheid/v1/bookies")["bookies"]
        return found

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        query = urlencode([("bookie", bookie) for bookie in bookies])
        self._ask("POST", f"/cepheid/v1/repair/ledgers/{ledger_id}?{query}")

    async def is_marked(self, ledger_id: int) -> bool:
        page = self._admin.get("/cepheid/v1/repair/short", above=ledger_id - 1, limit=1)
        return any(mark["ledger_id"] == ledger_id for mark in page["ledgers"])

    async def repair_is_off(self) -> bool:
        try:
            return self._admin.get("/cepheid/v1/repair")["off"] is not None
        except AdminError:  # a broker of an older release
            return False

    def _ask(self, method: str, path: str) -> Any:
        try:
            return self._admin.call(method, path, {})
        except AdminError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise NoSuchLedgerHereError(str(error).removesuffix(f" ({method} {path}: {error.status})")) from None


class StoreSource:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def page(self, above: int, *, deleted: bool) -> dict[str, Any]:
        from cepheid_metadata.ledger_views import ledger_page

        return await ledger_page(self._store, above=above, limit=_PAGE, deleted=deleted)

    async def one(self, ledger_id: int) -> dict[str, Any]:
        from cepheid_metadata.ledger_views import ledger_view

        if (view := await ledger_view(self._store, ledger_id)) is None:
            raise NoSuchLedgerHereError(f"ledger {ledger_id} does not exist, or was deleted for good")
        return view

    async def undelete(self, ledger_id: int) -> None:
        from cepheid_metadata import DeletedLedgers
        from cepheid_ports import Ports

        if await DeletedLedgers(self._store).undelete(ledger_id, Ports().wall_ms()) is None:
            raise NoSuchLedgerHereError(
                f"ledger {ledger_id} cannot be brought back: it was not deleted, or its time of grace is over"
            )

    async def purge(self, ledger_id: int) -> None:
        from cepheid_metadata import DeletedLedgers

        if not await DeletedLedgers(self._store).give_up(ledger_id):
            raise NoSuchLedgerHereError(f"ledger {ledger_id} cannot be purged: it was not deleted, or its time of grace is over")

    async def bookies(self) -> list[dict[str, Any]]:
        from cepheid_metadata.ledger_views import bookie_views

        return await bookie_views(self._store)

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        from cepheid_metadata.repair_views import mark_damaged
        from cepheid_ports import Ports

        await mark_damaged(self._store, ledger_id, bookies, Ports().wall_ms())

    async def is_marked(self, ledger_id: int) -> bool:
        from cepheid_metadata import repair_marks

        return await repair_marks(self._store).exists(ledger_id)

    async def repair_is_off(self) -> bool:
        from cepheid_metadata import repair_switch

        return await repair_switch(self._store).exists(None)


@asynccontextmanager
async def ledger_source(admin_url: str, metadata_url: str | None) -> AsyncIterator[LedgerSource]:
    """The store is asked when its URL is given."""
    if metadata_url is None:
        yield AdminSource(admin_url)
        return
    from cepheid_metadata import require_cluster
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    store = await open_store(metadata_url, Ports())
    try:
        await require_cluster(store)  # an empty listing would look as if all was gone
        yield StoreSource(store)
    finally:
        await store.aclose()
