"""A reader of the simulated clients: a subscription that nobody keeps, from the beginning of a topic on.

    connection lost ──► SUBSCRIBE, not durable, with the id of what it took last ──► what comes again of it is dropped here

As the client libraries do. So what it has `read` is the beginning of the topic, through whatever happens, without a gap but where
retention was faster.
"""

from __future__ import annotations

from typing import Any

from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.world.sim_client import SimClient
from tests.simulation.world.sim_consumer import Delivery, SimConsumer

Place = tuple[int, int]
_BEGINNING = (1 << 64) - 1  # -1 in both fields of an id


class SimReader(SimConsumer):
    def __init__(self, client: SimClient, topic: TopicName, name: str, *, queue: int = 10) -> None:
        super().__init__(client, topic, f"reader-{name}", "Exclusive", name, queue=queue)
        self.read: dict[Place, bytes] = {}
        self.read_at_s: dict[Place, float] = {}
        self._last: Place = (-1, -1)
        self._tails: dict[Place, bytes] = {}

    def __repr__(self) -> str:
        return f"<SimReader {self.name} of {self.topic}, at {self._last}>"

    @property
    def last(self) -> Place:
        return self._last

    def next(self) -> Delivery | None:
        """What it has not seen yet."""
        while (delivery := self.take()) is not None:
            if delivery.position > self._last:
                self._last = delivery.position
                self.read[delivery.position] = self._tails.pop(delivery.position)
                self.read_at_s[delivery.position] = self.client.history.now_s
                return delivery
        return None

    def _new_ask(self) -> pb.CommandSubscribe:
        ask = super()._new_ask()
        ask.durable = False
        ledger_id, entry_id = self._last if self.read else (_BEGINNING, _BEGINNING)
        ask.start_message_id.ledgerId, ask.start_message_id.entryId = ledger_id, entry_id
        return ask

    def _on_message(self, message: pb.CommandMessage, tail: memoryview) -> None:
        ident: Any = message.message_id
        self._tails[ident.ledgerId, ident.entryId] = bytes(tail)
        super()._on_message(message, tail)
