"""Connections of commands to bookies, at the addresses from a source, for reads only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from cepheid_cli.ledger_source import LedgerSource
from cepheid_ledger import LedgerReader, LedgerSettings
from cepheid_metadata import Found, LedgerMetadata, Records
from cepheid_rpc import BookieConnection, BookieUnavailableError, bookie_address
from cepheid_security import ClientTls


class BookieReach:
    """Connections by bookie id. A bookie that is down is unavailable, which readers handle."""

    def __init__(self, bookies: list[dict[str, Any]]) -> None:
        self._addresses = {bookie["bookie_id"]: bookie_address(bookie["addresses"]) for bookie in bookies}
        self._tls = ClientTls.from_environment()
        self._connections: dict[str, BookieConnection] = {}

    def get(self, bookie_id: str) -> BookieConnection:
        """Raises BookieUnavailableError."""
        if (connection := self._connections.get(bookie_id)) is None:
            address = self._addresses.get(bookie_id)
            if address is None:
                raise BookieUnavailableError(f"bookie {bookie_id} is not running", bookie=bookie_id)
            from cepheid_ledger.grpc_connection import GrpcConnection

            connection = self._connections[bookie_id] = GrpcConnection(bookie_id, address, tls=self._tls)
        return connection

    async def aclose(self) -> None:
        await asyncio.gather(*(connection.aclose() for connection in self._connections.values()))


@asynccontextmanager
async def bookie_reach(source: LedgerSource) -> AsyncIterator[BookieReach]:
    reach = BookieReach(await source.bookies())
    try:
        yield reach
    finally:
        await reach.aclose()


class _SourceRecords:
    """A reader's interface to metadata, implemented by a source."""

    def __init__(self, source: LedgerSource) -> None:
        self._source = source

    async def get(self, ledger_id: int) -> Found[LedgerMetadata] | None:
        return Found(record_of(await self._source.one(ledger_id)), 0)


def reader_of(source: LedgerSource, ledger: LedgerMetadata, reach: BookieReach) -> LedgerReader:
    """Return a reader that does not recover."""
    records = cast(Records[int, LedgerMetadata], _SourceRecords(source))
    return LedgerReader(ledger, records, reach.get, None, LedgerSettings())


def record_of(view: dict[str, Any]) -> LedgerMetadata:
    return LedgerMetadata.model_validate(view["ledger"])
