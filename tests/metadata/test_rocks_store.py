"""The RocksDB store where it is more than the contract: durability, group commit, what it says about its directory."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
import rocksdict

from cepheid_metadata import (
    Create,
    Delete,
    KeyExistsError,
    NewerFormatError,
    StoreClosedError,
    StoreDamagedError,
    StoreInUseError,
    StoreOpenError,
    Versioned,
)
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports
from tests.metadata.store_process import StoreProcess


async def open_store(directory: Path) -> RocksStore:
    return await RocksStore.open(directory, Ports())


async def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "new" / "metadata")
    await store.create("/a/b", b"\x00\xff")
    await store.put("/a/b", b"two", 0)
    assert await store.create("/q/n-", b"", sequential=True) == "/q/n-0000000000"
    await store.aclose()
    store = await open_store(tmp_path / "new" / "metadata")
    assert await store.get("/a/b") == Versioned(b"two", 1)
    assert await store.children("/") == ["a", "q"]
    assert await store.create("/q/n-", b"", sequential=True) == "/q/n-0000000001"
    await store.delete("/a/b", 1)
    await store.delete("/a", 0)
    await store.aclose()


async def test_a_thousand_writes_at_once_cost_a_few_syncs(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await asyncio.gather(*(store.create(f"/many/{n:04}", b"x") for n in range(1_000)))
    assert store.statistics()["writes"] == 1_000
    assert store.statistics()["write_groups"] <= 2
    await asyncio.gather(*(store.get(f"/many/{n:04}") for n in range(1_000)))
    assert store.statistics()["read_groups"] <= 2
    assert len(await store.children("/many")) == 1_000
    await store.aclose()


async def test_requests_of_one_group_are_decided_in_order(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    results = await asyncio.gather(
        store.create("/a", b"0"),
        store.create("/a", b"again"),
        store.put("/a", b"1", 0),
        store.put("/a", b"2", 1),
        store.delete("/a", 2),
        store.create("/a", b"anew"),
        store.create("/e", b"", ephemeral=True),
        store.delete("/e", 0),
        return_exceptions=True,
    )
    assert isinstance(results[1], KeyExistsError)
    assert [*results[:1], *results[2:]] == ["/a", 1, 2, None, "/a", "/e", None]
    assert store.statistics()["write_groups"] == 1
    assert await store.get("/a") == Versioned(b"anew", 0)
    assert await store.children("/") == ["a"]
    await store.aclose()


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_persistent_key_in_the_place_of_an_ephemeral_one_stays(tmp_path: Path, at_once: bool) -> None:
    store = await open_store(tmp_path)
    for old, new in ((True, False), (False, True)):
        key = f"/was-ephemeral-{old}"
        await store.create(key, b"old", ephemeral=old)
        ops = [Delete(key, 0), Create(key, b"new", ephemeral=new)]
        for group in [ops] if at_once else [[op] for op in ops]:
            await store.multi(group)
    await store.aclose()
    store = await open_store(tmp_path)
    assert await store.get("/was-ephemeral-True") == Versioned(b"new", 0)
    assert not await store.exists("/was-ephemeral-False")
    await store.aclose()


async def test_a_cancelled_caller_leaves_the_store_whole(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    calls = [asyncio.create_task(store.create(f"/a/{n}", b"")) for n in range(10)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    names = await store.children("/a")
    assert set(names) >= {"1", "3", "5", "7", "9"}  # the cancelled ones may have happened or not
    await store.create("/b", b"")
    assert "0 waiting" in repr(store)
    await store.aclose()


async def test_closing_answers_everybody(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # a server of other tests may run in this process
    store = await open_store(tmp_path)
    calls = [asyncio.create_task(store.create(f"/a/{n:04}", b"")) for n in range(3_000)]
    await asyncio.sleep(0)  # the first group is on its way, the others wait
    await asyncio.sleep(0)
    await store.aclose()
    results = await asyncio.gather(*calls, return_exceptions=True)
    made = [result for result in results if isinstance(result, str)]
    assert all(isinstance(result, str | StoreClosedError) for result in results)
    assert 0 < len(made) < 3_000
    store = await open_store(tmp_path)
    assert len(await store.children("/a")) == len(made)
    await store.aclose()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("metadata")]


async def test_a_directory_in_use_is_refused_by_name(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    with pytest.raises(StoreInUseError, match=f"another process has the metadata in {tmp_path} open .*choose another"):
        await open_store(tmp_path)
    other = await asyncio.create_subprocess_exec(
        *StoreProcess.command("open", tmp_path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await other.communicate()
    assert f"StoreInUseError: another process has the metadata in {tmp_path} open" in said.decode()
    await store.create("/still", b"works")
    await store.aclose()


def raw_database(directory: Path) -> rocksdict.Rdict:
    return rocksdict.Rdict(str(directory), rocksdict.Options(raw_mode=True))


async def test_a_newer_format_is_refused_by_name_and_untouched(tmp_path: Path) -> None:
    await (await open_store(tmp_path)).aclose()
    raw = raw_database(tmp_path)
    raw[b"mformat"] = b"2"
    raw.close()
    with pytest.raises(NewerFormatError, match=f"metadata in {tmp_path} has format 2; this release knows formats up to 1"):
        await open_store(tmp_path)
    raw = raw_database(tmp_path)
    assert raw[b"mformat"] == b"2"
    raw.close()


async def test_another_program_s_database_is_refused(tmp_path: Path) -> None:
    raw = raw_database(tmp_path)
    raw[b"theirs"] = b"1"
    raw.close()
    with pytest.raises(StoreOpenError, match="not Cepheid's metadata"):
        await open_store(tmp_path)


async def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreOpenError, match=f"metadata in {tmp_path}/file cannot be opened"):
        await open_store(tmp_path / "file")


async def test_damage_in_the_middle_of_the_log_stops_the_open(tmp_path: Path) -> None:
    """Skipping it would forget what was acknowledged. (A torn end is a write that nobody was told of.)"""
    crashed, damaged, torn = tmp_path / "crashed", tmp_path / "damaged", tmp_path / "torn"
    store = await open_store(tmp_path / "alive")
    for n in range(50):
        await store.create(f"/a/{n:02}", b"x" * 500)
    shutil.copytree(tmp_path / "alive", crashed)  # before an orderly close empties the log
    await store.aclose()

    shutil.copytree(crashed, damaged)
    log = max(damaged.glob("*.log"), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    with pytest.raises(StoreDamagedError, match=f"{damaged}.*keep a copy of the directory"):
        await open_store(damaged)

    shutil.copytree(crashed, torn)
    log = torn / log.name
    log.write_bytes(log.read_bytes()[:-10])
    store = await open_store(torn)
    assert await store.children("/a") == [f"{n:02}" for n in range(49)]
    await store.aclose()
