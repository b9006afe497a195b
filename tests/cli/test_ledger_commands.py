"""`cepheid ledgers` and `cepheid bookies` as a user types them, against a server with three bookies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import cepheid_cli
from cepheid_cli import ledger_verifying
from cepheid_cli.app import app
from cepheid_cli.ledger_reading import lines_of
from cepheid_cli.ledger_source import BookiesReplacedError, LedgerSource, NoSuchLedgerHereError
from cepheid_cli.ledger_verifying import Verdict, cure, summary, verdict_on
from cepheid_ledger.verification import Copy, Finding, LedgerReport
from cepheid_metadata import ClusterNotFoundedError, Fragment, LedgerMetadata, LedgerState
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import CepheidError, Ports
from cepheid_rpc import BookieConnection, encode_group
from cepheid_testkit import ProcessCluster
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.ledger.memory_bookie import MemoryBookie
from tests.support import free_port, run_async
from tests.wire_client import WireClient

TOPIC = "persistent://public/default/orders"


class Commands:
    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.exit_code = 0

    def __call__(self, *words: str) -> str:
        """What it prints; its error is raised."""
        result = CliRunner().invoke(app, [*words, "--admin-url", self.cluster.admin_url])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.exit_code = result.exit_code
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def ledger_of(self, topic: str) -> int:
        return int(self.json("ledgers", "list", "--topic", topic)[-1]["ledger"]["ledger_id"])


def publish(cluster: ProcessCluster, topic: str, *texts: str) -> None:
    with WireClient(cluster.service_url, topic) as client:
        client.open_producer()
        for number, text in enumerate(texts):
            client.send(number, text.encode(), key="k")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ProcessCluster(tmp_path_factory.mktemp("ledgers"), bookies=3) as running:
        publish(running, TOPIC, "one", "two", "three")
        yield running


@pytest.fixture
def cepheid(cluster: ProcessCluster) -> Commands:
    return Commands(cluster)


@pytest.mark.slow
def test_ledgers_and_bookies_are_shown(cepheid: Commands) -> None:
    ledger = cepheid.ledger_of("orders")
    assert TOPIC in cepheid("ledgers", "list", "--state", "open")
    assert "OPEN" not in cepheid("ledgers", "list", "--state", "closed")
    assert str(ledger) in cepheid("ledgers", "list", "--bookie", "bookie-2")
    assert len(cepheid("ledgers", "list", "--bookie", "bookie-9").splitlines()) == 1
    shown = cepheid("ledgers", "show", str(ledger))
    assert "ensemble 3, write 3, ack 2" in shown
    assert all(f"bookie-{number} (writable)" in shown for number in (1, 2, 3))
    bookies = cepheid.json("bookies", "list")
    assert [(bookie["bookie_id"], bookie["state"]) for bookie in bookies] == [(f"bookie-{n}", "writable") for n in (1, 2, 3)]
    assert bookies[0]["addresses"]["grpc"] in cepheid("bookies", "list")


def test_entries_are_read_from_the_bookies_with_their_messages(cepheid: Commands) -> None:
    ledger = cepheid.ledger_of("orders")
    lines = cepheid("ledgers", "read", str(ledger), "--last", "1").splitlines()
    assert lines[0].startswith(f"{ledger}:0  ")
    assert "1 message" in lines[0]
    assert [line.strip() for line in lines[1::2]] == ["key=k  one", "key=k  two"]
    assert "key=k  one" not in cepheid("ledgers", "read", str(ledger), "--first", "1", "--last", "1")
    assert "one" in cepheid("ledgers", "read", str(ledger), "--first", "0", "--last", "0", "--raw")


def test_a_deleted_ledger_is_brought_back_with_its_entries(cepheid: Commands) -> None:
    publish(cepheid.cluster, "short-lived", "kept")
    ledger = str(cepheid.ledger_of("short-lived"))
    cepheid("topics", "delete", "short-lived", "--force")
    assert cepheid.json("ledgers", "list", "--topic", "short-lived") == []
    assert cepheid.json("ledgers", "list", "--topic", "short-lived", "--deleted")[0]["ledger"]["state"] == "CLOSED"
    assert f"cepheid ledgers undelete {ledger}" in cepheid("ledgers", "show", ledger)
    cepheid("ledgers", "undelete", ledger)
    assert "undeleted_at_ms" in cepheid("ledgers", "show", ledger)
    assert "key=k  kept" in cepheid("ledgers", "read", ledger)
    with pytest.raises(CepheidError, match="cannot be brought back"):
        cepheid("ledgers", "undelete", ledger)


def test_a_deleted_ledger_is_given_up_before_its_time(cepheid: Commands) -> None:
    publish(cepheid.cluster, "given-up", "gone")
    ledger = str(cepheid.ledger_of("given-up"))
    cepheid("topics", "delete", "given-up", "--force")
    cepheid("ledgers", "purge", "--topic", "given-up", "--yes")
    assert cepheid.exit_code == 0
    assert cepheid.json("ledgers", "list", "--topic", "given-up", "--deleted") == []
    with pytest.raises(CepheidError, match="cannot be brought back"):
        cepheid("ledgers", "undelete", ledger)
    cepheid("ledgers", "purge", ledger, "--yes")
    assert cepheid.exit_code == 1  # there is no such deleted ledger
    cepheid("ledgers", "purge", ledger, "--all")
    assert cepheid.exit_code == 2


def test_what_is_not_there_is_named(cepheid: Commands) -> None:
    for command in ("show", "read", "verify"):
        with pytest.raises(CepheidError, match="Ledger 123456 does not exist, or was deleted for good"):
            cepheid("ledgers", command, "123456")
    cepheid("ledgers", "verify")
    assert cepheid.exit_code == 2  # one ledger or --all
    with pytest.raises(CepheidError, match="above the known end"):
        cepheid("ledgers", "read", str(cepheid.ledger_of("orders")), "--first", "77", "--last", "78")


def flip_last_byte_of(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    at = data.rindex(needle)
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_verification_names_the_copy_that_decayed(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "data", bookies=3) as cluster:
        cepheid = Commands(cluster)
        cepheid("topics", "create", TOPIC)
        cepheid("subscriptions", "create", TOPIC, "keeps-it")
        publish(cluster, TOPIC, "one", "needle-two", "three")
        ledger = cepheid.ledger_of("orders")
        cepheid("repair", "off")  # else the scrubber finds it, and repair mends it, before anybody looks
        cluster.stop()
        flip_last_byte_of(next((tmp_path / "data/bookie-2/entrylog").glob("*.log")), b"needle-two")
        cluster.start()
        publish(cluster, TOPIC, "four")  # opens the topic: the ledger is closed
        cepheid("ledgers", "verify", "--all")
        assert cepheid.exit_code == 1
        said = cepheid("ledgers", "verify", str(ledger))
        assert "at bookie-2: corrupt" in said or "at bookie-2: unreadable" in said
        assert "bookie-1" not in said
        assert "0 entries without a valid copy" in said
        assert cepheid.json("ledgers", "verify", str(ledger))[0]["lost_entries"] == 0


@pytest.mark.parametrize(
    ("ailment", "valid", "words"),
    [
        (Copy.MISSING, 2, "readers are served"),
        (Copy.MISSING, 1, "lose no other bookie"),
        (Copy.CORRUPT, 0, "bring back"),
        (Copy.UNREADABLE, 0, "start b1"),
        (Copy.DIVERGENT, 0, "keep every disk"),
    ],
)
def test_each_finding_has_a_cure(ailment: Copy, valid: int, words: str) -> None:
    assert words in cure(Finding("b1", 0, 1, ailment, "", valid), 2)


def test_bytes_that_are_no_message_are_shown_as_that() -> None:
    assert list(lines_of(3, 4, memoryview(b"\x00\x01"))) == ["3:4  2 bytes, not a message"]


class ChangingSource:
    """Answers `one` with the next of its records; None: it is gone. `refused`: what a repair raises."""

    def __init__(self, *records: LedgerMetadata | None, refused: CepheidError | None = None) -> None:
        self._records = list(records)
        self._refused = refused

    async def repair(self, ledger_id: int, bookies: list[str]) -> None:
        if self._refused is not None:
            raise self._refused

    async def repair_is_off(self) -> bool:
        return True

    async def one(self, ledger_id: int) -> dict[str, Any]:
        record = self._records.pop(0) if len(self._records) > 1 else self._records[0]
        if record is None:
            raise NoSuchLedgerHereError(f"ledger {ledger_id} does not exist")
        return {"ledger": record.model_dump(mode="json")}


def ledger_on(*fragments: tuple[int, str], last: int = 5) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=5,
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        state=LedgerState.CLOSED if last >= 0 else LedgerState.OPEN,
        fragments=tuple(Fragment(first_entry_id=first, ensemble=tuple(names)) for first, names in fragments),
        last_entry_id=last if last >= 0 else None,
        length_bytes=0 if last >= 0 else None,
        creation_token=1,
        created_at_ms=0,
    )


def verified(
    monkeypatch: pytest.MonkeyPatch,
    source: ChangingSource,
    bookies: dict[str, MemoryBookie],
    listed: LedgerMetadata,
    repair_for_s: float | None = None,
) -> Verdict:
    class Reach:
        def get(self, name: str) -> BookieConnection:
            return bookies[name].connection()

    @asynccontextmanager
    async def reach_of(_: object) -> AsyncIterator[Reach]:
        yield Reach()

    monkeypatch.setattr(ledger_verifying, "bookie_reach", reach_of)
    view = {"ledger": listed.model_dump(mode="json")}
    verify = ledger_verifying.verify_ledgers
    return run_async(verify(cast(LedgerSource, source), [view], [], as_json=False, repair_for_s=repair_for_s))


def bookies_holding(first: str, then: str) -> dict[str, MemoryBookie]:
    """Entries 0..2 at `first`, 3..5 at `then`."""
    bookies = {name: MemoryBookie(name) for name in (*first, *then)}
    for names, at in ((first, 0), (then, 3)):
        group = encode_group(5, at, 5, 0, [b"x"] * 3)
        for name in names:
            held = bookies[name].entries.setdefault(5, {})
            held.update({entry_id: group.slice(entry_id, entry_id) for entry_id in range(at, at + 3)})
    return bookies


def test_an_ensemble_that_changed_since_the_listing_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, now = ledger_on((0, "ab"), last=-1), ledger_on((0, "ab"), (3, "ac"), last=-1)
    verdict = verified(monkeypatch, ChangingSource(now), bookies_holding("ab", "ac"), listed)
    assert verdict is Verdict.SOUND, capsys.readouterr().out


def test_an_ensemble_that_changes_during_the_reading_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = ledger_on((0, "ab")), ledger_on((0, "ab"), (3, "ac"))
    verdict = verified(monkeypatch, ChangingSource(before, now), bookies_holding("ab", "ac"), before)
    assert verdict is Verdict.SOUND, capsys.readouterr().out


def test_a_ledger_that_went_for_good_since_the_listing_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = ledger_on((0, "ab"))
    bookies = {name: MemoryBookie(name) for name in "ab"}  # and its entries were collected
    for source in (ChangingSource(None), ChangingSource(listed, None)):
        assert verified(monkeypatch, source, bookies, listed) is Verdict.SOUND, capsys.readouterr().out
    assert "0 ledgers" in capsys.readouterr().out
    assert verified(monkeypatch, ChangingSource(listed), bookies, listed) is Verdict.BAD  # one that is still there lost them


@pytest.mark.parametrize(
    ("after", "refused", "last_words"),
    [
        (None, NoSuchLedgerHereError("gone"), "0 entries without a valid copy; 1 ledger deleted meanwhile"),
        (
            ledger_on((0, "ab"), (3, "ac")),
            BookiesReplacedError("no entries on b"),
            "0 entries without a valid copy; 1 ledger moved to other bookies meanwhile, and not repaired",
        ),
    ],
    ids=["deleted", "moved"],
)
def test_a_ledger_that_changed_between_look_and_repair_stops_no_repair(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after: LedgerMetadata | None,
    refused: CepheidError,
    last_words: str,
) -> None:
    before = ledger_on((0, "ab"))
    source = ChangingSource(before, before, before, after, refused=refused)
    assert verified(monkeypatch, source, bookies_holding("ab", "ac"), before, repair_for_s=0.0) is Verdict.SOUND
    assert capsys.readouterr().out.splitlines()[-1].endswith(last_words)


def test_no_repair_is_waited_for_while_repair_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, bookies = ledger_on((0, "ab")), bookies_holding("ab", "ab")
    del bookies["b"].entries[5][5]
    assert verified(monkeypatch, ChangingSource(ledger), bookies, ledger, repair_for_s=300.0) is Verdict.BAD
    assert capsys.readouterr().err == "automatic repair is off: 1 ledger is copied again after `cepheid repair on`\n"


def test_copies_of_a_bookie_that_did_not_answer_are_neither_bad_nor_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, bookies = ledger_on((0, "ab")), bookies_holding("ab", "ab")
    bookies["b"].down = True
    assert verified(monkeypatch, ChangingSource(ledger), bookies, ledger) is Verdict.NOT_KNOWN
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == ("1 ledger, 12 copies: 6 valid, 0 bad or missing, 6 not known, in 1 ledger; 0 entries without a valid copy")
    del bookies["a"].entries[5][5]
    assert verified(monkeypatch, ChangingSource(ledger), bookies, ledger) is Verdict.BAD
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert "5 valid, 1 bad or missing, 6 not known" in last_line
    assert "0 entries without a valid copy, 1 entry of which only bookies that did not answer can have one" in last_line


def test_an_open_ledger_whose_end_is_not_known_is_not_sound() -> None:
    report = LedgerReport(5, "OPEN", 3, 1, end_unknown_for=("a",))
    assert verdict_on([report]) is Verdict.NOT_KNOWN
    assert summary([report]).endswith("the end of 1 open ledger is not known")


def test_what_a_producer_named_its_keys_is_no_command_to_a_terminal() -> None:
    metadata = pb.MessageMetadata(producer_name="p\x1b]0;owned\x07", sequence_id=1, publish_time=0, partition_key="a\x1b[2J\nb")
    entry = encode_tail(metadata, b"\x1b[31mred")
    lines = list(lines_of(3, 4, memoryview(entry)))
    assert all(line.isprintable() for line in lines), lines
    assert lines[1].strip() == r"key=a\x1b[2J\x0ab  \x1b[31mred"


@pytest.mark.parametrize("first", ["7", "99999999999"])
def test_reading_beyond_the_end_is_said(cepheid: Commands, first: str) -> None:
    # The known end is 1 until the idle writer has sent its last confirmed entry (2) to the bookies.
    with pytest.raises(CepheidError, match=r"entry \d+:\d+ is above the known end [12]"):
        cepheid("ledgers", "read", str(cepheid.ledger_of("orders")), "--first", first)


@pytest.mark.parametrize(
    "words",
    [
        ("show", str(2**63)),
        ("read", str(2**63)),
        ("read", "1", "--last", str(2**63)),
        ("read", "1", "--first", "2", "--last", "1"),
        ("list", "--state", "opne"),
    ],
)
def test_what_cannot_be_is_refused(cepheid: Commands, words: tuple[str, ...]) -> None:
    cepheid("ledgers", *words)
    assert cepheid.exit_code == 2


def test_a_store_without_a_cluster_shows_no_empty_list(tmp_path: Path) -> None:
    async def create_empty() -> None:
        await (await RocksStore.open(tmp_path / "empty", Ports())).aclose()

    run_async(create_empty())
    for command in ("ledgers", "bookies"):
        result = CliRunner().invoke(app, [command, "list", "--metadata", f"rocksdb://{tmp_path}/empty"])
        assert isinstance(result.exception, ClusterNotFoundedError), result.output


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "ftp://127.0.0.1", ""])
def test_what_is_no_admin_address_is_named(url: str) -> None:
    result = CliRunner().invoke(app, ["bookies", "list", "--admin-url", url])
    assert isinstance(result.exception, CepheidError), result.output


def test_a_service_url_may_name_several_brokers(cluster: ProcessCluster) -> None:
    """As `cepheid dev up` prints it; one of them may be down."""
    alive = cluster.service_url.removeprefix("pulsar://")
    for hosts in (f"127.0.0.1:{free_port()},{alive}", f"{alive},127.0.0.1:{free_port()}"):
        assert CliRunner().invoke(app, ["produce", "several", "hello", "--url", f"pulsar://{hosts}"]).exit_code == 0
    for url in ("pulsar://", "pulsar://a:b", "pulsar://[::1", "http://a:1", ",", ""):
        with pytest.raises(CepheidError, match="is no service URL"):
            WireClient(url, "t")


def test_ctrl_c_before_a_command_begins_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cepheid_cli.app.run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cepheid_cli.main()
    assert ended.value.code == 130
