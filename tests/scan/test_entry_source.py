"""Reading a piece from real bookies, over gRPC, while replicas are damaged, stopped, moved or refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cepheid_decode import (
    BadRecordError,
    DataLossError,
    EntriesUnreadableError,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    Piece,
    ReadSettings,
    ScanCounters,
    TopicHistory,
)
from cepheid_rpc import EntryGroup, Status
from cepheid_scan import entry_source as module
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.entry_probe import BookieProbe
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.replica_order import Suspects
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies, damaged, groups_of, payload, piece_of

QUICK = ReadSettings(read_timeout_s=10.0, read_attempts=2, unreachable_s=0.2)
PATIENT = ReadSettings(unreachable_s=60.0)


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No suspects and no channels of other tests."""
    monkeypatch.setattr(module, "_suspects", Suspects())
    yield
    close_channels()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[ScanBookies]:
    with ScanBookies(tmp_path, ["a", "b"]) as bookies:
        yield bookies


@pytest.fixture
def two_elsewhere(tmp_path: Path) -> Iterator[ScanBookies]:
    """As on other machines: their bytes come over connections."""
    with ScanBookies(tmp_path, ["a", "b"], share_logs=False) as bookies:
        yield bookies


def source_of(
    bookies: ScanBookies, settings: ReadSettings = QUICK, addresses: dict[str, str] | None = None, **changes: Any
) -> EntrySource:
    values: dict[str, Any] = {"ticket": b"", "counters": ScanCounters(), "replan": None}
    return EntrySource(addresses or bookies.addresses, settings=settings, **(values | changes))


def ids_and_payloads(groups: Sequence[EntryGroup]) -> dict[int, bytes]:
    """Fails when an entry comes twice or out of order."""
    read: dict[int, bytes] = {}
    due = groups[0].first_entry_id if groups else 0
    for group in groups:
        group.verify()
        assert group.first_entry_id == due
        due = group.last_entry_id + 1
        read.update(enumerate(map(bytes, group.payloads()), group.first_entry_id))
    return read


def expected(first: int, last: int) -> dict[int, bytes]:
    return {entry_id: payload(entry_id) for entry_id in range(first, last + 1)}


def chooses(bookies: ScanBookies, piece: Piece) -> str:
    """Who is asked first for this piece."""
    counters = ScanCounters()
    list(source_of(bookies, counters=counters).read(piece))
    assert len(counters.by_bookie) == 1
    return next(iter(counters.by_bookie))


@pytest.mark.parametrize("in_blocks", [False, True])
def test_exactly_the_piece_comes_in_order(two: ScanBookies, in_blocks: bool) -> None:
    for group in groups_of(5000, per_group=70):
        two.add(group)
    if in_blocks:
        two.checkpoint()
    counters = ScanCounters()
    read = ids_and_payloads(list(source_of(two, counters=counters).read(piece_of(3, 4995, (0, "ab")))))
    assert read == expected(3, 4995)
    assert counters.entries == 4993
    assert counters.bytes == sum(counters.by_bookie.values()) > 4993 * 1000
    statistics = [bookie.statistics() for bookie in two.bookies.values()]
    assert sum(one.scan_requests for one in statistics) == 1, "as a scan, of one replica"
    assert sum(one.read_requests for one in statistics) == 0
    assert (sum(one.scan_disk_chunks for one in statistics) > 0) is in_blocks


def test_pieces_spread_over_the_replicas(two: ScanBookies) -> None:
    for group in groups_of(200):
        two.add(group)
    asked = [chooses(two, piece_of(first, first, (0, "ab"))) for first in range(40)]
    assert 8 <= asked.count("a") <= 32


