"""The bookies of a standalone process: their racks, and one that is stopped and started again."""

from __future__ import annotations

from pathlib import Path

from cepheid_bookie import StorageSettings
from cepheid_bookie.access import OPEN_ACCESS
from cepheid_bookie.denials import Denials
from cepheid_bookie.settings import BookieServerSettings
from cepheid_broker.local_bookies import LocalBookies
from cepheid_broker.serving import distance_from
from cepheid_metadata import MemoryStore, MemoryTree, available_bookies, found_cluster
from cepheid_ports import ELSEWHERE, SAME_RACK, SAME_REGION, Ports
from cepheid_security.peer_settings import BookieTlsSettings


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


async def test_a_bookie_that_is_stopped_and_started_is_registered_again_at_its_port(tmp_path: Path) -> None:
    store, ports, failures = MemoryStore(MemoryTree()), Ports(), list[BaseException]()
    identity = await found_cluster(store, "standalone", ports)
    settings = StorageSettings(min_free_journal_bytes=1, min_free_data_bytes=1)
    bookies = await LocalBookies.open(tmp_path, 2, settings, identity.cluster_id, store, ports, failures.append)
    noted: list[tuple[str, str]] = []
    bookies.on_gone = lambda bookie_id: noted.append(("gone", bookie_id))
    bookies.on_back = lambda bookie_id: noted.append(("back", bookie_id))
    try:
        await bookies.stop("bookie-2")
        tls, served = BookieTlsSettings(), BookieServerSettings()
        await bookies.serve("127.0.0.1", 0, served, ports, tls=tls, access=OPEN_ACCESS, denials=Denials())
        assert await available_bookies(store).get("bookie-2") is None
        assert (bookies.registered(), bookies.problems()) == (["bookie-1"], ["bookie-2 is stopped"])
        addresses = []
        for _ in range(2):
            await bookies.start("bookie-2")
            found = await available_bookies(store).get("bookie-2")
            assert found is not None
            addresses.append(found.record.addresses["grpc"])
            await bookies.stop("bookie-2")
        assert addresses[0] == addresses[1]
        assert noted == [("gone", "bookie-2"), *[("back", "bookie-2"), ("gone", "bookie-2")] * 2]
    finally:
        await bookies.aclose()
    assert failures == []
