"""`cepheid init` while its metadata store comes and goes, as in the first minute of a cluster on a busy machine; and on an empty
store beside the data of a bookie."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cepheid_bookie.cookie import Cookie, save_cookie
from cepheid_bookie.disk import RealDisk
from cepheid_cli import init
from cepheid_metadata import ClusterNotFoundedError, MetadataError, SessionLostError, StoreUnavailableError
from cepheid_metadata.open_store import open_store
from cepheid_metadata.upgrade import NewerStorageFormatError, StorageFormat, storage_format_record
from cepheid_ports import Ports


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("failures", "wait_s", "outcome"),
    [
        ([StoreUnavailableError("the connection was lost", outcome_unknown=True), SessionLostError("it expired")], 60.0, "founded"),
        ([StoreUnavailableError("the connection was lost")] * 9, 5.0, "the connection was lost"),
        ([MetadataError("damaged")], 60.0, "damaged"),  # waiting would not help
    ],
)
async def test_it_begins_again_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, failures: list[MetadataError], wait_s: float, outcome: str
) -> None:
    left = list(failures)

    async def found_once(*_: Any) -> str:
        if left:
            raise left.pop(0)
        return "founded"

    monkeypatch.setattr(init, "_found_once", found_once)
    began = asyncio.get_running_loop().time()
    try:
        said = await init._found(init.Founding("zk://x", "east"), wait_s)
    except MetadataError as error:
        said = str(error)
    assert said == outcome
    assert asyncio.get_running_loop().time() - began <= wait_s


async def test_no_cluster_is_founded_beside_the_data_of_one_that_is_not_there(tmp_path: Path) -> None:
    """As when all volumes of ZooKeeper are lost: bookies would refuse the new cluster, and a restore needs an empty store."""
    metadata, data = f"rocksdb:{tmp_path / 'metadata'}", tmp_path / "bookie"
    founding = init.Founding(metadata, "east", data_dir=data)
    data.mkdir()
    save_cookie(RealDisk(data), Cookie("bookie-0", "lost", "incarnation"))
    with pytest.raises(init.ClusterLostError, match=r"has data of cluster lost, and .* holds no cluster") as caught:
        await init._found(founding, 5.0)
    assert "cepheid metadata restore" in caught.value.hint
    with pytest.raises(ClusterNotFoundedError):  # nor was it founded
        await init._found(init.Founding(metadata, "east", join=True), 0.0)


async def test_bookies_of_another_cluster_are_named_before_they_start(tmp_path: Path) -> None:
    metadata, data = f"rocksdb:{tmp_path / 'metadata'}", tmp_path / "bookie"
    founding = init.Founding(metadata, "east", data_dir=data)  # the directory is not there yet
    said = await init._found(founding, 5.0)
    found = said.partition("(")[2].partition(")")[0]
    data.mkdir()
    save_cookie(RealDisk(data), Cookie("bookie-0", found, "incarnation"))
    assert await init._found(founding, 5.0) == said
    save_cookie(RealDisk(data), Cookie("bookie-0", "lost", "incarnation"))
    with pytest.raises(init.ClusterLostError, match=rf"has data of cluster lost, and .* holds cluster {found}"):
        await init._found(founding, 5.0)


async def test_a_cluster_whose_upgrade_was_finished_by_a_newer_release_is_refused(tmp_path: Path) -> None:
    """`helm rollback` asks this before it changes anything."""
    metadata = f"rocksdb:{tmp_path / 'metadata'}"
    await init._found(init.Founding(metadata, "east"), 5.0)
    store = await open_store(metadata, Ports())
    found = await storage_format_record(store).get(None)
    assert found is not None
    await storage_format_record(store).replace(None, StorageFormat(storage_format=99), found.version)
    await store.aclose()
    with pytest.raises(NewerStorageFormatError, match="storage format 99"):
        await init._found(init.Founding(metadata, "east", join=True), 5.0)


@pytest.mark.virtual_time
async def test_joining_waits_for_the_process_that_founds_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [ClusterNotFoundedError("the metadata store holds no cluster")] * 3

    async def found_once(*_: Any) -> str:
        if outcomes:
            raise outcomes.pop()
        return "founded"

    monkeypatch.setattr(init, "_found_once", found_once)
    assert await init._found(init.Founding("zk://x", "east", join=True), 60.0) == "founded"
