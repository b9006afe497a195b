"""Mistakes that cost room or time, and make no answer wrong: what is taken and never given back, what takes longer than it may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cepheid_bookie import BookieIdentity, StorageSettings, bookie, opening
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.ledger_reader import LedgerReader
from cepheid_ledger.recovery import Recovery
from cepheid_ledger.unconfirmed import Unconfirmed
from cepheid_managed_ledger.catch_up import CatchUpReads
from cepheid_managed_ledger.managed_ledger import ManagedLedger
from cepheid_managed_ledger.tail_cache import TopicTail
from cepheid_metadata import Position
from tests.simulation.mutants.registry import mutant, scenario_mutant

_FOR_EVER_S = 1e6


@mutant("V9")
@contextlib.contextmanager
def charge_for_ever_for_what_newcomers_got() -> Iterator[None]:
    """A change of an ensemble lets its groups go, and their bytes stay in what all writers share."""

    def let_go(self: Unconfirmed) -> None:
        self._keeping = False
        self._kept, self._kept_size = [], 0

    with mock.patch.object(Unconfirmed, "let_go", let_go):
        yield


@mutant("V9")
@contextlib.contextmanager
def charge_for_ever_for_what_nobody_fetched() -> Iterator[None]:
    """What was read ahead is dropped, and its bytes stay in the budget of all topics."""

    def drop(self: CatchUpReads, stream: Any) -> None:
        stream.dropped = True
        stream.size_bytes = 0
        stream.groups.clear()

    with mock.patch.object(CatchUpReads, "_drop", drop):
        yield


@mutant("V9")
@contextlib.contextmanager
def charge_for_ever_for_what_was_not_sent() -> Iterator[None]:
    """A lane that is closed drops its queue, and the bytes stay in the window of its bookie."""
    close_lane = BookieChannel.close_lane

    def close_and_forget(self: BookieChannel, lane: Any) -> None:
        before = self._waiting_bytes
        close_lane(self, lane)
        self._waiting_bytes = before

    with mock.patch.object(BookieChannel, "close_lane", close_and_forget):
        yield


@mutant("V4", "V9")  # V9: look-ups wait for it (seed 0x1168f811f)
@contextlib.contextmanager
def open_topics_slowly() -> Iterator[None]:
    """It takes 20 seconds longer, whatever there is to do."""
    open_topic = ManagedLedger.open

    async def open_late(self: ManagedLedger) -> None:
        await asyncio.sleep(20)
        await open_topic(self)

    with mock.patch.object(ManagedLedger, "open", open_late):
        yield


@mutant("V8")
@contextlib.contextmanager
def start_again_slowly() -> Iterator[None]:
    """On disks that are not new, a bookie takes a minute and a half longer, whatever there is to replay."""
    open_storage = opening.open_storage

    async def open_late(
        identity: BookieIdentity, settings: StorageSettings, directories: opening.Directories, *args: Any, **options: Any
    ) -> opening.Storage:
        if directories.data.exists("mark.0"):
            await asyncio.sleep(90)
        return await open_storage(identity, settings, directories, *args, **options)

    with mock.patch.object(bookie, "open_storage", open_late):
        yield


@scenario_mutant
@contextlib.contextmanager
def recover_without_a_timeout() -> Iterator[None]:
    """A recovery waits for the last of its bookies, however long that one is silent (apache/bookkeeper#1067).

    Random worlds miss it: somebody has to be silent for ever, and there everybody speaks again.
    """
    make = Recovery.__init__

    def make_patient(self: Recovery, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._settings = self._settings.model_copy(update={"recovery_timeout_s": _FOR_EVER_S})

    with mock.patch.object(Recovery, "__init__", make_patient):
        yield


@scenario_mutant
@contextlib.contextmanager
def read_without_a_timeout() -> Iterator[None]:
    """A reader asks one bookie, and the next one when that one has answered.

    Random worlds miss it: somebody has to be silent for ever, and there everybody speaks again.
    """
    make = LedgerReader.__init__

    def make_patient(self: LedgerReader, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        never = {"read_timeout_s": _FOR_EVER_S, "speculative_read_s": _FOR_EVER_S}
        self._settings = self._settings.model_copy(update=never)

    with mock.patch.object(LedgerReader, "__init__", make_patient):
        yield


@scenario_mutant
@contextlib.contextmanager
def read_the_tail_from_bookies() -> Iterator[None]:
    """What was just published is kept in memory, and not found there.

    Random worlds miss it: bookies answer in the end, and a read may be in order: who keeps up is hard to say.
    """

    def find_nothing(self: TopicTail, position: Position, **_: int) -> None:
        return None

    with mock.patch.object(TopicTail, "read", find_nothing):
        yield
