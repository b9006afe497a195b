"""Commands that are not served yet: each gets the error that its clients expect, in the reply they wait for, never silence.

Source of the reply types: protocol.md §5, §23; of the code: §24 (NotAllowedError fails at once in every client).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from google.protobuf.message import Message

from cepheid_broker.errors import ProtocolViolationError
from cepheid_broker.peer import Peer
from cepheid_wire import CommandType, ServerError
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

_TRANSACTIONS = "transactions are not supported yet"
_SCALABLE = "scalable topics are not supported yet"

_TXN = ("request_id", "txnid_most_bits", "txnid_least_bits")


class _Refusal(NamedTuple):
    why: str
    reply: type[Message]
    echoed: tuple[str, ...]  # fields that the reply copies from the request
    error: str = "error"
    message: str = "message"
    code: ServerError = ServerError.NOT_ALLOWED_ERROR


_REFUSALS: Mapping[CommandType, _Refusal] = {
    CommandType.TC_CLIENT_CONNECT_REQUEST: _Refusal(_TRANSACTIONS, pb.CommandError, ("request_id",)),
    CommandType.NEW_TXN: _Refusal(_TRANSACTIONS, pb.CommandNewTxnResponse, ("request_id",)),
    CommandType.ADD_PARTITION_TO_TXN: _Refusal(_TRANSACTIONS, pb.CommandAddPartitionToTxnResponse, _TXN),
    CommandType.ADD_SUBSCRIPTION_TO_TXN: _Refusal(_TRANSACTIONS, pb.CommandAddSubscriptionToTxnResponse, _TXN),
    CommandType.END_TXN: _Refusal(_TRANSACTIONS, pb.CommandEndTxnResponse, _TXN),
    CommandType.END_TXN_ON_PARTITION: _Refusal(_TRANSACTIONS, pb.CommandEndTxnOnPartitionResponse, _TXN),
    CommandType.END_TXN_ON_SUBSCRIPTION: _Refusal(_TRANSACTIONS, pb.CommandEndTxnOnSubscriptionResponse, _TXN),
    CommandType.SCALABLE_TOPIC_LOOKUP: _Refusal(_SCALABLE, pb.CommandScalableTopicUpdate, ("session_id",)),
    CommandType.SCALABLE_TOPIC_SUBSCRIBE: _Refusal(_SCALABLE, pb.CommandScalableTopicSubscribeResponse, ("request_id",)),
    CommandType.WATCH_SCALABLE_TOPICS: _Refusal(_SCALABLE, pb.CommandWatchScalableTopicsUpdate, ("watch_id",)),
    CommandType.WATCH_TC_ASSIGNMENTS: _Refusal(_TRANSACTIONS, pb.CommandWatchTcAssignmentsUpdate, ("watch_id",)),
}
# Commands that can only follow something that is never started here: a challenge, a watch.
_UNASKED = (
    CommandType.SCALABLE_TOPIC_CLOSE,
    CommandType.WATCH_SCALABLE_TOPICS_CLOSE,
    CommandType.WATCH_TC_ASSIGNMENTS_CLOSE,
)


class UnservedCommands:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._refused: dict[CommandType, int] = {}
        self.table: dict[int, Callable[[Any], None]] = {}
        for kind, refusal in _REFUSALS.items():
            self.table[kind] = self._refusing(kind, refusal)
        for kind in _UNASKED:
            self.table[kind] = self._violation(kind)

    def _refusing(self, kind: CommandType, refusal: _Refusal) -> Callable[[Any], None]:
        def refuse(ask: Any) -> None:
            if kind not in self._refused:  # once per connection: some clients ask again every minute
                log.info("command.refused", extra={"peer": self._peer.address, "command": kind.name, "reason": refusal.why})
            self._refused[kind] = self._refused.get(kind, 0) + 1
            fields = {name: getattr(ask, name) for name in refusal.echoed}
            if kind is CommandType.NEW_TXN:
                fields["txnid_most_bits"] = ask.tc_id  # Java routes the answer by it (protocol.md §23)
            answer = refusal.reply(**fields, **{refusal.error: cast(Any, int(refusal.code)), refusal.message: refusal.why})
            self._peer.send(answer)

        return refuse

    def _violation(self, kind: CommandType) -> Callable[[Any], None]:
        def refuse(ask: Any) -> None:
            raise ProtocolViolationError(f"{kind.name}, which was not requested", command_type=int(kind))

        return refuse
