"""The broker's end of each client's connection, listened to: what it says and hears of deliveries, in its own order.

    transport ══ bytes ══ WireTap ══ bytes ══ the broker's Connection          nothing is changed or delayed
                             └──► ClientNotes

Seen from here nothing is on its way: a message that a broker gave to one consumer before it heard the acknowledgement of another
is noted before it, also one that a connection has gathered, and writes at the end of the turn. So the rules about order, holders
(H7 to H10) and permits (H14) need no allowances of time (see tests/history/rules_served.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from cepheid_wire import CommandType, FrameSplitter, TopicName, count_messages
from cepheid_wire import pulsar_api_pb2 as pb
from tests.history.rules_served import ORDERED
from tests.simulation.checks.client_notes import BEGINNING, ClientNotes, mask_of
from tests.simulation.checks.cursors import SavedAnswers

TYPES = {0: "Exclusive", 1: "Shared", 2: "Failover", 3: "Key_Shared"}
_HEARD = frozenset(
    {
        CommandType.SUBSCRIBE,
        CommandType.FLOW,
        CommandType.ACK,
        CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES,
        CommandType.SEEK,
        CommandType.CLOSE_CONSUMER,
        CommandType.UNSUBSCRIBE,
    }
)
_SAID = frozenset(
    {
        CommandType.SUCCESS,
        CommandType.ERROR,
        CommandType.MESSAGE,
        CommandType.ACTIVE_CONSUMER_CHANGE,
        CommandType.CLOSE_CONSUMER,
        CommandType.ACK_RESPONSE,
    }
)
_parse = pb.BaseCommand.FromString

OpeningOf = Callable[[str], tuple[str, int]]
"""Of a topic that this broker serves: its process, and the epoch in which it opened it."""


@dataclass(slots=True)
class _Seat:
    """One SUBSCRIBE that succeeded."""

    actor: str
    topic: str
    subscription: str
    opening: tuple[str, int]
    kind: str
    permits: int  # that it gave and no message has used


class WireTap(asyncio.Protocol):
    """In place of `inner`, which notices nothing."""

    def __init__(self, inner: asyncio.Protocol, notes: ClientNotes, opening_of: OpeningOf) -> None:
        self._inner: Any = inner
        self._notes = notes
        self._opening_of = opening_of
        self._heard, self._said = FrameSplitter(1 << 24), FrameSplitter(1 << 24)
        self._asked: dict[int, Any] = {}  # SUBSCRIBE, SEEK and UNSUBSCRIBE by request id
        self._answers = SavedAnswers(notes)
        self._seats: dict[int, _Seat] = {}
        self._lives: dict[str, int] = {}
        self._noted_bytes = 0  # of what will be written next

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = str(transport.get_extra_info("peername"))
        self._inner.connection_made(_TappedTransport(transport, self))

    def data_received(self, data: bytes) -> None:
        self._note_gathered()
        for kind, command, _ in self._heard.feed(data):
            if kind in _HEARD:
                self._on_heard(kind, _parse(command))
        self._inner.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.end()
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        return cast(bool | None, self._inner.eof_received())

    # What it hears

    def _on_heard(self, kind: int, command: pb.BaseCommand) -> None:
        if kind == CommandType.SUBSCRIBE:
            if not command.subscribe.durable:
                return  # a reader: it knows for itself what it is owed
            self._asked[command.subscribe.request_id] = command.subscribe
        elif kind == CommandType.FLOW:
            if (seat := self._seats.get(command.flow.consumer_id)) is not None:
                seat.permits += command.flow.messagePermits
        elif kind == CommandType.SEEK:
            self._on_seek(command.seek)
        elif kind == CommandType.CLOSE_CONSUMER:
            self._leave(command.close_consumer.consumer_id)
        elif kind == CommandType.UNSUBSCRIBE:
            self._on_unsubscribe(command.unsubscribe)
        elif kind == CommandType.ACK:
            self._on_ack(command.ack)
        else:
            self._on_redeliver(command.redeliverUnacknowledgedMessages)

    def _on_seek(self, seek: pb.CommandSeek) -> None:
        seat = self._seats.get(seek.consumer_id)
        if seat is not None:
            ident = seek.message_id
            left = mask_of(ident.ack_set)
            first_left = (left & -left).bit_length() - 1  # clients leave out the first messages of a batch, and no others
            place = ident.ledgerId, ident.entryId, first_left
            self._asked[seek.request_id] = (seat, place)
            self._note("seeking", seat, position=place, details={"opening": seat.opening})

    def _on_unsubscribe(self, ask: pb.CommandUnsubscribe) -> None:
        """Whoever comes next makes a subscription of that name anew: for the history it has moved to the beginning."""
        seat = self._seats.get(ask.consumer_id)
        if seat is not None:
            self._asked[ask.request_id] = seat
            self._note_deletion("moving", seat)
            self._leave(ask.consumer_id)

    def _note_deletion(self, kind: str, seat: _Seat) -> None:
        details = {"reset": True, "opening": seat.opening}
        self._notes.note(kind, seat.topic, subscription=seat.subscription, position=BEGINNING, details=details)

    def _on_ack(self, ack: pb.CommandAck) -> None:
        seat = self._seats.get(ack.consumer_id)
        if seat is None:
            return  # it was closed meanwhile, and the broker ignores it
        for ident in ack.message_id:
            details = {"left": mask_of(ident.ack_set)} if ident.ack_set else {}
            cumulative = ack.ack_type == pb.CommandAck.Cumulative
            entry_id = ident.entryId if ident.entryId < 1 << 63 else -1
            self._note("ack", seat, position=(ident.ledgerId, entry_id, -1), cumulative=cumulative, details=details)
        if ack.HasField("request_id"):
            self._answers.on_ack(seat.topic, seat.subscription, ack, is_ordered=seat.kind in ORDERED)
            self._note("saving", seat, details={"ask": ack.request_id})

    def _on_redeliver(self, ask: pb.CommandRedeliverUnacknowledgedMessages) -> None:
        seat = self._seats.get(ask.consumer_id)
        if seat is None:
            return
        for ident in ask.message_ids or (None,):
            self._note("nack", seat, position=None if ident is None else (ident.ledgerId, ident.entryId, -1))

    # What it says

    def _note_gathered(self) -> None:
        gathered = b"".join(self._inner._gathered)
        news, self._noted_bytes = gathered[self._noted_bytes :], len(gathered)
        self._note_said(news)

    def on_written(self, data: bytes) -> None:
        news, self._noted_bytes = data[self._noted_bytes :], max(0, self._noted_bytes - len(data))
        self._note_said(news)

    def _note_said(self, data: bytes) -> None:
        for kind, command, tail in self._said.feed(data):
            if kind in _SAID:
                self._on_said(kind, _parse(command), tail)

    def _on_said(self, kind: int, command: pb.BaseCommand, tail: memoryview) -> None:
        if kind == CommandType.MESSAGE:
            seat = self._seats.get(command.message.consumer_id)
            if seat is not None:
                self._notes.spend_permit(seat.actor, seat.permits)
                seat.permits -= count_messages(tail)
                self._notes.received(seat.topic, seat.actor, seat.subscription, command.message, bytes(tail))
        elif kind == CommandType.SUCCESS:
            asked = self._asked.pop(command.success.request_id, None)
            if isinstance(asked, tuple):
                self._note("sought", asked[0], position=asked[1], details={"opening": asked[0].opening})
            elif isinstance(asked, _Seat):
                self._note_deletion("moved", asked)
            elif asked is not None:
                self._sit_down(asked)
        elif kind == CommandType.ERROR:
            self._asked.pop(command.error.request_id, None)
        elif kind == CommandType.ACTIVE_CONSUMER_CHANGE:
            seat = self._seats.get(command.active_consumer_change.consumer_id)
            if seat is not None and command.active_consumer_change.is_active:
                self._note("active", seat)
        elif kind == CommandType.CLOSE_CONSUMER:
            self._leave(command.close_consumer.consumer_id)
        else:
            response = command.ackResponse
            seat = self._seats.get(response.consumer_id)
            is_saved = seat is not None and not response.HasField("error")
            self._answers.on_answer(response.request_id, seat.opening if seat is not None and is_saved else None)
            if seat is not None and is_saved:
                self._note("saved", seat, details={"ask": response.request_id})

    def _sit_down(self, ask: pb.CommandSubscribe) -> None:
        if ask.consumer_id in self._seats:
            return  # it asked twice, and is the consumer that it was
        topic = str(TopicName.parse(ask.topic))
        opening = self._opening_of(topic)
        life = self._lives[ask.consumer_name] = self._lives.get(ask.consumer_name, 0) + 1
        actor = f"{ask.consumer_name}@{self._peer}.{life}"
        seat = self._seats[ask.consumer_id] = _Seat(actor, topic, ask.subscription, opening, TYPES[ask.subType], permits=0)
        self._note("open", seat, type=seat.kind, details={"opening": opening})

    def _leave(self, consumer_id: int) -> None:
        seat = self._seats.pop(consumer_id, None)
        if seat is not None:
            self._note("close", seat)

    def end(self) -> None:
        """Whatever this connection was for, the broker does not count on it any more."""
        for consumer_id in list(self._seats):
            self._leave(consumer_id)

    def _note(self, kind: str, seat: _Seat, **fields: Any) -> None:
        self._notes.note(kind, seat.topic, seat.actor, subscription=seat.subscription, **fields)


class _TappedTransport:
    def __init__(self, transport: asyncio.BaseTransport, tap: WireTap) -> None:
        self._transport: Any = transport
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._tap.on_written(data)
        self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self._tap.end()
        self._transport.close()

    def abort(self) -> None:
        self._tap.end()
        self._transport.abort()
