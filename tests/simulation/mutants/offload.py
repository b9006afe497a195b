"""Mistakes about ledgers in object stores: what is recorded, what is deleted, what is read.

Scenario 35 catches each. Random worlds that offload are a quarter of those that use storage directly, so it would take too many
seeds to measure how fast they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_managed_ledger import offloader
from cepheid_managed_ledger.offloader import Offloader
from cepheid_metadata import Chain
from cepheid_rpc import EntryGroup
from tests.simulation.mutants.registry import scenario_mutant
from tests.simulation.world.sim_objects import SegmentsProbe


@scenario_mutant
@contextlib.contextmanager
def record_a_copy_before_it_is_read_back() -> Iterator[None]:
    """The store's word is taken for what it keeps."""
    write = SegmentsProbe.write

    async def remember(self: SegmentsProbe, url: str, *args: Any) -> Any:
        summary = await write(self, url, *args)
        self.__dict__.setdefault("written", {})[url] = summary
        return summary

    async def believe(self: SegmentsProbe, url: str, ledger_id: int) -> Any:
        return self.__dict__["written"][url]

    async def look_away(self: Offloader, ledger_id: int) -> bool:
        return True

    with (
        mock.patch.object(SegmentsProbe, "write", remember),
        mock.patch.object(SegmentsProbe, "verify", believe, create=True),
        mock.patch.object(Offloader, "_is_intact", look_away),
    ):
        yield


@scenario_mutant
@contextlib.contextmanager
def delete_from_bookies_before_that_is_recorded() -> Iterator[None]:
    """The copies on bookies are deleted first, and then the chain says so."""
    leave = Offloader._leave

    async def delete_first(self: Offloader, ledger_ids: Sequence[int]) -> None:
        for ledger_id in ledger_ids:
            await self._client.delete(ledger_id)
        await leave(self, ledger_ids)

    with mock.patch.object(Offloader, "_leave", delete_first):
        yield


@scenario_mutant
@contextlib.contextmanager
def delete_the_object_instead_of_the_copies_on_bookies() -> Iterator[None]:
    """The wrong copy goes, while the ledger is in the chain."""
    off_bookies = offloader.off_bookies

    def confuse(chain: Chain, ledger_ids: Iterable[int]) -> Chain:
        going = list(ledger_ids)
        urls = [found.url for ledger_id, found in (chain.offloaded or {}).items() if ledger_id in going]
        return off_bookies(chain, going).replace(object_deletions=(*(chain.object_deletions or ()), *urls))

    with mock.patch.object(offloader, "off_bookies", confuse):
        yield


@scenario_mutant
@contextlib.contextmanager
def forget_the_object_of_a_failed_attempt() -> Iterator[None]:
    """An attempt is taken out of the record, and its object stays."""

    def forget(chain: Chain, ledger_ids: Iterable[int]) -> Chain:
        gone = list(ledger_ids)
        left = {ledger_id: found for ledger_id, found in (chain.offloaded or {}).items() if ledger_id not in gone}
        return chain.replace(offloaded=left or None)

    with mock.patch.object(offloader, "without_attempts", forget):
        yield


@scenario_mutant
@contextlib.contextmanager
def read_an_entry_further_on_from_objects() -> Iterator[None]:
    """A reader of an object gives the range that begins one entry later."""
    from cepheid_tiered.segments import _Reader

    read = _Reader.read

    async def shift(self: Any, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        return await read(self, min(first + 1, last), last, max_bytes=max_bytes)

    with mock.patch.object(_Reader, "read", shift):
        yield
