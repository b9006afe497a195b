"""The cursor ledgers of one topic: the one being written, and those that cursors' records still name.

no ledger ──first large state──► writing ──full, or a write failed──► writing the next one (everybody's state moves along)
a ledger that no record names any more ──► retired: the chain's deletion queue
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from cepheid_broker.managed_ledger.cursor_ledger import CursorLedger, Snapshot
from cepheid_broker.managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_ledger import LedgerClient, LedgerError
from cepheid_wire import TopicName


class CursorLedgers:
    def __init__(
        self, topic: TopicName, client: LedgerClient, config: Callable[[], ManagedLedgerConfig], settings: ManagedLedgerSettings
    ) -> None:
        self._topic = topic
        self._client = client
        self._config = config
        self._settings = settings
        self._current: CursorLedger | None = None
        self._known: dict[int, None] = {}  # those that are not in the deletion queue

    def __repr__(self) -> str:
        return f"<CursorLedgers {list(self._known)}, writing {self._current!r}>"

    @property
    def current(self) -> CursorLedger | None:
        return self._current

    @property
    def needs_new(self) -> bool:
        """The next snapshots need a new ledger, and it needs everybody's."""
        return self._current is None or self._current.size_bytes >= self._settings.cursor_ledger_max_bytes

    def remember(self, ledger_ids: Iterable[int]) -> None:
        """Named by the records found at the opening."""
        self._known.update(dict.fromkeys(ledger_ids))

    async def start_new(self) -> None:
        """Raises LedgerError, MetadataError."""
        config, before = self._config(), self._current
        writer = await self._client.create(
            ensemble_size=config.ensemble_size,
            write_quorum=config.write_quorum,
            ack_quorum=config.ack_quorum,
            custom={"topic": str(self._topic), "use": "cursors"},
        )
        self._current = CursorLedger(writer, self._settings.cursor_part_bytes)
        self._known[writer.ledger_id] = None
        if before is not None:
            await before.aclose()

    async def save(self, snapshots: Sequence[Snapshot]) -> None:
        """Durable when it returns. Raises LedgerError: then the next attempt needs a new ledger."""
        assert self._current is not None, "start_new comes first"
        try:
            await self._current.save(snapshots)
        except LedgerError:
            await self.aclose()
            raise

    async def retire(self, named: Container[int]) -> tuple[int, ...]:
        """Those that no record will name after the write at hand; `forget` them once it is done."""
        retired = tuple(ledger_id for ledger_id in self._known if ledger_id not in named)
        if self._current is not None and self._current.ledger_id in retired:
            await self.aclose()
        return retired

    def forget(self, ledger_ids: Iterable[int]) -> None:
        """They are in the deletion queue."""
        for ledger_id in ledger_ids:
            del self._known[ledger_id]

    async def aclose(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            await current.aclose()
