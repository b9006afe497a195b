"""Racks in a process with a broker: which bookies are near, and where the bookies of a standalone process are."""

from __future__ import annotations

from pathlib import Path

from cepheid_bookie import StorageSettings
from cepheid_broker.local_bookies import LocalBookies
from cepheid_broker.serving import distance_from
from cepheid_metadata import MemoryStore, MemoryTree, available_bookies, found_cluster
from cepheid_ports import ELSEWHERE, SAME_RACK, SAME_REGION, Ports


async def test_bookies_of_a_standalone_process_are_registered_in_its_rack_and_near_it(tmp_path: Path) -> None:
    store, ports, failures = MemoryStore(MemoryTree()), Ports(), list[BaseException]()
    identity = await found_cluster(store, "standalone", ports)
    settings = StorageSettings(min_free_journal_bytes=1, min_free_data_bytes=1)
    bookies = await LocalBookies.open(tmp_path, 2, settings, identity.cluster_id, store, ports, failures.append, rack="eu/1")
    try:
        found = await available_bookies(store).get("bookie-2")
        assert found is not None
        assert found.record.rack == "eu/1"
        assert bookies.racks() == {"bookie-1": "eu/1", "bookie-2": "eu/1"}
        distances = {rack: distance_from(rack, bookies) for rack in ("eu/1", "eu/2", "us/1")}
        found_distances = {rack: of("bookie-1") for rack, of in distances.items() if of is not None}
        assert found_distances == {"eu/1": SAME_RACK, "eu/2": SAME_REGION, "us/1": ELSEWHERE}
        assert distance_from(None, bookies) is None, "a broker without a rack reads from all alike"
    finally:
        await bookies.aclose()
    assert failures == []
