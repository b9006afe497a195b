"""A bookie whose index was lost: what it serves, refuses and never denies after `cepheid bookie-shell rebuild-index`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cepheid_bookie import MetadataCookies
from cepheid_bookie.entry_block import HEADER_BYTES
from cepheid_bookie.errors import CookieError
from cepheid_bookie.index_rebuild import IndexRebuild, RebuildFailedError, RebuildReport
from cepheid_bookie.stopped_bookie import NoJournalHereError, StoppedBookie
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import IDENTITY, KEY, add, added, group_of, payload_of, read_all
from tests.bookie.stopped_directories import DELETED, FENCED, HELD, SIZE, open_bookie, write_directory

NEW = 2_000  # above the watermark: one block of 1000 ids was taken


class Lost:
    """A directory without its index, and the metadata that remembers the bookie."""

    def __init__(self, directory: Path, store: MemoryStore) -> None:
        self.directory = directory
        self.journal: Path | None = None
        self.store = store
        self.cookies = MetadataCookies(store, {"data": (str(directory),)})

    async def rebuild(self, *, until: str = "swap", accept_searched: bool = False) -> RebuildReport:
        with StoppedBookie(self.directory, self.journal, to_change=True) as bookie:
            rebuild = IndexRebuild(bookie)
            await rebuild.check(self.cookies)
            report = rebuild.build(dict.fromkeys(HELD, KEY), accept_searched=accept_searched)
            if until != "build":
                await rebuild.begin_limbo(self.cookies, LedgerIds(self.store).take)
            if until == "swap":
                rebuild.swap()
        return report


async def make_lost(directory: Path) -> Lost:
    store = MemoryStore(MemoryTree())
    stopped = await write_directory(directory, store)
    (stopped / "LIFE").write_text((directory / "running" / "LIFE").read_text())  # the copy is what goes on
    shutil.rmtree(stopped / "index")
    return Lost(stopped, store)


async def test_a_rebuilt_bookie_serves_all_it_had_denies_nothing_and_takes_only_what_recovery_sends(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    report = await lost.rebuild()
    assert (report.problems, report.limbo_below, report.old_index) == ([], 1001, None)
    bookie = await open_bookie(lost.directory, lost.store)
    try:
        for ledger_id, count in HELD.items():
            entries, missing = await read_all(bookie, ledger_id, 0, count)
            assert missing == {count: Status.UNKNOWN}
            assert {entry_id: entry[36:] for entry_id, entry in entries.items()} == {
                entry_id: payload_of(ledger_id, entry_id, SIZE) for entry_id in range(count)
            }
        for ledger_id in (FENCED, 77):
            assert await read_all(bookie, ledger_id, 0, 1) == ({}, dict.fromkeys((0, 1), Status.UNKNOWN))
        assert (await bookie.read_lac(LacRequest(FENCED, KEY))).status is Status.UNKNOWN
        for ledger_id in (1, FENCED, 77):
            (refused,) = await add(bookie, group_of(ledger_id, 500))
            assert refused.status in (Status.FENCED, Status.READ_ONLY), ledger_id
            await added(bookie, group_of(ledger_id, 500), recovery=True)
        await added(bookie, group_of(NEW, 0))
        assert (await read_all(bookie, NEW, 1, 1))[1] == {1: Status.NO_ENTRY}
    finally:
        await bookie.aclose()


async def test_a_bookie_without_its_index_refuses_to_start_and_the_rebuild_can_be_cut_off_anywhere(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    for until in ("build", "limbo"):
        with pytest.raises(
            CookieError, match=r"the block index of bookie-1 is not stamped: .* `cepheid bookie-shell rebuild-index`"
        ):
            await open_bookie(lost.directory, lost.store)
        await lost.rebuild(until=until)
    report = await lost.rebuild()
    assert report.old_index == "index.damaged-1", "a start that was refused had made an empty one"
    bookie = await open_bookie(lost.directory, lost.store)
    await bookie.aclose()


async def test_a_second_rebuild_has_a_higher_watermark_so_that_auditors_see_another_loss(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    assert [(await lost.rebuild()).limbo_below for _ in range(2)] == [1001, 2001]


async def test_a_rebuild_knows_keys_from_the_journal_and_names_ledgers_without_one(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    with StoppedBookie(lost.directory, to_change=True) as bookie:
        rebuild = IndexRebuild(bookie)
        assert rebuild.build({}).ledgers_without_key == []
        for segment in (lost.directory / "journal").iterdir():
            segment.unlink()
        assert IndexRebuild(bookie).build({1: KEY}).ledgers_without_key == [2, DELETED]


async def test_entries_of_a_damaged_block_that_are_intact_are_served_and_the_others_are_unknown(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    log = lost.directory / "entrylog" / "00000001.log"
    data = bytearray(log.read_bytes())
    data[4096 + HEADER_BYTES + 4 * 4 + 100] ^= 1  # entry 0 of ledger 1
    log.write_bytes(data)
    report = await lost.rebuild()
    assert report.damaged_blocks == 1
    assert "some of its entries are intact" in report.problems[0]
    bookie = await open_bookie(lost.directory, lost.store)
    try:
        entries, missing = await read_all(bookie, 1, 0, 9)
        assert sorted(entries) == list(range(1, 10))
        assert missing == {0: Status.BAD_DIGEST}
    finally:
        await bookie.aclose()


async def test_blocks_that_only_a_search_finds_are_left_out_unless_they_are_accepted(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    log = lost.directory / "entrylog" / "00000001.log"
    data = bytearray(log.read_bytes())
    data[4096 : 4096 + HEADER_BYTES] = bytes(HEADER_BYTES)
    log.write_bytes(data)
    left_out, accepted = await lost.rebuild(until="build"), await lost.rebuild(until="build", accept_searched=True)
    assert left_out.searched_blocks == accepted.searched_blocks > 0
    assert accepted.blocks == left_out.blocks + accepted.searched_blocks
    assert (left_out.unindexed_logs, accepted.unindexed_logs) == (["entrylog/00000001.log"], [])


async def test_a_new_index_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = await make_lost(tmp_path)

    def is_full(*_: object) -> None:
        raise Exception("IO error: No space left on device")  # as the database raises it

    monkeypatch.setattr("cepheid_bookie.index_rebuild.RocksBlockIndex.write", is_full)
    with pytest.raises(RebuildFailedError, match=r"the new index .* cannot be written: IO error: No space left on device"):
        await lost.rebuild()
    assert not (lost.directory / "index").exists()


async def test_a_rebuild_is_refused_for_directories_that_metadata_does_not_know(tmp_path: Path) -> None:
    lost = await make_lost(tmp_path)
    other = Lost(lost.directory, MemoryStore(MemoryTree()))
    with pytest.raises(CookieError, match="metadata has no cookie of bookie bookie-1; check that --metadata"):
        await other.rebuild()
    await write_directory(tmp_path / "other", other.store, IDENTITY)
    with pytest.raises(CookieError, match="metadata knows incarnation"):
        await other.rebuild()
    (lost.directory / "VERSION").write_text("garbage")
    with pytest.raises(CookieError, match=r"the data directory has no readable cookie: .*garbage"):
        await lost.rebuild()


async def test_a_bookie_with_a_journal_of_its_own_needs_it_for_the_rebuild(tmp_path: Path) -> None:
    store, data, journal = MemoryStore(MemoryTree()), tmp_path / "data", tmp_path / "elsewhere"
    await LedgerIds(store).take()
    bookie = await open_bookie(data, store, journal=journal)
    await added(bookie, group_of(1, 0, 10))
    await bookie.aclose()
    shutil.rmtree(data / "index")
    lost = Lost(data, store)
    with (
        pytest.raises(NoJournalHereError, match=r"there is no journal in .*--journal"),
        StoppedBookie(data, tmp_path, to_change=True),
    ):
        pass
    with pytest.raises(CookieError, match=r"keeps its journal in .*, and is started without that; name it: --journal"):
        await lost.rebuild()
    lost.journal = journal
    lost.cookies = MetadataCookies(store, {"data": (str(data),), "journal": (str(journal),)})
    await lost.rebuild()
    assert (data / "VERSION").read_text() == (journal / "VERSION").read_text()
    bookie = await open_bookie(data, store, journal=journal)
    assert sorted((await read_all(bookie, 1, 0, 9))[0]) == list(range(10))
    await bookie.aclose()


@pytest.mark.parametrize("flushed", [False, True])
async def test_swapped_directories_are_refused_and_serve_when_they_are_exchanged(tmp_path: Path, flushed: bool) -> None:
    store, data, journal, running = MemoryStore(MemoryTree()), tmp_path / "data", tmp_path / "journal", tmp_path / "running"
    await LedgerIds(store).take()
    bookie = await open_bookie(running / "data", store, journal=running / "journal")
    await added(bookie, group_of(1, 0, 10))
    if flushed:
        await bookie.checkpoint()
    for directory in (data, journal):
        shutil.copytree(running / directory.name, directory)
    await bookie.aclose()
    for directory in (data, journal):
        shutil.copy(running / directory.name / "LIFE", directory)
    with pytest.raises(CookieError, match=r"directories are swapped: the data directory holds a journal.*exchange --data-dir"):
        await open_bookie(journal, store, journal=data)
    with pytest.raises(CookieError, match="directories are swapped"), StoppedBookie(journal, data, to_change=True):
        pass
    bookie = await open_bookie(data, store, journal=journal)
    assert sorted((await read_all(bookie, 1, 0, 9))[0]) == list(range(10))
    await bookie.aclose()
