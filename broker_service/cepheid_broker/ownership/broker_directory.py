"""The running brokers: their registrations, as fresh as the store's watches allow.

    start ──► watch /brokers, and each broker's record ──► read them ──► brokers     repeated when a watch fires or fails

Rules:
1. While the store cannot be reached, the last known registrations stay, and they are read again every second.
2. A registration that cannot be read leaves its broker's last known one in place, and does not affect the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from cepheid_metadata import (
    BrokerRegistration,
    MetadataError,
    MetadataStore,
    StoreClosedError,
    Watch,
    broker_records,
    keys,
    list_records,
)
from cepheid_metadata.listing import list_names
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

RETRY_S = 1.0


class BrokerDirectory:
    """The registrations of all brokers, followed by watches."""

    def __init__(self, store: MetadataStore, tasks: TaskOwner) -> None:
        self._store = store
        self._records = broker_records(store)
        self._tasks = tasks
        self._brokers: dict[str, BrokerRegistration] = {}
        self._watches: list[Watch] = []
        self.on_changed: Callable[[], None] = lambda: None
        """Called after each read of the registered brokers."""

    def __repr__(self) -> str:
        return f"<BrokerDirectory {', '.join(self._brokers) or 'nobody'}>"

    @property
    def brokers(self) -> Mapping[str, BrokerRegistration]:
        """Registrations by broker id, sorted."""
        return self._brokers

    @property
    def leader(self) -> BrokerRegistration | None:
        """The broker with the first id, on which all brokers agree; None without brokers."""
        return next(iter(self._brokers.values()), None)

    @property
    def draining(self) -> list[str]:
        """Ids of the brokers that are draining and take no bundles."""
        return [name for name, record in self._brokers.items() if record.draining]

    async def start(self) -> None:
        """Read the registrations and watch them from here on. Raises MetadataError."""
        await self._read()

    async def refresh(self) -> None:
        """Read the registrations now. Raises MetadataError."""
        self._brokers = await self._read_all()
        self.on_changed()

    async def _read(self) -> None:
        watches: list[Watch] = []
        try:
            watches.append(await self._store.watch_children(keys.BROKERS_KEY))
            for name in await list_names(self._store, keys.BROKERS_KEY):
                watches.append(await self._store.watch(keys.broker_key(name)))  # noqa: PERF401 - earlier watches are cancelled on errors
            self._brokers = await self._read_all()
        except BaseException:
            _cancel(watches)
            raise
        self._watches = watches
        self.on_changed()
        for watch in watches:
            watch.call_when_settled(self._on_settled)

    def _on_settled(self) -> None:
        if self._watches:  # only the first watch that fires reads again, and all are set again
            _cancel(self._watches)
            self._watches = []
            self._tasks.start(self._read_again(), name="read-brokers")

    async def _read_all(self) -> dict[str, BrokerRegistration]:
        found, unreadable = await list_records(self._store, keys.BROKERS_KEY, self._records)
        brokers = [*found.values(), *(self._brokers[name] for name in unreadable if name in self._brokers)]
        return {record.broker_id: record for record in sorted(brokers, key=lambda record: record.broker_id)}

    async def _read_again(self) -> None:
        before, drained_before = list(self._brokers), self.draining
        while True:
            try:
                await self._read()
                break
            except StoreClosedError:
                return
            except MetadataError as error:
                log.warning("brokers.unreachable", extra={"error": str(error), "retry_s": RETRY_S})
                await asyncio.sleep(RETRY_S)
        if list(self._brokers) != before or self.draining != drained_before:
            extra = {"brokers": list(self._brokers), "before": before, "draining": self.draining}
            log.info("brokers.changed", extra=extra)


def _cancel(watches: Iterable[Watch]) -> None:
    for watch in watches:
        watch.cancel()
