"""Bits flipped in every kind of file of a bookie: a start that names what is wrong, or a bookie that gives no wrong entry."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, RealDisk
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_ports import CepheidError, Ports
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import IDENTITY, KEY, KiB, add, added, entries_of, group_of, read_all, small_settings
from tests.support import run_async

LEDGERS = range(1, 301)
IN_JOURNAL = 400
FENCED = 7
KINDS = (
    "VERSION",
    "SCRUB",
    "mark.*",
    "journal/*",
    "entrylog/*",
    "index/*.sst",
    "index/*.log",
    "index/MANIFEST-*",
    "index/CURRENT",
    "index/OPTIONS-*",
)


async def open_bookie(directory: Path) -> Bookie:
    settings = small_settings(write_cache_bytes=1024 * KiB)
    return await Bookie.open(IDENTITY, settings, RealDisk(directory), RocksBlockIndex(directory / "index"), Ports())


async def write(directory: Path) -> None:
    """Three lives of a bookie, so that the index has tables; the last one ends like one that was killed."""
    for life in range(3):
        bookie = await open_bookie(directory / "running")
        await added(bookie, *[group_of(ledger_id, 10 * life, 10) for ledger_id in LEDGERS])
        await bookie.checkpoint()
        await bookie.read_lac(LacRequest(FENCED, KEY, fence=True)) if life == 2 else None
        await bookie.checkpoint()
        await added(bookie, group_of(IN_JOURNAL, 5 * life, 5))
        await bookie.scrubber.scrub_all()
        if life == 2:
            shutil.copytree(directory / "running", directory / "killed")
        await bookie.aclose()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bookie")
    run_async(write(directory))
    return directory / "killed"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
async def test_flipped_bits_give_a_named_error_or_no_wrong_entry(killed: Path, tmp_path: Path, kind: str, seed: int) -> None:
    chance = random.Random(f"{kind}/{seed}")
    shutil.copytree(killed, tmp_path / "data")
    paths = [path for path in sorted((tmp_path / "data").glob(kind)) if path.stat().st_size]
    assert paths, f"a bookie has no {kind}"
    path = chance.choice(paths)
    content = bytearray(path.read_bytes())
    used = len(bytes(content).rstrip(b"\0"))  # a journal segment is longer than what is in it
    for _ in range(chance.choice((1, 3, 20))):
        content[chance.randrange(used)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    try:
        bookie = await open_bookie(tmp_path / "data")
    except CepheidError:
        return
    try:
        for ledger_id in (*LEDGERS, IN_JOURNAL):
            per_life = 5 if ledger_id == IN_JOURNAL else 10
            written = entries_of([group_of(ledger_id, life * per_life, per_life) for life in range(3)])
            found, missing = await read_all(bookie, ledger_id, 0, 3 * per_life - 1)
            assert found.items() <= written.items()
            if not kind.startswith("journal"):  # what a damaged end of the journal had is not known to have been synced
                assert not any(status.certain_no for status in missing.values()), missing
        if not kind.startswith("journal"):
            (answer,) = await add(bookie, group_of(FENCED, 30))
            assert answer.status in (Status.FENCED, Status.IO_ERROR, Status.READ_ONLY)
    finally:
        await bookie.aclose()
