"""`cepheid bookie-shell` as an operator types it, on the directory of a real bookie: what it shows, refuses and leaves alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_bookie.cookie import BookieIdentity
from cepheid_bookie.directory_report import KeptLog, compaction_of
from cepheid_bookie.disk import DirectoryInUseError, RealDisk
from cepheid_bookie.journal_format import BATCH_HEADER_BYTES
from cepheid_bookie.settings import StorageSettings
from cepheid_cli.bookie_shell import app
from cepheid_cli.ledger_owners import read_owners
from cepheid_metadata import DeletedLedgers, Fragment, LedgerMetadata, LedgerState, found_cluster, ledger_records
from cepheid_metadata.open_store import open_store
from cepheid_metadata.repair_views import report_missing, withdraw_missing
from cepheid_ports import CepheidError, Ports
from tests.bookie.bookie_support import payload_of
from tests.bookie.stopped_directories import DELETED, HELD, SIZE, open_bookie, write_directory
from tests.support import run_async

TOPIC = "persistent://public/default/orders"
COMMANDS = (
    ("files",),
    ("journal", "1"),
    ("log", "00000001.log"),
    ("entry", "1", "5", "--bytes"),
    ("entry", "5", "5", "--json"),
    ("ledgers",),
    ("why-not-freed",),
    ("cookie",),
)


class Shell:
    """A directory, and the metadata of its cluster: ledger 1 belongs to a topic, ledger 2 was deleted, ledger 5 is not known."""

    def __init__(self, data: Path, metadata: str) -> None:
        self.data = data
        self.metadata = metadata

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--data", str(self.data)])

    def says(self, *words: str) -> str:
        result = self(*words)
        assert result.exception is None, result.output
        return result.stdout

    def shows(self, *words: str) -> Any:
        return json.loads(self.says(*words, "--json"))

    def refusal(self, *words: str) -> str:
        result = self(*words)
        assert isinstance(result.exception, CepheidError), (result.exception, result.output)
        return str(result.exception)


async def _write(directory: Path) -> Shell:
    url = f"rocksdb:{directory / 'metadata'}"
    store = await open_store(url, Ports())
    identity = await found_cluster(store, "test", Ports())
    for ledger_id, use in ((1, "entries"), (2, "cursors")):
        ledger = LedgerMetadata(
            ledger_id=ledger_id,
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            state=LedgerState.CLOSED,
            fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1",)),),
            last_entry_id=HELD[ledger_id] - 1,
            length_bytes=HELD[ledger_id] * SIZE,
            creation_token=1,
            created_at_ms=1,
            custom={"topic": TOPIC, "use": use},
        )
        await ledger_records(store).create(ledger_id, ledger)
    found = await ledger_records(store).get(2)
    assert found is not None
    await DeletedLedgers(store).delete(found, 1_700_000_000_000, 3_600_000)
    data = await write_directory(directory, store, BookieIdentity("bookie-1", identity.cluster_id))
    await store.aclose()
    return Shell(data, url)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return run_async(_write(tmp_path_factory.mktemp("shell")))


@pytest.fixture
def shell(original: Shell, tmp_path: Path) -> Shell:
    """A copy to be damaged."""
    shutil.copytree(original.data, tmp_path / "data")
    return Shell(tmp_path / "data", original.metadata)


def test_files_shows_what_is_in_each_and_how_much_of_it_is_live(original: Shell) -> None:
    found = original.shows("files")
    assert [(log["file"], log["problem"], log["format_version"]) for log in found["logs"]] == [
        ("entrylog/00000001.log", "", 1),
        ("entrylog/00000002.log", "", 1),
    ]
    assert found["index"]["deleted"] == 1
    (segment, *_) = found["journal"]
    assert (segment["first_sequence"], segment["problem"]) == (1, "")
    lines = original.says("files").splitlines()
    assert lines[0].split() == ["file", "size", "format", "content", "live", "problem"]
    assert lines[-1].startswith("log mark  batch ")
    (original.data / "entrylog" / "00000001.log.copy").touch()
    assert [other["file"] for other in original.shows("files")["others"]] == ["entrylog/00000001.log.copy"]
    (original.data / "entrylog" / "00000001.log.copy").unlink()


def test_journal_lists_records_from_an_offset_on(original: Shell) -> None:
    first, *others = (Path(segment["file"]).name for segment in original.shows("files")["journal"])
    found = [record for name in (first, *others) for record in original.shows("journal", name)]
    kinds = {(record["record"], record["ledger_id"]) for record in found}
    assert {("entries", 1), ("entries", DELETED), ("ledger", 3)} <= kinds
    assert next(record["fenced"] for record in found if record["record"] == "ledger")
    batch = [record for record in found if record["batch"] == found[-1]["batch"]]
    assert original.shows("journal", others[-1], "--from", str(batch[0]["offset"] - BATCH_HEADER_BYTES)) == batch
    assert original.shows("journal", others[-1], "--from", str(batch[0]["offset"])) == []


def test_log_says_which_blocks_are_intact_and_used_by_the_index(original: Shell) -> None:
    blocks = original.shows("log", "2")
    assert {block["checksum"] for block in blocks} == {"ok"}
    assert {(block["ledger_id"], block["in_index"]) for log in ("1", "2") for block in original.shows("log", log)} == {
        (1, True), (2, True), (DELETED, False),
    }  # fmt: skip


def test_entry_says_where_the_copies_are_and_gives_the_bytes(original: Shell, tmp_path: Path) -> None:
    places = original.shows("entry", "1", "5")
    assert [place["file"].split("/")[0] for place in places] == ["entrylog", "journal"]
    assert {bytes.fromhex(place["entry"])[36:] for place in places} == {payload_of(1, 5, SIZE)}
    assert [place["file"].split("/")[0] for place in original.shows("entry", "5", "39")] == ["journal"]
    assert original.says("entry", "2", "0", "--bytes").splitlines()[-1].startswith("00000400")
    original.says("entry", "2", "0", "--save", str(tmp_path / "entry"))
    assert (tmp_path / "entry").read_bytes()[36:] == payload_of(2, 0, SIZE)
    assert "exists; name a new file" in original.refusal("entry", "2", "0", "--save", str(tmp_path / "entry"))


def test_ledgers_shows_disk_use_by_ledger_and_by_topic(original: Shell) -> None:
    found = {use["ledger_id"]: use for use in original.shows("ledgers", "--metadata", original.metadata)}
    assert [found[ledger_id]["last_entry_id"] for ledger_id in HELD] == [count - 1 for count in HELD.values()]
    assert [found[ledger_id]["owner"] for ledger_id in HELD] == [TOPIC, f"{TOPIC} (cursors)", "(not in metadata)"]
    assert (found[5]["log_bytes"], found[5]["journal_bytes"] > 40 * SIZE) == (0, True)
    topics = original.shows("ledgers", "--metadata", original.metadata, "--by-topic")
    assert topics[0]["owner"] == TOPIC
    assert topics[0]["log_bytes"] == found[1]["log_bytes"]
    assert original("ledgers", "--by-topic").exit_code == 2


def test_why_not_freed_names_the_ledger_its_topic_and_until_when(original: Shell) -> None:
    (one,) = original.shows("why-not-freed", "2", "--metadata", original.metadata)
    why = {ledger["ledger_id"]: ledger["why"] for ledger in one["ledgers"]}
    assert why[2].startswith(f"{TOPIC} (cursors): deleted, can be brought back until 2023-11-14 2")
    (_, table) = original.says("why-not-freed", "2", "--metadata", original.metadata).split("\n", 1)
    assert "entrylog/00000002.log" in table
    assert [log["compaction"] for log in original.shows("why-not-freed")] == ["not worth it"] * 2


def test_why_not_freed_names_the_rule_that_keeps_ledgers_of_which_metadata_lacks_too_many(original: Shell) -> None:
    async def report(missing: range) -> None:
        store = await open_store(original.metadata, Ports())
        await (report_missing(store, "bookie-1", 200, missing, 1) if missing else withdraw_missing(store, "bookie-1"))
        await store.aclose()

    run_async(report(range(5, 155)))
    assert run_async(read_owners(original.metadata)).why_kept(5, "bookie-1") == (
        "metadata lacks 150 ledgers of this bookie, too many to delete without confirmation: "
        "cepheid bookies confirm-missing bookie-1"
    )
    run_async(report(range(0)))
    assert run_async(read_owners(original.metadata)).why_kept(5, "bookie-1").startswith("nothing, as metadata does not have it")


def test_a_journal_directory_that_is_the_data_directory_is_locked_once(original: Shell) -> None:
    assert original.says("files", "--journal", str(original.data / ".")) == original.says("files")


@pytest.mark.parametrize("given_by", ["file", "environment", "file of standalone"])
def test_why_not_freed_goes_by_the_settings_of_the_bookie(
    original: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_by: str
) -> None:
    words = ["why-not-freed"]
    if given_by == "environment":
        monkeypatch.setenv("CEPHEID_BOOKIE_STORAGE__COMPACTION_MINOR_SHARE", "0.99")
        monkeypatch.setenv("CEPHEID_BOOKIE_STORAGE__COMPACTION_MAJOR_SHARE", "0.995")
    else:
        file = tmp_path / "settings.toml"
        file.write_text("[storage]\ncompaction_minor_share = 0.99\ncompaction_major_share = 0.995\n")
        words += ["--config", str(file), *(["--standalone"] if given_by == "file of standalone" else [])]
    assert {log["compaction"] for log in original.shows(*words)} != {"not worth it"}
    file = tmp_path / "misspelt.toml"
    file.write_text("[storage]\ncompaction_minor_shares = 0.5\n")
    assert "compaction_minor_share" in original.refusal("why-not-freed", "--config", str(file))


@pytest.mark.parametrize(
    ("live_bytes", "said"), [(0, "deleted"), (1_000, "next collection"), (50_000, "next major one"), (90_000, "not worth it")]
)
def test_why_not_freed_says_what_compaction_will_do(live_bytes: int, said: str) -> None:
    log = KeptLog(1, "entrylog/00000001.log", 4096 + 100_000, live_bytes, {7: live_bytes} if live_bytes else {})
    assert compaction_of(log, StorageSettings()) == said


def test_cookie_compares_directories_and_metadata(original: Shell, shell: Shell) -> None:
    words = ("cookie", "--metadata", original.metadata)
    assert original(*words).exit_code == 0
    assert len({row["incarnation"] for row in original.shows(*words)}) == 1
    text = (shell.data / "VERSION").read_text()
    (shell.data / "VERSION").write_text(text.replace('"incarnation": "', '"incarnation": "f'))
    assert shell(*words).exit_code == 1
    (shell.data / "VERSION").unlink()
    result = shell("cookie")
    assert (result.exit_code, "there is no cookie" in result.stdout) == (1, True)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_in_the_directory_changes(original: Shell, command: tuple[str, ...]) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = (path for path in original.data.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    directories = {path: path.stat().st_mtime_ns for path in (original.data, *original.data.iterdir()) if path.is_dir()}
    before = state()
    original.says(*command)
    assert state() == before
    assert {path: path.stat().st_mtime_ns for path in directories} == directories


@pytest.mark.parametrize("command", [*COMMANDS, ("rebuild-index", "--yes", "--metadata", "zk://nowhere")], ids=" ".join)
def test_the_directory_of_a_running_bookie_is_refused(shell: Shell, command: tuple[str, ...]) -> None:
    disk = RealDisk(shell.data)
    disk.lock()
    try:
        assert f"data directory {shell.data} is in use by another process (stop the other process" in shell.refusal(*command)
    finally:
        disk.unlock()


def test_a_bookie_cannot_start_while_its_directory_is_looked_at(shell: Shell) -> None:
    from cepheid_bookie.stopped_bookie import StoppedBookie

    with StoppedBookie(shell.data), pytest.raises(DirectoryInUseError):
        RealDisk(shell.data).lock()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("log", "7f"), "there is no entry log entrylog/0000007f.log in "),
        (("why-not-freed", "7f"), "there is no entry log entrylog/0000007f.log in "),
        (("journal", "7f"), "there is no journal segment journal/000000000000007f.journal in "),
        (("entry", "77", "0"), "this bookie has nothing of ledger 77"),
        (("entry", "1", "150"), "this bookie has ledger 1, but no entry 150 of it"),
        (("rebuild-index", "--metadata", "rocksdb:nowhere"), "the index of "),
    ],
)
def test_what_is_not_there_is_named(original: Shell, words: tuple[str, ...], reason: str) -> None:
    assert reason in original.refusal(*words)


def test_an_entry_of_a_deleted_ledger_is_found_as_long_as_the_journal_has_it(original: Shell) -> None:
    assert [place["file"].split("/")[0] for place in original.shows("entry", str(DELETED), "0")] == ["journal"]


@pytest.mark.parametrize("word", ["zz", "", "12345678901234567"])
def test_a_name_that_is_no_name_of_a_file_is_refused(original: Shell, word: str) -> None:
    for command in ("log", "journal"):
        assert original(command, word).exit_code == 2


def test_a_directory_that_is_not_a_bookies_is_refused(tmp_path: Path) -> None:
    assert "is not the data directory of a bookie" in Shell(tmp_path, "").refusal("files")
    assert f"there is no directory {tmp_path / 'nowhere'}" in Shell(tmp_path / "nowhere", "").refusal("files")
    assert not (tmp_path / "nowhere").exists()


def test_a_journal_elsewhere_is_asked_for(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (shell.data / "journal").rename(tmp_path / "other" / "journal")
    assert "name its directory: --journal" in shell.refusal("journal", "1")
    assert "name its directory: --journal" in shell.says("files")
    shutil.copy(shell.data / "VERSION", tmp_path / "other")
    assert shell("journal", "1", "--journal", str(tmp_path / "other")).exit_code == 0


def test_the_tables_on_the_page_have_the_columns_of_the_commands(original: Shell) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "operations.md").read_text().splitlines()
    shown = {
        line.split()[3]: (line.partition("bookie-shell ")[2].partition(" --data")[0], lines[number + 1])
        for number, line in enumerate(lines)
        if line.startswith("$ cepheid bookie-shell") and "rebuild-index" not in line
    }
    assert set(shown) == {"files", "ledgers", "why-not-freed", "entry"}
    for words, columns in shown.values():
        metadata = ("--metadata", original.metadata) if words in ("ledgers", "why-not-freed") else ()
        printed = original.says(*words.split(), *metadata).splitlines()[0]
        assert printed.split() == columns.split()


DAMAGED: dict[str, Callable[[Path], Path]] = {
    "journal": lambda data: data / "journal" / "0000000000000001.journal",
    "log": lambda data: data / "entrylog" / "00000001.log",
    "cookie": lambda data: data / "VERSION",
    "mark": lambda data: data / "mark.1",
    "index": lambda data: max((data / "index").glob("*.log"), key=lambda path: path.stat().st_size),
    "manifest": lambda data: next((data / "index").glob("MANIFEST-*")),
    "current": lambda data: data / "index" / "CURRENT",
    "life": lambda data: data / "LIFE",
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", DAMAGED)
def test_garbage_in_a_file_gives_a_named_error_or_a_part_and_never_a_wrong_entry(shell: Shell, kind: str, seed: int) -> None:
    chance, path = random.Random(f"{kind} {seed}"), DAMAGED[kind](shell.data)
    data = bytearray(path.read_bytes())
    written = len(data.rstrip(b"\0"))
    for _ in range(chance.choice((1, 5, 50))):
        data[chance.randrange(written)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    for command in COMMANDS:
        result = shell(*command)
        assert result.exception is None or isinstance(result.exception, CepheidError | SystemExit), (command, result.exception)
    for ledger_id, entry_id in ((1, 5), (2, 3), (5, 7), (1, 120)):
        result = shell("entry", str(ledger_id), str(entry_id), "--json")
        for place in json.loads(result.stdout) if result.stdout else ():
            assert place["entry"] is None or bytes.fromhex(place["entry"])[36:] == payload_of(ledger_id, entry_id, SIZE)


def test_without_an_index_an_entry_is_found_as_long_as_the_journal_has_it(shell: Shell) -> None:
    shutil.rmtree(shell.data / "index")
    result = shell("entry", "5", "5", "--bytes")
    assert result.exit_code == 0
    assert "journal/0000000000000003.journal" in result.stdout
    assert "there is no block index in" in result.stderr
    assert "cepheid bookie-shell rebuild-index" in shell.refusal("entry", "5", "999")


def test_without_its_journal_an_entry_is_found_that_an_entry_log_has(shell: Shell) -> None:
    shutil.rmtree(shell.data / "journal")
    result = shell("entry", "1", "5")
    assert result.exit_code == 0
    assert "entrylog/00000001.log" in result.stdout
    assert "there is no journal in" in result.stderr
    assert "name its directory: --journal" in shell.refusal("entry", "5", "5")


def test_a_lost_index_is_made_again_and_the_bookie_starts_with_all_its_entries(tmp_path: Path) -> None:
    shell = run_async(_write(tmp_path))
    shutil.copy(shell.data.parent / "running" / "LIFE", shell.data)
    shutil.rmtree(shell.data / "index")
    assert "there is no block index in" in shell.refusal("ledgers")
    for answer in ("n\n", ""):  # no, and Ctrl-D
        declined = CliRunner().invoke(app, ["rebuild-index", "--data", str(shell.data), "--metadata", shell.metadata], input=answer)
        assert (declined.exit_code, sorted(path.name for path in shell.data.glob("index*"))) == (1, [])
    result = shell("rebuild-index", "--yes", "--metadata", shell.metadata)
    assert result.exit_code == 0, result.output
    assert "ledgers below 1001 are in limbo" in result.stderr
    assert shell.shows("cookie", "--metadata", shell.metadata)[-1]["limbo below"] == "1001"

    async def start() -> list[int]:
        store = await open_store(shell.metadata, Ports())
        cluster = (await found_cluster(store, "test", Ports())).cluster_id
        bookie = await open_bookie(shell.data, store, BookieIdentity("bookie-1", cluster))
        try:
            return bookie.ledgers()
        finally:
            await bookie.aclose()
            await store.aclose()

    assert {*HELD} <= {*run_async(start())}
