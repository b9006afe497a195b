"""The checks of what is reported as saved, given records that say more and less."""

from __future__ import annotations

from collections.abc import Callable

from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor_ledger import Snapshot, parts_of
from cepheid_managed_ledger.cursor_state import encode_state
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Chain, ChainLedger, CursorRecord, Position, keys
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.client_notes import BEGINNING, ClientNotes
from tests.simulation.checks.cursors import SavedAnswers, check_retired, check_saved
from tests.simulation.checks.history import History, InvariantViolation
from tests.simulation.checks.topic_model import Acked, TopicModel
from tests.simulation.world.virtual_loop import VirtualLoop

TOPIC = TopicName.parse("persistent://public/default/orders")
CHAIN, CURSOR = keys.chain_key(TOPIC), keys.cursor_key(TOPIC, "audit")
OPENING = ("east#1", 1)


def violated(script: Callable[[History], None]) -> str:
    """The rule that was; "": all held. The topic has three entries in ledger 1, and a subscription that has none of them."""
    loop = VirtualLoop()
    history = History(loop)
    history.acked[1] = 3
    history.chains[CHAIN] = Chain(incarnation="i", epoch=1, ledgers=(ChainLedger(ledger_id=1),))
    history.reigning[CHAIN] = OPENING
    record(history)

    async def run() -> None:
        script(history)

    try:
        loop.run(run())
    except InvariantViolation as error:
        return error.rule
    return ""


def record(history: History, *acked: int, ledger_id: int | None = None, generation: int = 0) -> None:
    """What is saved: in the record itself, or as a snapshot of two parts, the second of which is not confirmed."""
    ledgers = LedgerList([ChainLedger(ledger_id=1, entries=3)])
    ack_set = AckSet(ledgers, Position(1, -1))
    ack_set.acknowledge([Position(1, entry) for entry in acked])
    state = encode_state(ack_set)
    if ledger_id is not None:
        history.sent[ledger_id] = parts_of(Snapshot("audit", generation, state), 1, len(state) // 2 + 1)
        history.acked[ledger_id] = 1
    history.cursor_records[CURSOR] = CursorRecord(
        chain_incarnation="i",
        chain_epoch=1,
        mark_delete=Position(1, -1),
        state=state if ledger_id is None else None,
        cursor_ledger_id=ledger_id,
        generation=generation,
        created_at_ms=1,
    )


def reported(history: History, *entries: int) -> None:
    model = TopicModel("orders", CHAIN, stored={Position(1, entry): b"" for entry in range(3)})
    check_saved(history, model, TOPIC, "audit", Acked(entries=dict.fromkeys(Position(1, entry) for entry in entries)))


def answered(
    history: History, *, opening: tuple[str, int] = OPENING, meanwhile: Callable[[], None] = lambda: None, moving: bool = False
) -> None:
    """An ACK of entry 2 that wants an answer, and gets it."""
    notes = ClientNotes(history)
    if moving:
        notes.note("moving", TOPIC, subscription="audit", position=BEGINNING)
    answers, ack = SavedAnswers(notes), pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, request_id=7)
    ack.message_id.add(ledgerId=1, entryId=2)
    answers.on_ack(str(TOPIC), "audit", ack, is_ordered=True)
    meanwhile()
    answers.on_answer(7, opening)


def test_what_is_reported_as_saved_is_in_the_record() -> None:
    def saves_one(history: History) -> None:
        record(history, 2)
        reported(history, 2)

    def saves_another(history: History) -> None:
        record(history, 1)
        reported(history, 2)

    assert [violated(saves_one), violated(saves_another)] == ["", "C2"]


def test_a_snapshot_counts_when_all_of_it_is_confirmed() -> None:
    def half(history: History) -> None:
        record(history, 2, ledger_id=9)
        reported(history, 2)

    def whole(history: History) -> None:
        record(history, 2, ledger_id=9)
        history.acked[9] = 2
        reported(history, 2)

    assert [violated(half), violated(whole)] == ["C2", ""]


def test_a_client_is_told_of_what_is_in_the_record() -> None:
    assert violated(answered) == "C2"
    assert violated(lambda history: answered(history, meanwhile=lambda: record(history, 2))) == ""


def test_a_deposed_opening_and_what_is_moved_meanwhile_promise_nothing() -> None:
    assert violated(lambda history: answered(history, opening=("west#1", 0))) == ""
    assert violated(lambda history: answered(history, moving=True)) == ""
    assert violated(lambda history: answered(history, meanwhile=lambda: record(history, generation=1))) == ""


def test_no_record_names_a_ledger_that_is_being_deleted() -> None:
    def script(history: History) -> None:
        record(history, ledger_id=9)
        check_retired(history, CHAIN, history.chains[CHAIN].replace(deletions=(9,)))

    assert violated(script) == "C2"
