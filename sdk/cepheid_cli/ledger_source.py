"""Sources of information on ledgers and bookies: a broker's admin API, or the metadata store if no broker runs.

Entries are read directly from the bookies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cepheid.errors import NotFoundError, PreconditionError, RefusedError
from cepheid_cli.client_security import connect_admin
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_metadata import MetadataStore

_PAGE = 1000


class NoSuchLedgerHereError(CepheidError):
    """There is no such ledger, living or deleted."""


class BookiesReplacedError(CepheidError):
    """The ledger has no entries on a bookie whose copies should be repaired: the bookie was replaced after the verification."""


class LedgerSource(Protocol):
    """Views as described in cepheid_metadata.ledger_views."""

    async def page(self, above: int, *, deleted: bool) -> dict[str, Any]: ...

    async def one(self, ledger_id: int) -> dict[str, Any]:
        """Raises NoSuchLedgerHereError."""

    async def undelete(self, ledger_id: int) -> None:
        """Raises NoSuchLedgerHereError."""

    async def purge(self, ledger_id: int) -> None:
        """Give up a deleted ledger. Raises NoSuchLedgerHereError."""

    async def bookies(self) -> list[dict[str, Any]]: ...

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        """Have the copies on these bookies checked, and replaced where they are bad.

        Raises NoSuchLedgerHereError, also for a deleted ledger that can be brought back, and BookiesReplacedError.
        """

    async def is_marked(self, ledger_id: int) -> bool:
        """Return whether the ledger waits for repair."""

    async def repair_is_off(self) -> bool: ...


class AdminSource:
    def __init__(self, url: str) -> None:
        self._admin = connect_admin(url)

    async def page(self, above: int, *, deleted: bool) -> dict[str, Any]:
        found: dict[str, Any] = self._admin.ledgers.list(above=above, limit=_PAGE, deleted=deleted)
        return found

    async def one(self, ledger_id: int) -> dict[str, Any]:
        with _asked_for_a_ledger():
            return self._admin.ledgers.show(ledger_id)

    async def undelete(self, ledger_id: int) -> None:
        with _asked_for_a_ledger():
            self._admin.ledgers.undelete(ledger_id)

    async def purge(self, ledger_id: int) -> None:
        with _asked_for_a_ledger():
            self._admin.ledgers.purge(ledger_id)

    async def bookies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._admin.bookies.addresses()["bookies"]
        return found

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        try:
            with _asked_for_a_ledger():
                self._admin.repair.check_ledger(ledger_id, bookie=bookies)
        except PreconditionError as error:
            raise BookiesReplacedError(str(error.args[0])) from None

    async def is_marked(self, ledger_id: int) -> bool:
        page = self._admin.repair.short(above=ledger_id - 1, limit=1)
        return any(mark["ledger_id"] == ledger_id for mark in page["ledgers"])

    async def repair_is_off(self) -> bool:
        try:
            return self._admin.repair.status()["off"] is not None
        except RefusedError:  # a broker of an older release
            return False


@contextmanager
def _asked_for_a_ledger() -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise NoSuchLedgerHereError(str(error.args[0]).rpartition(" (")[0]) from None


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
                f"ledger {ledger_id} cannot be brought back: it was not deleted, or its grace period is over"
            )

    async def purge(self, ledger_id: int) -> None:
        from cepheid_metadata import DeletedLedgers

        if not await DeletedLedgers(self._store).give_up(ledger_id):
            raise NoSuchLedgerHereError(f"ledger {ledger_id} cannot be purged: it was not deleted, or its grace period is over")

    async def bookies(self) -> list[dict[str, Any]]:
        from cepheid_metadata.ledger_views import bookie_views

        return await bookie_views(self._store)

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        from cepheid_metadata.repair_views import RepairRefusedError, UnknownLedgerError, mark_damaged
        from cepheid_ports import Ports

        try:
            await mark_damaged(self._store, ledger_id, bookies, Ports().wall_ms())
        except UnknownLedgerError as error:
            raise NoSuchLedgerHereError(str(error)) from None
        except RepairRefusedError as error:
            raise BookiesReplacedError(str(error)) from None

    async def is_marked(self, ledger_id: int) -> bool:
        from cepheid_metadata import repair_marks

        return await repair_marks(self._store).exists(ledger_id)

    async def missing_ledgers(self) -> list[dict[str, Any]]:
        """Return the records of bookies that keep ledgers because metadata lacks too many of theirs."""
        from cepheid_metadata.repair_views import missing_views

        return await missing_views(self._store)

    async def repair_is_off(self) -> bool:
        from cepheid_metadata import repair_switch

        return await repair_switch(self._store).exists(None)


@asynccontextmanager
async def ledger_source(admin_url: str, metadata_url: str | None) -> AsyncIterator[LedgerSource]:
    """Open the source; it is the store if its URL is given."""
    if metadata_url is None:
        yield AdminSource(admin_url)
        return
    from cepheid_metadata import require_cluster
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    store = await open_store(metadata_url, Ports(), must_exist=True)
    try:
        await require_cluster(store)  # an empty listing would look like lost data
        yield StoreSource(store)
    finally:
        await store.aclose()
