"""A ledger client, an auditor and a worker over memory bookies and a memory store, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cepheid_ledger import LedgerSettings, LedgerWriter
from cepheid_metadata import (
    BookieCookie,
    DrainingBookie,
    LedgerMetadata,
    MemoryStore,
    RepairMark,
    RepairRequest,
    RepairSwitch,
    audit_record,
    bookie_cookies,
    draining_bookies,
    keys,
    list_names,
    list_repair_marks,
    repair_marks,
    repair_requests,
    repair_switch,
)
from cepheid_ports import Ports
from cepheid_recovery import AutoRecovery, RecoverySettings
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, new_client
from tests.ledger.memory_bookie import MemoryCluster, is_valid

QUICK = RecoverySettings(grace_s=60.0, open_ledger_grace_s=20.0, poll_s=1.0, retry_s=2.0, checks_per_s=1000.0)


@dataclass
class KnownBookies:
    """What a bookie directory would say of the cluster's bookies."""

    cluster: MemoryCluster
    incarnations: dict[str, str] = field(default_factory=dict)
    known_racks: dict[str, str] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)

    def writable(self) -> Sequence[str]:
        return self.cluster.available()

    def registered(self) -> Sequence[str]:
        return [name for name, bookie in self.cluster.bookies.items() if not bookie.down]

    def expected(self) -> Sequence[str]:
        return list(self.cluster.bookies)

    def problems(self) -> list[str]:
        return []

    def draining(self) -> list[str]:
        return []

    def racks(self) -> dict[str, str]:
        return self.known_racks

    def free_bytes(self) -> dict[str, int]:
        return {}

    def incarnation_of(self, bookie_id: str) -> str:
        return self.incarnations.get(bookie_id, "first disks")

    def process_of(self, bookie_id: str) -> str:
        return self.processes.get(bookie_id, "first process")


