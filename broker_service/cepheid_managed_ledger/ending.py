"""Ends the appends to a managed ledger: for good, or until the next opening.

    terminate ──► no more rollovers ──► drained ──► ledger closed ──► its end and the topic's, in one write
    close     ──► (Upkeep was stopped) ──► drained ──► … cursors saved … ──► ledger closed ──► its end

Without an open ledger nothing is drained or closed: the chain's last ledger is closed already.
Drained means answered: an append that takes too long fails, and may be stored all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cepheid_ledger import LedgerClient, LedgerWriter
from cepheid_managed_ledger.appender import Appender
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ManagedLedgerClosedError, ManagedLedgerError
from cepheid_managed_ledger.ledger_end import end_writer, with_end
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.settings import ManagedLedgerSettings
from cepheid_managed_ledger.upkeep import Upkeep
from cepheid_metadata import Chain, ChainLedger
from cepheid_ports import CepheidError, SteadyClock
from cepheid_wire import TopicName

log = logging.getLogger(__name__)


class Ending:
    """The end of one opening that appends."""

    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        client: LedgerClient,
        upkeep: Upkeep,
        settings: ManagedLedgerSettings,
        clock: SteadyClock,
    ) -> None:
        self._topic = topic
        self._keeper = keeper
        self._client = client
        self.appender: Appender | None = None
        """None: there is no ledger to append to yet."""
        self._upkeep = upkeep
        self._settings = settings
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Ending of {self._topic}: {self.appender!r}>"

    async def terminate(self) -> None:
        """Close the last ledger and record the end of the topic. Raises ManagedLedgerError, LedgerError, MetadataError,
        TimeoutError."""
        self._upkeep.end_rollovers()
        await self._drain()
        if self.appender is None:
            await self._keeper.commit(lambda chain: (_terminated(chain, chain.ledgers), ()))
            return
        writer = self.appender.writer
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
        end = await end_writer(writer, self._client, self._settings, lambda: asyncio.get_running_loop().time() < deadline)
        now_ms = self._clock.stamp_ms()

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            return _terminated(chain, with_end(chain.ledgers, writer.ledger_id, end, now_ms)), ()

        await self._keeper.commit(plan)

    async def end_appends(self, refusal: ManagedLedgerError) -> None:
        """Wait until everything appended is answered, and refuse later appends."""
        await self._drain()
        if self.appender is not None:
            self.appender.fail(refusal)  # also what a failed rollover may have left

    async def end_ledger(self, *, usable: bool) -> None:
        """Close the writer. `usable`: record the ledger's end, which spares the next opening a recovery and a count of its
        messages.

        Otherwise, or if that fails, the next opening recovers the ledger.
        """
        if self.appender is None:
            return
        writer = self.appender.writer
        if usable and self._is_last(writer):
            try:
                await self._record_end(writer)
            except (CepheidError, TimeoutError) as error:
                log.info("managed_ledger.left_open", extra={"topic": str(self._topic), "error": str(error)})
        await writer.aclose()

    def _is_last(self, writer: LedgerWriter) -> bool:
        """Whether the writer's ledger is the last of the chain. A failed rollover may have left one that the chain does not
        name."""
        return self._keeper.lost is None and self._keeper.chain.ledgers[-1].ledger_id == writer.ledger_id

    async def _record_end(self, writer: LedgerWriter) -> None:
        end = await writer.close()
        now_ms = self._clock.stamp_ms()

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            return chain.replace(ledgers=with_end(chain.ledgers, writer.ledger_id, end, now_ms)), ()

        await self._keeper.commit(plan)

    async def _drain(self) -> None:
        """Wait until everything appended is answered and no change of ledgers is running; fail what takes too long."""
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._upkeep.wait_rolled()
                if self.appender is not None:
                    await self.appender.wait_answered()
        except TimeoutError:
            message = f"{self._topic}: appends were not stored within {self._settings.drain_timeout_s} s before the topic closed"
            self._keeper.is_patient = False
            if self.appender is not None:
                self.appender.fail(ManagedLedgerClosedError(message, topic=str(self._topic)))
        except ManagedLedgerError:
            pass  # they were answered with this error
        await self._upkeep.wait_rolled()


def _terminated(chain: Chain, ledgers: Sequence[ChainLedger]) -> Chain:
    return chain.replace(ledgers=tuple(ledgers), terminated_at=LedgerList(ledgers).last_position)