def test_a_replica_in_the_own_rack_is_asked_first(two: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in groups_of(50):
        two.add(group)
    monkeypatch.setenv("CEPHEID_RACK", "west")
    for rack, near in ((None, "b"), ("east", "a")):
        for first in range(10):
            counters = ScanCounters()
            settings = ReadSettings(rack=rack)
            source = source_of(two, settings, counters=counters, racks={"a": "east", "b": "west"})
            list(source.read(piece_of(first, 40, (0, "ab"))))
            assert list(counters.by_bookie) == [near]


def test_a_damaged_entry_comes_from_another_replica(two: ScanBookies) -> None:
    groups = groups_of(100)
    piece = piece_of(0, 99, (0, "ab"))
    for bookie in "ab":
        for group in groups:
            two.add(damaged(group, 55) if bookie == "a" and group.first_entry_id == 50 else group, bookie)
    two.checkpoint()
    for turn in range(8):  # so that each of them is asked first at some time
        counters = ScanCounters()
        part = piece_of(turn, 99, (0, "ab"))
        assert ids_and_payloads(list(source_of(two, counters=counters).read(part))) == expected(turn, 99)
        if counters.damaged:
            break
    assert counters.damaged == counters.retries == 1
    assert set(counters.by_bookie) == {"a", "b"}
    assert chooses(two, piece) == "b", "whoever failed a moment ago is asked last"


def test_a_block_that_decayed_on_a_disk_comes_from_another_replica(two: ScanBookies, tmp_path: Path) -> None:
    """It is sent as it lies there: the reader is who finds out."""
    for group in groups_of(100):
        two.add(group)
    two.checkpoint()
    first = chooses(two, piece_of(0, 99, (0, "ab")))
    (log,) = [path for path in (tmp_path / first / "entrylog").iterdir() if path.stat().st_size > 50_000]
    data = bytearray(log.read_bytes())
    data[data.index(payload(55)) + 500] ^= 1
    log.write_bytes(data)
    counters = ScanCounters()
    assert ids_and_payloads(list(source_of(two, counters=counters).read(piece_of(0, 99, (0, "ab"))))) == expected(0, 99)
    assert counters.damaged == counters.retries == 1
    assert set(counters.by_bookie) == {"a", "b"}


def test_entries_that_are_damaged_everywhere_name_every_bookie(two: ScanBookies) -> None:
    for group in groups_of(60):
        two.add(damaged(group, 42) if group.first_entry_id == 40 else group)
    read: list[EntryGroup] = []
    with pytest.raises(EntriesUnreadableError, match=rf"entry {LEDGER}:42 of {TOPIC}") as caught:
        read.extend(source_of(two, ReadSettings(read_attempts=2)).read(piece_of(0, 59, (0, "ab"))))
    assert ids_and_payloads(read) == expected(0, 41), "what came before it was given out"
    for bookie in "ab":
        assert f"{bookie}: BAD_DIGEST" in str(caught.value)


def test_damage_goes_unnoticed_where_checks_are_off(two: ScanBookies) -> None:
    two.add(damaged(groups_of(10)[0], 5))
    (group,) = source_of(two, ReadSettings(verify_checksum=False)).read(piece_of(0, 9, (0, "ab")))
    assert len(group) == 10


@pytest.mark.slow
def test_a_bookie_that_stops_in_the_middle_costs_nothing(two_elsewhere: ScanBookies) -> None:
    for group in groups_of(30_000, per_group=500):
        two_elsewhere.add(group)
    two_elsewhere.checkpoint()
    counters = ScanCounters()
    settings = ReadSettings(decode_bytes=1 << 20)
    reading = source_of(two_elsewhere, settings, counters=counters).read(piece_of(0, 29_999, (0, "ab")))
    read = [next(reading)]
    (first,) = counters.by_bookie
    two_elsewhere.stop(first)
    read += reading
    assert ids_and_payloads(read) == expected(0, 29_999)
    assert set(counters.by_bookie) == {"a", "b"}
    assert counters.retries >= 1


@pytest.mark.slow
def test_a_bookie_of_this_machine_that_stops_in_the_middle_costs_nothing_either(two: ScanBookies) -> None:
    for group in groups_of(30_000, per_group=500):
        two.add(group)
    two.checkpoint()
    reading = source_of(two, ReadSettings(decode_bytes=1 << 20)).read(piece_of(0, 29_999, (0, "ab")))
    read = [next(reading)]
    (first,) = [bookie for bookie, one in two.bookies.items() if one.statistics().scan_sent_bytes]
    two.stop(first)
    assert ids_and_payloads(read + list(reading)) == expected(0, 29_999)
    (other,) = two.bookies.keys() - {first}
    assert two.bookies[other].statistics().scan_shared_bytes > 1_000_000


@pytest.mark.slow
def test_all_replicas_may_be_down_for_five_seconds(two: ScanBookies) -> None:
    for group in groups_of(100):
        two.add(group)
    for bookie in "ab":
        two.stop(bookie)
    began = time.monotonic()
    timer = threading.Timer(5.0, two.start, ["b"])
    timer.start()
    try:
        read = ids_and_payloads(list(source_of(two, ReadSettings()).read(piece_of(0, 99, (0, "ab")))))
    finally:
        timer.join()
    assert read == expected(0, 99)
    assert time.monotonic() - began >= 5.0


def test_bookies_that_stay_away_are_named_with_what_they_said(two: ScanBookies) -> None:
    two.add(groups_of(10)[0])
    addresses = dict(two.addresses)
    two.stop("a")
    two.stop("b")
    with pytest.raises(EntriesUnreadableError) as caught:
        list(source_of(two).read(piece_of(0, 9, (0, "abc"))))
    assert caught.value.retriable
    for text in ("a: UNAVAILABLE", "b: UNAVAILABLE", "c: no address", f"entry {LEDGER}:0"):
        assert text in str(caught.value)
    assert addresses["a"] in str(caught.value)


def test_a_replica_without_an_address_is_left_out(two: ScanBookies) -> None:
    for group in groups_of(20):
        two.add(group, "b")
    counters = ScanCounters()
    source = source_of(two, addresses={"b": two.addresses["b"]}, counters=counters)
    assert ids_and_payloads(list(source.read(piece_of(0, 19, (0, "abc"))))) == expected(0, 19)
    assert counters.retries == 0


def test_a_replica_that_lacks_entries_is_made_up_for(two: ScanBookies) -> None:
    """Under-replicated: acknowledged by the others."""
    for group in groups_of(60):
        two.add(group, *("ab" if group.first_entry_id not in (10, 40) else "b"))
    for first in range(8):
        assert ids_and_payloads(list(source_of(two).read(piece_of(first, 59, (0, "ab"))))) == expected(first, 59)


def test_fragments_lie_elsewhere(tmp_path: Path) -> None:
    with ScanBookies(tmp_path, "abcd") as bookies:
        for group in groups_of(100):
            bookies.add(group, *("ab" if group.first_entry_id < 50 else "cd"))
        counters = ScanCounters()
        piece = piece_of(7, 95, (0, "ab"), (50, "cd"))
        assert ids_and_payloads(list(source_of(bookies, counters=counters).read(piece))) == expected(7, 95)
        assert counters.retries == 0


def history(*fragments: tuple[int, str], last: int = 99) -> LedgerHistory:
    placed = tuple(Fragment(first, tuple(ensemble)) for first, ensemble in fragments)
    size = len(placed[0].ensemble)
    return LedgerHistory(LEDGER, last, False, 0, None, size, size, placed, b"")


def test_a_ledger_that_moved_is_followed(tmp_path: Path) -> None:
    with ScanBookies(tmp_path, "abc") as bookies:
        for group in groups_of(100):
            bookies.add(group, "c")
        asked: list[Piece] = []

        def replan(piece: Piece) -> LedgerHistory:
            asked.append(piece)
            return history((0, "bc"))

        piece = piece_of(5, 99, (0, "ab"))
        assert ids_and_payloads(list(source_of(bookies, replan=replan).read(piece))) == expected(5, 99)
        assert asked == [piece], "once"


@pytest.mark.slow
def test_a_ledger_that_moves_in_the_middle_of_a_read_is_followed_from_there(tmp_path: Path) -> None:
    """Its bookies are gone for good; what they had was copied to one that the plan knew nothing of."""
    with ScanBookies(tmp_path, "abc", share_logs=False) as bookies:
        for group in groups_of(30_000, per_group=500):
            bookies.add(group)
        bookies.checkpoint()
        addresses = {bookie: bookies.addresses[bookie] for bookie in "ab"}

        def replan(_: Piece) -> LedgerHistory:
            addresses["c"] = bookies.addresses["c"]
            return history((0, "c"), last=29_999)

        counters = ScanCounters()
        settings = ReadSettings(read_attempts=1, decode_bytes=1 << 20, unreachable_s=0.3)
        reading = source_of(bookies, settings, addresses=addresses, counters=counters, replan=replan).read(
            piece_of(0, 29_999, (0, "ab"))
        )
        read = [next(reading)]
        bookies.stop("a")
        bookies.stop("b")
        assert ids_and_payloads(read + list(reading)) == expected(0, 29_999)
        assert "c" in counters.by_bookie
        assert counters.retries >= 2


def test_a_ledger_that_is_gone_is_data_loss_at_once(two: ScanBookies) -> None:
    for group in groups_of(50):
        two.add(group)
    two.delete(LEDGER, "a", "b")
    began = time.monotonic()
    with pytest.raises(DataLossError, match=rf"{TOPIC}: entries 0\.\.49 of ledger {LEDGER}"):
        list(source_of(two, PATIENT, replan=lambda _: None).read(piece_of(0, 49, (0, "ab"))))
    assert time.monotonic() - began < PATIENT.unreachable_s / 2, "nobody waits for what is certain"


def test_a_ledger_that_metadata_still_has_where_nobody_knows_it_is_no_loss(two: ScanBookies) -> None:
    calls = []

    def replan(piece: Piece) -> LedgerHistory:
        calls.append(piece)
        return history((0, "ab"))

    with pytest.raises(EntriesUnreadableError, match="NO_LEDGER"):
        list(source_of(two, replan=replan).read(piece_of(0, 49, (0, "ab"))))
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ensemble", "quorum", "down"),
    [("abc", 2, ""), ("abc", 2, "b"), ("abcd", 2, ""), ("abcd", 3, "ad"), ("abcde", 2, "c")],
)
def test_stripes_are_merged(tmp_path: Path, ensemble: str, quorum: int, down: str) -> None:
    with ScanBookies(tmp_path, ensemble) as bookies:
        for group in groups_of(200, per_group=1):
            start = group.first_entry_id
            bookies.add(group, *(ensemble[(start + place) % len(ensemble)] for place in range(quorum)))
        bookies.checkpoint()
        for bookie in down:
            bookies.stop(bookie)
        piece = piece_of(3, 197, (0, ensemble), write_quorum=quorum)
        counters = ScanCounters()
        assert ids_and_payloads(list(source_of(bookies, counters=counters).read(piece))) == expected(3, 197)
        if not down:
            assert counters.retries == 0
            assert len(counters.by_bookie) == -(-len(ensemble) // quorum), "as few streams as hold all of it"


def test_a_ticket_is_shown_and_its_refusal_ends_the_read(two: ScanBookies) -> None:
    two.add(groups_of(10)[0])
    seen = []

    def authorize(ticket: bytes, ledger_id: int, first: int, last: int) -> Status:
        seen.append((ticket, ledger_id, first, last))
        return Status.OK if ticket == b"good" else Status.UNAUTHORIZED

    for bookie in two.bookies.values():
        bookie.authorize_reads(authorize)
    assert ids_and_payloads(list(source_of(two, ticket=b"good").read(piece_of(2, 9, (0, "ab"))))) == expected(2, 9)
    assert seen == [(b"good", LEDGER, 2, 9)]
    began = time.monotonic()
    with pytest.raises(EntriesUnreadableError, match="a: UNAUTHORIZED"):
        list(source_of(two, PATIENT, ticket=b"bad").read(piece_of(2, 9, (0, "ab"))))
    assert time.monotonic() - began < PATIENT.unreachable_s / 2
    assert sum(bookie.statistics().scans_unauthorized for bookie in two.bookies.values()) >= 2


@pytest.mark.slow
def test_an_overloaded_bookie_is_asked_again_when_it_says(tmp_path: Path) -> None:
    with ScanBookies(tmp_path, "a", open_scans=1, scan_retry_s=0.3, share_logs=False) as bookies:
        for group in groups_of(20_000, per_group=500):
            bookies.add(group)
        bookies.checkpoint()
        piece = piece_of(0, 19_999, (0, "a"))
        small = ReadSettings(decode_bytes=1, unreachable_s=0.1, read_attempts=1)
        first = source_of(bookies, small).read(piece)
        next(first)
        counters = ScanCounters()
        result: list[dict[int, bytes]] = []

        def read() -> None:
            result.append(ids_and_payloads(list(source_of(bookies, small, counters=counters).read(piece))))

        reader = threading.Thread(target=read)
        began = time.monotonic()
        reader.start()
        while not bookies.bookies["a"].statistics().scans_refused:
            assert time.monotonic() - began < 60
            time.sleep(0.005)
        first.close()
        reader.join(60)
        assert result == [expected(0, 19_999)]
        refused = bookies.bookies["a"].statistics().scans_refused  # once, if the first scan's end reached it within 0.3 s
        assert time.monotonic() - began >= 0.3 * refused
        assert counters.retries == refused


@pytest.mark.slow
def test_a_reader_that_goes_away_leaves_no_scan_behind(two_elsewhere: ScanBookies) -> None:
    for group in groups_of(30_000, per_group=500):
        two_elsewhere.add(group)
    two_elsewhere.checkpoint()
    reading = source_of(two_elsewhere, ReadSettings(decode_bytes=1)).read(piece_of(0, 29_999, (0, "ab")))
    next(reading)
    assert sum(bookie.statistics().open_scans for bookie in two_elsewhere.bookies.values()) == 1
    reading.close()
    deadline = time.monotonic() + 60
    while any(bookie.statistics().open_scans for bookie in two_elsewhere.bookies.values()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scan-")]


def largest_socket_buffers_bytes() -> int:
    """The most that Linux lets the two buffers of one TCP connection grow to; it differs by machine, 10 to 40 MB."""
    return sum(int(Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().split()[2]) for name in ("rmem", "wmem"))


@pytest.mark.slow
def test_a_slow_reader_holds_the_bookie_back(two_elsewhere: ScanBookies) -> None:
    """A bookie sends what fits into the read-ahead and into the kernel's socket buffers, not the whole ledger."""
    limit_bytes = largest_socket_buffers_bytes() + (16 << 20)
    last = 2 * limit_bytes // 1000
    for group in groups_of(last + 1, per_group=500):
        two_elsewhere.add(group)
    two_elsewhere.checkpoint()
    reading = source_of(two_elsewhere, ReadSettings(decode_bytes=1)).read(piece_of(0, last, (0, "ab")))
    next(reading)
    sent, since = -1, time.monotonic()
    while sent < 1 << 20 or time.monotonic() - since < 0.3:  # until nothing more comes
        assert time.monotonic() - since < 60, f"{sent} bytes were sent"
        now = max(bookie.statistics().scan_sent_bytes for bookie in two_elsewhere.bookies.values())
        sent, since = (now, time.monotonic()) if now != sent else (sent, since)
        time.sleep(0.01)
    assert sent <= limit_bytes
    assert ids_and_payloads(list(reading))[last] == payload(last)


def test_a_probe_shows_the_ticket_of_its_topic_among_a_thousand_topics(two: ScanBookies) -> None:
    """All of them together are more than the 64 KB that a request has for a ticket."""
    two.add(groups_of(1)[0])
    ledger = LedgerHistory(LEDGER, 0, False, 1, 1, 2, 2, (Fragment(0, ("a", "b")),), b"")
    tickets = {f"persistent://public/default/t{number}": b"x" * 140 for number in range(1_000)} | {TOPIC: b"mine"}
    shown: list[bytes] = []

    def authorize(ticket: bytes, ledger_id: int, first: int, last: int) -> Status:
        shown.append(ticket)
        return Status.OK

    for bookie in two.bookies.values():
        bookie.authorize_reads(authorize)
    probe = BookieProbe(HistoryPlan((), two.addresses, tickets=tickets), QUICK)
    with pytest.raises(BadRecordError):  # what is stored here is no message
        probe.publish_time_ms(TopicHistory(TOPIC, -1, "x", (ledger,)), ledger, 0)
    assert shown == [b"mine"]
