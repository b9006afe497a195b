"""This broker's registration: the ephemeral record by which the others know it, made at the start and with every new session.

Rule: an outage that the session outlives changes nothing. What this process made in this session stays, else all brokers would
see it leave and come back, and choose others for bundles meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cepheid_broker.broker_directory import RETRY_S
from cepheid_metadata import (
    BadVersionError,
    BrokerRegistration,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    StoreClosedError,
    broker_records,
)
from cepheid_ports import Ports, TaskOwner

log = logging.getLogger(__name__)


class OwnRegistration:
    def __init__(self, store: MetadataStore, tasks: TaskOwner, ports: Ports, release: str) -> None:
        self._records = broker_records(store)
        self._tasks = tasks
        self._ports = ports
        self._release = release
        self._making: asyncio.Task[None] | None = None
        self._made: BrokerRegistration | None = None  # in this session, for certain
        self._asked = 0

    def __repr__(self) -> str:
        return f"<OwnRegistration{'' if self._making is None or self._making.done() else ', being made'}>"

    def make_soon(self, broker_id: str, addresses: Mapping[str, str]) -> asyncio.Task[None]:
        """Tried again until it is there. One under way goes on, and looks again at its end: the session may be another one."""
        self._asked += 1
        if self._making is None or self._making.done():
            self._making = self._tasks.start(self._make(broker_id, dict(addresses)), name="register")
        return self._making

    def on_session_lost(self) -> None:
        self._made = None

    async def delete(self, broker_id: str) -> None:
        """Ours alone: another broker may have the id. What cannot be deleted ends with the session."""
        if self._making is not None:
            self._making.cancel()
        try:
            found = await self._records.get(broker_id)
            if found is not None and found.record == self._made:
                await self._records.delete(broker_id, found.version)
        except MetadataError as error:
            log.warning("broker.not_deregistered", extra={"broker": broker_id, "error": str(error)})

    async def _make(self, broker_id: str, addresses: dict[str, str]) -> None:
        started_at_ms = self._ports.wall_ms()
        record = BrokerRegistration(broker_id=broker_id, addresses=addresses, release=self._release, started_at_ms=started_at_ms)
        while True:
            asked = self._asked
            try:
                if (found := await self._records.get(broker_id)) is not None:
                    if found.record == self._made:
                        if asked == self._asked:
                            return
                        continue
                    if found.record.addresses != addresses:
                        extra = {"broker": broker_id, "address": found.record.addresses, "retry_s": RETRY_S}
                        log.warning("broker.id_taken", extra={**extra, "hint": "two brokers have one id, or one just moved: wait"})
                        await asyncio.sleep(RETRY_S)
                        continue
                    # Of a process before this one: two cannot listen at one address.
                    await self._records.delete(broker_id, found.version)
                await self._records.create(broker_id, record, ephemeral=True)
                self._made = record
                log.info("broker.registered", extra={"broker": broker_id, "addresses": addresses})
                if asked == self._asked:
                    return
            except (KeyExistsError, NoSuchKeyError, BadVersionError):
                continue
            except StoreClosedError:
                return
            except MetadataError as error:
                log.warning("broker.not_registered", extra={"broker": broker_id, "error": str(error), "retry_s": RETRY_S})
                await asyncio.sleep(RETRY_S)
