"""One bit on one of three bookies: the scrubber finds it, repair copies the entry again, and the bookie lets go of the block."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cepheid_bookie import Bookie, MetadataDamage
from cepheid_bookie.damaged_blocks import Outlook
from cepheid_bookie.entry_log import log_path
from cepheid_ledger import LedgerClient, RackAwarePlacement
from cepheid_metadata import MemoryStore, ShortReason, ledger_records, list_repair_marks, repair_marks
from cepheid_ports import Ports
from cepheid_recovery import AutoRecovery, RecoverySettings
from tests.bookie.bookie_support import read_all
from tests.ledger.ledger_world import append
from tests.ledger.test_real_bookies import RealCluster, real_cluster
from tests.recovery.repair_world import KnownBookies

QUICK = RecoverySettings(grace_s=60.0, poll_s=0.05, retry_s=0.1, checks_per_s=1000.0)
PAYLOADS = [b"entry %d" % number * 20 for number in range(60)]


class AllRegistered(KnownBookies):
    """Bookies that all run."""

    def __init__(self, cluster: RealCluster) -> None:
        super().__init__(cast(Any, cluster))

    def writable(self) -> Sequence[str]:
        return self.cluster.bookie_ids

    registered = expected = writable


async def write_ledger(client: LedgerClient, cluster: RealCluster) -> int:
    size = len(cluster.bookie_ids)
    writer = await client.create(ensemble_size=size, write_quorum=size, ack_quorum=size, custom={"topic": "orders"})
    await append(writer, PAYLOADS)
    await writer.close()
    for bookie in cluster.bookies.values():
        await bookie.checkpoint()
    return writer.ledger_id


def flip_bit(directory: Path, bookie: Bookie, payload: bytes) -> None:
    """On the disk, behind the back of everything that runs."""
    (block,) = bookie._directories.index.blocks_after(None, 10)
    path = directory / bookie.bookie_id / "data" / log_path(block.log_id)
    data = bytearray(path.read_bytes())
    data[data.index(payload) + 3] ^= 4
    path.write_bytes(data)


async def mend_until(bookie: Bookie, outlook: Outlook, count: int) -> None:
    """What happens by itself, without the waiting."""
    async with asyncio.timeout(20):
        while bookie.statistics().scrub.damaged[outlook] != count:
            await bookie.scrubber.damaged.look_again()
            await bookie.checkpoint()
            await asyncio.sleep(0.05)


async def lost_runs(store: MemoryStore, ledger_id: int) -> list[tuple[int, int]]:
    """Wait until a worker has tried the ledger; return the entries of which it found no valid copy."""
    for _ in range(400):
        mark = await repair_marks(store).get(ledger_id)
        if mark is not None and mark.record.lost:
            return [(run.first, run.last) for run in mark.record.lost]
        await asyncio.sleep(0.05)
    return []


def repairing(cluster: RealCluster, client: LedgerClient, store: MemoryStore) -> AutoRecovery:
    placement = RackAwarePlacement(lambda: cluster.bookie_ids, random.Random(1))
    return AutoRecovery("r1", store, client, placement, AllRegistered(cluster), QUICK, Ports())


@pytest.mark.parametrize("when", ["repair runs", "repair was away"])
async def test_the_copy_is_made_again_before_a_reader_meets_the_damage(tmp_path: Path, when: str) -> None:
    async with real_cluster(tmp_path, over_grpc=False) as cluster:
        store = MemoryStore(cluster.tree)
        client = cluster.client(store)
        recovery = repairing(cluster, client, store)
        ledger_id = await write_ledger(client, cluster)
        victim = cluster.bookies["b"]
        flip_bit(tmp_path, victim, PAYLOADS[20])
        victim.scrubber.damaged.reports = MetadataDamage(store, "b", Ports())
        await victim.scrubber.scrub_all()
        mark = await repair_marks(store).get(ledger_id)
        assert mark is not None
        assert mark.record.bookies == {"b": ShortReason.DAMAGED}
        if when == "repair was away":
            await victim.scrubber.damaged.look_again()
            again = await repair_marks(store).get(ledger_id)
            assert again == mark, "a mark that waits for its worker is not renewed"
        recovery.start()
        await mend_until(victim, Outlook.REPAIR, 0)
        assert victim.statistics().scrub.mended == 1
        record = await ledger_records(store).get(ledger_id)
        assert record is not None
        assert {name for fragment in record.record.fragments for name in fragment.ensemble} == {"a", "b", "c"}
        for bookie in cluster.bookies.values():
            entries, missing = await read_all(bookie, ledger_id, 0, len(PAYLOADS) - 1)
            assert (len(entries), missing) == (len(PAYLOADS), {}), bookie
        assert [one async for one in list_repair_marks(store)] == []
        await victim.scrubber.scrub_all()
        assert victim.statistics().scrub.found == 1, "a later pass finds nothing more"
        await recovery.aclose()
        await client.aclose()


async def test_without_another_copy_it_is_named_and_nothing_is_invented(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with real_cluster(tmp_path, over_grpc=False, bookie_ids=("a",)) as cluster:
        store = MemoryStore(cluster.tree)
        client = cluster.client(store)
        recovery = repairing(cluster, client, store)
        ledger_id = await write_ledger(client, cluster)
        bookie = cluster.bookies["a"]
        flip_bit(tmp_path, bookie, PAYLOADS[20])
        bookie.scrubber.damaged.reports = MetadataDamage(store, "a", Ports())
        await bookie.scrubber.scrub_all()
        assert "no other bookie has these entries" in str([record.__dict__.get("hint") for record in caplog.records])
        recovery.start()
        await mend_until(bookie, Outlook.NO_REPLICA, 1)
        assert await lost_runs(store, ledger_id) == [(20, 20)]
        await bookie.scrubber.damaged.look_again()
        entries, missing = await read_all(bookie, ledger_id, 0, len(PAYLOADS) - 1)
        assert (len(entries), list(missing)) == (len(PAYLOADS) - 1, [20])
        assert bookie.statistics().scrub.mended == 0
        await recovery.aclose()
        await client.aclose()
