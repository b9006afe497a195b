"""SIGKILL and a full disk: what was acknowledged is there, and the store comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports
from tests.metadata.store_process import StoreProcess
from tests.support import run_async

pytestmark = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("lines_until_kill", [1, 200, 3_000])
def test_what_was_acknowledged_survives_sigkill(tmp_path: Path, lines_until_kill: int) -> None:
    process = StoreProcess("create-for-ever", tmp_path)
    said = process.read_lines(lines_until_kill)
    said += process.kill()

    async def main() -> None:
        store = await RocksStore.open(tmp_path, Ports())
        for line in said:
            verb, key = line.split()
            found = await store.get(key)
            assert found is not None, line
            assert verb == "created" or (found.value, found.version) == (b"again", 1), line
        # Groups are atomic, so listings and nodes agree: nothing is half made.
        for name in await store.children("/made"):
            keys = [f"/made/{name}/{child}" for child in await store.children(f"/made/{name}")]
            assert keys == [f"/made/{name}/{n:06}" for n in range(len(keys))]
            for key in reversed(keys):
                await store.delete(key, None)
            await store.delete(f"/made/{name}", None)
        assert await store.children("/made") == []
        await store.aclose()

    assert len(said) >= lines_until_kill
    run_async(main())


async def test_a_full_disk_refuses_writes_serves_reads_and_is_left_behind(tmp_path: Path) -> None:
    process = StoreProcess("run-out-of-space", tmp_path)
    first, second, suspended, readable, connected, kept, closed = process.read_lines(7)
    process.kill()
    assert first.startswith(f"refused True False writing metadata in {tmp_path} failed, nothing was changed: IO error")
    assert second.startswith(f"refused True False metadata in {tmp_path} cannot be written now")
    assert suspended == "state SUSPENDED"
    assert readable == "readable 50 True False"
    assert connected == "state CONNECTED"
    assert kept == "kept 50 True"  # watchers are told to look again
    assert closed == "closed"
    store = await RocksStore.open(tmp_path, Ports())
    assert len(await store.children("/made")) == 51
    await store.aclose()


@pytest.mark.slow
def test_a_failed_write_reopens_the_store_at_once_where_there_is_room(tmp_path: Path) -> None:
    process = StoreProcess("run-short-of-space", tmp_path)
    assert process.read_lines(1) == ["refused 2 CONNECTED 45"]
    process.kill()
