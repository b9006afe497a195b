"""The checks of a topic's records, given commits that no owner may make."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cepheid_managed_ledger import Retention
from cepheid_metadata import Chain, ChainLedger, CursorRecord, Position
from tests.simulation.checks.history import History, InvariantViolation
from tests.simulation.checks.topic import TopicRecordChecks, check_backlog_told
from tests.simulation.checks.topic_model import Acked, CursorModel, TopicModel
from tests.simulation.world.virtual_loop import VirtualLoop

KEY = "/chains/orders"


def violated(script: Callable[[History, TopicRecordChecks], None]) -> str:
    """The message of the first violation; "": all held."""
    loop = VirtualLoop()
    history = History(loop)
    history.topics[KEY] = TopicModel("orders", KEY)

    async def run() -> None:
        script(history, TopicRecordChecks(history))

    try:
        loop.run(run())
    except InvariantViolation as error:
        return str(error)
    return ""


def chain(*ledgers: ChainLedger, epoch: int = 1, terminated_at: Position | None = None) -> Chain:
    return Chain(incarnation="i", epoch=epoch, ledgers=ledgers, terminated_at=terminated_at)


OPEN = ChainLedger(ledger_id=1)


def test_a_topic_is_not_terminated_below_what_was_acknowledged() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        history.topics[KEY].stored[Position(1, 5)] = b"x"
        checks.on_chain(KEY, chain(OPEN), "east#1")
        checks.on_chain(KEY, chain(OPEN, terminated_at=Position(1, 0)), "east#1")

    assert violated(script).startswith("M10: orders is terminated at")


def test_what_leaves_the_topic_of_a_client_is_told_with_what_stays() -> None:
    told: list[tuple[str, list[int], list[int]]] = []

    def script(history: History, checks: TopicRecordChecks) -> None:
        del history.topics[KEY]
        history.on_trimmed = lambda key, gone, kept: told.append((key, list(gone), list(kept)))
        history.acked = {1: 3, 2: 0, 3: 1}
        for ledger_id in (1, 2, 3, 4):
            checks.on_chain(KEY, chain(ChainLedger(ledger_id=ledger_id)), "east#1")
        checks.on_chain(KEY, chain(), "east#1")  # it is being deleted

    assert violated(script) == ""
    assert told == [(KEY, [1], [2]), (KEY, [3], [4])], "the second had no entries"


@pytest.mark.parametrize(("end", "allowed"), [(1, False), (2, True), (3, False)])
def test_a_topic_is_terminated_at_its_last_entry(end: int, allowed: bool) -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        history.acked[1] = 3  # the last of them told to nobody yet
        checks.on_chain(KEY, chain(OPEN, terminated_at=Position(1, end)), "east#1")

    assert violated(script).partition(":")[0] == ("" if allowed else "M10")


@pytest.mark.parametrize(
    ("backlog", "acknowledged", "allowed"),
    [(4, None, False), (3, None, True), (2, None, True), (1, None, False), (2, 0, True), (3, 0, False)],
)
def test_a_backlog_is_what_clients_know_of(backlog: int, acknowledged: int | None, allowed: bool) -> None:
    """Of three entries, the first of which may be acknowledged, or surely is."""

    def script(history: History, checks: TopicRecordChecks) -> None:
        history.chains[KEY], history.acked[1] = chain(OPEN), 3
        topic, model = history.topics[KEY], CursorModel("audit")
        topic.stored = {Position(1, entry): b"x" for entry in (0, 1, 2)}
        model.allow(Acked(upto=Position(1, 0)))
        memory = Acked() if acknowledged is None else Acked(upto=Position(1, acknowledged))
        check_backlog_told(history, topic, model, memory, SimpleNamespace(backlog_entries=backlog))

    assert violated(script).partition(":")[0] == ("" if allowed else "C5")


def test_a_terminated_topic_stays_so() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        checks.on_chain(KEY, chain(OPEN, terminated_at=Position(1, -1)), "east#1")
        checks.on_chain(KEY, chain(OPEN, epoch=2), "west#1")

    assert violated(script).startswith("M10: /chains/orders was terminated with")


def ended(ledger_id: int, closed_at_ms: int = 0) -> ChainLedger:
    return ChainLedger(ledger_id=ledger_id, entries=1, size_bytes=100, closed_at_ms=closed_at_ms)


@pytest.mark.parametrize(
    ("policies", "went", "allowed"),
    [
        ((Retention(-1, 200),), 1, True),
        ((Retention(-1, 200),), 2, False),  # without the first, 250 bytes are left, then 150
        ((Retention(-1, 151),), 2, False),
        ((Retention(-1, 150),), 2, True),
        ((Retention(-1, 0),), 3, True),
        ((Retention(-1, -1),), 1, False),
        ((Retention(3_600_000, -1),), 1, False),  # it has just been closed
        ((Retention(0, 1_000),), 3, True),
        ((Retention(-1, -1), Retention(-1, 250)), 1, True),
        ((), 1, False),
    ],
)
def test_what_is_to_be_kept_does_not_leave(policies: tuple[Retention, ...], went: int, allowed: bool) -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        topic = history.topics[KEY]
        topic.timely["east#1", 1] = None
        for policy in policies:
            topic.note_policy("east#1", policy)
        for ledger_id, size_bytes in ((1, 100), (2, 100), (3, 100), (4, 50)):
            history.sent[ledger_id], history.acked[ledger_id] = [b"." * size_bytes, b"not told OK"], 1
        ledgers = (ended(1), ended(2), ended(3), ChainLedger(ledger_id=4))
        checks._trims.on_chain(KEY, chain(), chain(*ledgers), "east#1")
        checks._trims.on_chain(KEY, chain(*ledgers), chain(*ledgers[went:]), "east#1")

    assert violated(script).partition(":")[0] == ("" if allowed else "M6")


def test_a_hole_does_not_leave() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        history.topics[KEY].note_policy("east#1", Retention())
        last = ChainLedger(ledger_id=3)
        checks._trims.on_chain(KEY, chain(ended(1), ended(2), last), chain(ended(1), last), "east#1")

    assert violated(script).startswith("M6: orders: ledgers [2] leave the chain, and [1] stay")


@pytest.mark.parametrize(("mark_delete", "allowed"), [((1, 3), False), ((1, 4), True), ((2, -1), True), ((2, 0), True)])
def test_no_position_is_saved_in_the_midst_of_what_leaves(mark_delete: tuple[int, int], allowed: bool) -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        history.topics[KEY].note_policy("east#1", Retention())
        record = CursorRecord(chain_incarnation="i", chain_epoch=1, mark_delete=Position(*mark_delete), created_at_ms=0)
        history.chains[KEY] = chain(OPEN)
        checks.on_cursor("/cursors/orders/audit", record)
        history.acked[1] = 5
        first, second = ChainLedger(ledger_id=1, entries=5), ChainLedger(ledger_id=2)
        checks._trims.on_chain(KEY, chain(first, second), chain(second), "east#1")

    assert violated(script).partition(":")[0] == ("" if allowed else "M7")


def of_life(incarnation: str, ledger_id: int, epoch: int) -> Chain:
    return Chain(incarnation=incarnation, epoch=epoch, ledgers=(ChainLedger(ledger_id=ledger_id),))


def test_a_chain_that_was_made_anew_never_comes_back_as_it_was() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        checks.on_chain(KEY, of_life("i", 1, 1), "east#1")
        checks.on_chain(KEY, of_life("ii", 2, 1), "west#1")
        checks.on_chain(KEY, of_life("i", 3, 2), "east#1")

    assert violated(script).startswith("M1: east#1 brings i of /chains/orders back")


@pytest.mark.parametrize(("incarnation", "allowed"), [("i", False), ("ii", True)])
def test_cursors_are_saved_by_openings_of_the_chain_that_there_is(incarnation: str, allowed: bool) -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        checks.on_chain(KEY, of_life("i", 1, 1), "east#1")
        checks.on_chain(KEY, of_life("ii", 2, 1), "west#1")
        record = CursorRecord(chain_incarnation=incarnation, chain_epoch=1, mark_delete=Position(2, -1), created_at_ms=0)
        checks.on_cursor("/cursors/orders/audit", record)

    assert violated(script).partition(":")[0] == ("" if allowed else "C7")


@pytest.mark.parametrize(("ledger_id", "allowed"), [(1, False), (7, False), (8, True)])
def test_ledger_ids_rise_along_a_topic_also_when_it_is_made_anew(ledger_id: int, allowed: bool) -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        checks.on_chain(KEY, of_life("i", 7, 1), "east#1")
        checks.on_chain(KEY, of_life("ii", ledger_id, 1), "west#1")

    assert violated(script).partition(":")[0] == ("" if allowed else "H2")
