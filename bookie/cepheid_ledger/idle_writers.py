"""Idle writers send their LAC to the bookies, so that readers that bypass the broker see the last entry.

    append ──wake──► awake ──nothing appended for an interval──► its LAC goes to its bookies ──► at rest

An entry carries the LAC from before it, so bookies learn that an entry is confirmed from the next one; without a next one the
writer sends it. One timer for all writers of the process, none while all are at rest; a lost LAC is only a delay.
Bounded: one request at a time per bookie, and a number of writers per round. Writers without a turn keep their place for the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from cepheid_ledger.settings import LedgerSettings
from cepheid_ports import TaskOwner
from cepheid_rpc import BookieConnection, BookieUnavailableError, ExplicitLac

log = logging.getLogger(__name__)

_WRITERS_PER_ROUND = 200  # over gRPC one LAC costs this process 0.2 ms per bookie
_TICK_WITHOUT_LACS_S = 1.0


class IdleWriter(Protocol):
    """A LedgerWriter."""

    @property
    def last_add_pushed(self) -> int: ...

    @property
    def may_rest(self) -> bool:
        """Whether nothing more will be confirmed without another append."""

    def lac_to_tell(self) -> tuple[tuple[str, ...], ExplicitLac] | None:
        """Return the bookies and the LAC to send; None: there is nothing to send, or no longer."""

    def on_lac_told(self, last_add_confirmed: int) -> None: ...

    def on_rest(self, now: float) -> None:
        """Note that it rests; the next append wakes it again."""


class IdleWriters:
    def __init__(self, connection_of: Callable[[str], BookieConnection], settings: LedgerSettings) -> None:
        self._connection_of = connection_of
        self._settings = settings
        self._awake: dict[IdleWriter, int] = {}  # with what it had pushed at the last tick; moves to the end after a turn
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = TaskOwner("idle writers")
        self.lacs_told = 0

    def __repr__(self) -> str:
        return f"<IdleWriters: {len(self._awake)} awake, {self.lacs_told} LACs told>"

    def wake(self, writer: IdleWriter) -> None:
        self._awake[writer] = -1
        if self._timer is None:
            self._arm()

    async def aclose(self) -> None:
        self._awake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.aclose()

    def _arm(self) -> None:
        interval_s = self._settings.explicit_lac_interval_s or _TICK_WITHOUT_LACS_S
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        due: list[tuple[IdleWriter, tuple[str, ...], ExplicitLac]] = []
        for writer, pushed_before in list(self._awake.items()):
            pushed = writer.last_add_pushed
            if pushed != pushed_before:
                self._awake[writer] = pushed
            elif (told := self._to_tell(writer)) is not None:
                if len(due) < _WRITERS_PER_ROUND:
                    due.append((writer, *told))
                    self._awake[writer] = self._awake.pop(writer)  # if no bookie accepts it, others have their turn first
            elif writer.may_rest:
                del self._awake[writer]
                writer.on_rest(now)
        if due and not self._tasks:  # otherwise the previous round is still running
            self._tasks.start(self._tell(due), name="explicit-lacs")
        if self._awake:
            self._arm()

    def _to_tell(self, writer: IdleWriter) -> tuple[tuple[str, ...], ExplicitLac] | None:
        return writer.lac_to_tell() if self._settings.explicit_lac_interval_s else None

    async def _tell(self, due: list[tuple[IdleWriter, tuple[str, ...], ExplicitLac]]) -> None:
        by_bookie: dict[str, list[tuple[IdleWriter, ExplicitLac]]] = {}
        for writer, bookies, lac in due:
            for bookie in bookies:
                by_bookie.setdefault(bookie, []).append((writer, lac))
        async with asyncio.TaskGroup() as group:
            for bookie, lacs in by_bookie.items():
                group.create_task(self._tell_one(bookie, lacs))

    async def _tell_one(self, bookie: str, lacs: list[tuple[IdleWriter, ExplicitLac]]) -> None:
        """Send them one after the other; a bookie that does not answer is skipped until the next round."""
        try:
            connection = self._connection_of(bookie)
            for writer, lac in lacs:
                async with asyncio.timeout(self._settings.read_timeout_s):
                    await connection.write_lac(lac)  # any answer means that it was received
                self.lacs_told += 1
                writer.on_lac_told(lac.last_add_confirmed)
        except (BookieUnavailableError, TimeoutError) as error:
            log.debug("ledger.explicit_lac_lost", extra={"bookie": bookie, "error": repr(error)})