@dataclass
class RepairWorld:
    ledgers: LedgerWorld
    bookies: KnownBookies
    settings: RecoverySettings
    processes: list[AutoRecovery] = field(default_factory=list)

    @property
    def store(self) -> Any:
        return self.ledgers.store

    async def start(self, name: str = "r1") -> AutoRecovery:
        """One more process that repairs, with a session of its own."""
        store = MemoryStore(self.ledgers.tree)
        client = new_client(self.ledgers.cluster, store, self.ledgers.placement, FAST)
        ports = Ports(random=random.Random(len(self.processes)))
        process = AutoRecovery(name, store, client, self.ledgers.placement, self.bookies, self.settings, ports)
        process.start()
        self.processes.append(process)
        return process

    async def closed_ledger(self, ensemble: str, entries: int = 10, **quorums: Any) -> int:
        writer = await self.open_ledger(ensemble, entries, **quorums)
        await writer.close()
        return writer.ledger_id

    async def open_ledger(self, ensemble: str, entries: int = 10, **quorums: Any) -> LedgerWriter:
        writer = await self.ledgers.create_on(ensemble, **quorums)
        if entries:
            await append(writer, [b"entry %d" % number for number in range(entries)])
        return writer

    def kill(self, *names: str) -> None:
        for name in names:
            self.ledgers.cluster[name].down = True
            self.ledgers.cluster.not_registered.append(name)

    def revive(self, name: str) -> None:
        self.ledgers.cluster[name].down = False
        self.ledgers.cluster.not_registered.remove(name)

    async def drain(self, name: str) -> None:
        await draining_bookies(self.store).create(name, DrainingBookie(bookie_id=name, since_ms=0))
        self.ledgers.cluster.not_registered.append(name)  # as the bookie directory does

    async def request(self, name: str) -> None:
        await repair_requests(self.store).create(name, RepairRequest(bookie_id=name, since_ms=0))

    async def switch_off(self) -> None:
        await repair_switch(self.store).create(None, RepairSwitch(off_since_ms=0, reason="maintenance"))

    async def switch_on(self) -> None:
        await repair_switch(self.store).delete(None, None)

    async def set_cookie(self, name: str, limbo_below: int | None = None, incarnation: str = "i") -> None:
        directories: dict[str, tuple[str, ...]] = {"data": ("/data",)}
        cookies = bookie_cookies(self.store)
        cookie = BookieCookie(
            layout_version=1,
            bookie_id=name,
            incarnation=incarnation,
            cluster_id="c",
            directories=directories,
            limbo_below=limbo_below,
        )
        found = await cookies.get(name)
        if found is None:
            await cookies.create(name, cookie)
        else:
            await cookies.replace(name, cookie, found.version)

    async def lose_disk(self, name: str, limbo_below: int, incarnation: str) -> None:
        """It comes back on an empty disk, in limbo."""
        bookie = self.ledgers.cluster[name]
        bookie.entries.clear()
        bookie.limbo = True
        await self.set_cookie(name, limbo_below, incarnation)
        self.bookies.incarnations[name] = f"{incarnation}.{limbo_below}"

    async def marks(self) -> dict[int, RepairMark]:
        found: dict[int, RepairMark] = {}
        async for ledger_id in list_repair_marks(self.store):
            if (mark := await repair_marks(self.store).get(ledger_id)) is not None:
                found[ledger_id] = mark.record
        return found

    async def audit(self) -> Any:
        found = await audit_record(self.store).get(None)
        return None if found is None else found.record

    def lacking(self, ledger: LedgerMetadata) -> list[tuple[str, int]]:
        """(bookie, entry) of each copy that a closed ledger's record promises and that is not there."""
        lacking = []
        assert ledger.last_entry_id is not None
        for entry_id in range(ledger.last_entry_id + 1):
            ensemble = ledger.fragment_of(entry_id).ensemble
            for turn in range(ledger.write_quorum):
                bookie = self.ledgers.cluster[ensemble[(entry_id + turn) % len(ensemble)]]
                group = bookie.entries.get(ledger.ledger_id, {}).get(entry_id)
                if bookie.down or group is None or not is_valid(group):
                    lacking.append((bookie.bookie_id, entry_id))
        return lacking

    async def is_whole(self, ledger_id: int) -> bool:
        return not self.lacking(await self.ledgers.record(ledger_id))

    async def wait_whole(self, *ledger_ids: int, timeout_s: float = 300.0) -> float:
        """Return after how many seconds all are whole and no mark is left."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while await self.marks() or not all([await self.is_whole(ledger_id) for ledger_id in ledger_ids]):
            assert loop.time() - began < timeout_s, f"after {timeout_s:g} s: {await self.marks()}"
            await asyncio.sleep(0.5)
        return loop.time() - began

    async def wait_whole_after_recovery(self, ledger_id: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 300
        while not (await self.ledgers.record(ledger_id)).is_closed:
            assert loop.time() < deadline, f"ledger {ledger_id} is still open: {await self.marks()}"
            await asyncio.sleep(0.5)
        await self.wait_whole(ledger_id)

    async def wait_checked(self) -> None:
        """Wait until no recovered ledger is left to be checked."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 300
        while left := await list_names(self.store, keys.UNCHECKED_LEDGERS_KEY):
            assert loop.time() < deadline, f"not checked: {left}"
            await asyncio.sleep(0.5)

    async def wait_refilled(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 300
        while (audit := await self.audit()) is None or name not in audit.refilled:
            assert loop.time() < deadline, f"{name} is not refilled: {await self.marks()}"
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def repair_world(
    *names: str, settings: RecoverySettings = QUICK, ledger_settings: LedgerSettings = FAST
) -> AsyncIterator[RepairWorld]:
    async with ledger_world(*(names or "abcd"), settings=ledger_settings) as ledgers:
        for bookie in ledgers.cluster.bookies.values():
            bookie.checks_disk = True
        world = RepairWorld(ledgers, KnownBookies(ledgers.cluster), settings)
        for name in ledgers.cluster.bookies:
            await world.set_cookie(name)
        try:
            yield world
        finally:
            for process in world.processes:
                await process.aclose()
                await process.worker._client.aclose()
