"""When a stored entry was published: a read of that one entry, straight from a bookie."""

from __future__ import annotations

from collections.abc import Mapping

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadRecordError, DataLossError
from cepheid_decode.history import HistoryPlan, LedgerHistory, Piece, TopicHistory
from cepheid_decode.scan_request import ReadSettings
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.plan_lookup import Replan
from cepheid_scan.splits import fragments_of
from cepheid_wire import WireError, split_tail
from cepheid_wire import pulsar_api_pb2 as pb

_BROKER_METADATA = b"\x0e\x02"
_PREFIX_BYTES = 6  # magic, size of the broker's own metadata


class BookieProbe:
    """Implements `edges.EntryProbe`. `replan`: where a ledger lies by now, None when it is gone."""

    def __init__(self, plan: HistoryPlan, settings: ReadSettings, replan: Replan | None = None) -> None:
        self._bookies: Mapping[str, str] = plan.bookies
        self._plan = plan
        self._settings = settings
        self._replan = replan
        self.probes = 0

    def publish_time_ms(self, history: TopicHistory, ledger: LedgerHistory, entry_id: int) -> int | None:
        piece = Piece(
            history.topic,
            history.partition,
            ledger.ledger_id,
            entry_id,
            entry_id,
            ledger.ensemble_size,
            ledger.write_quorum,
            fragments_of(ledger, entry_id, entry_id),
        )
        self.probes += 1
        ticket = self._plan.ticket_of(history.topic, history.partition)  # all of hundreds of topics would be more than fits
        source = EntrySource(self._bookies, ticket, self._settings, ScanCounters(), replan=self._replan)
        try:
            (group,) = source.read(piece)
        except DataLossError:
            return None
        try:
            return publish_time_ms(group.payload(entry_id))
        except (WireError, ValueError) as error:
            message = f"entry {ledger.ledger_id}:{entry_id} of {history.topic} tells no publish time: {error}"
            raise BadRecordError(message, topic=history.topic, ledger_id=ledger.ledger_id, entry_id=entry_id) from None


def publish_time_ms(tail: memoryview) -> int:
    """Of a stored entry. Raises WireError, ValueError."""
    if tail[:2] == _BROKER_METADATA:
        tail = tail[_PREFIX_BYTES + int.from_bytes(tail[2:_PREFIX_BYTES], "big") :]
    metadata, _ = split_tail(tail)
    try:
        return int(pb.MessageMetadata.FromString(bytes(metadata)).publish_time)
    except Exception as error:  # protobuf's DecodeError has no home that is the same in all of its releases
        raise ValueError(f"its metadata cannot be decoded ({error})") from None
