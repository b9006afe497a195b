"""Message ids as JSON, in requests and answers (docs/reference/shapes.md §8, MessageId and ResetCursorData)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field

from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.topics import Topic
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_wire import TopicName

MAX_ID = (1 << 63) - 1


class MessageIdBody(BaseModel):
    """A position in a topic. `isExcluded`: start after the named message."""

    ledgerId: int = Field(ge=-1, le=MAX_ID)
    entryId: int = Field(ge=-1, le=MAX_ID)
    partitionIndex: int = Field(-1, ge=-1, le=MAX_ID)
    batchIndex: int = Field(-1, ge=-1, le=MAX_ID)
    isExcluded: bool = Field(False, validation_alias=AliasChoices("isExcluded", "excluded"))
    properties: dict[str, str] | None = None

    @property
    def position(self) -> Position:
        return Position(self.ledgerId, self.entryId)

    @property
    def first(self) -> Position:
        """The first entry of the position."""
        if self.isExcluded and self.position not in (EARLIEST, LATEST):
            return Position(self.ledgerId, min(self.entryId + 1, MAX_ID))
        return self.position

    def check_partition(self, topic: TopicName) -> None:
        """Raise PreconditionError (412) for a message of another partition; -1 means any."""
        if self.partitionIndex >= 0 and self.partitionIndex != topic.partition_index:
            message = f"the message id is of partition {self.partitionIndex}, {topic} is {_described(topic)}"
            raise PreconditionError(message, topic=str(topic))


MessageIdIn = Annotated[MessageIdBody, json_body(MessageIdBody)]
OptionalMessageIdIn = Annotated[MessageIdBody | None, json_body(MessageIdBody | None)]


def message_id(position: Position, topic: TopicName) -> dict[str, Any]:
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": topic.partition_index}


def require_place(topic: Topic, position: Position) -> Position:
    """Return the position if delivery can continue there; 412 for a ledger of another topic. A trimmed one means the beginning."""
    ledgers = topic.ledger.ledgers
    known = position in (EARLIEST, LATEST) or position.ledger_id in ledgers
    if not known and position.ledger_id > ledgers.ledger_ids[0]:
        message = f"Topic {topic.name} has no ledger {position.ledger_id}: {position} is a message of another topic, or none"
        raise PreconditionError(message, topic=str(topic.name))
    return position


def _described(topic: TopicName) -> str:
    return f"partition {topic.partition_index}" if topic.is_partition else "no partition"
