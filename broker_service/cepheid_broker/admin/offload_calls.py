"""Offloading by command: copy a topic's messages before a given one to the object store of its policies, and show the progress.

The state is that of the last command since the topic was opened. A command ends with the ledger before the one that is written:
tools end that one first, by unloading the topic.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, PreconditionError
from cepheid_broker.admin.message_ids import OptionalMessageIdIn, message_id
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import open_plain
from cepheid_broker.topics import PersistentTopic, Topic
from cepheid_managed_ledger import ManagedLedger, OffloadState
from cepheid_metadata import Position
from cepheid_wire import TopicName

NO_CONTENT = 204


def offload_calls(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.put("/offload", status_code=NO_CONTENT)
    async def offload(topic: TopicPath, before: OptionalMessageIdIn) -> None:
        """Everything before this message, ledger by ledger, whatever the thresholds say; 409 while one runs"""
        if before is None:
            raise BadRequestError("The body is to be the id of the first message that stays: ledgerId and entryId")
        before.check_partition(topic)
        ledger = _ledger(topic, await open_plain(context, topic))
        known = ledger.ledgers.ledger_ids
        if known and before.ledgerId > known[-1]:
            raise PreconditionError(f"{topic} has no ledger {before.ledgerId}: its last one is {known[-1]}", topic=str(topic))
        ledger.offload(before.first)

    @router.get("/offload")
    async def offload_status(topic: TopicPath) -> dict[str, Any]:
        """NOT_RUN, RUNNING, SUCCESS with the first message that is not offloaded, or ERROR with the reason"""
        ledger = _ledger(topic, await open_plain(context, topic))
        found = ledger.offload_status
        answer: dict[str, Any] = {"status": found.state.value, "lastError": found.error or ""}
        if found.state is OffloadState.SUCCESS:
            first = found.first_unoffloaded or Position(ledger.ledgers.last_ledger_id, 0)  # the next message that is published
            answer["firstUnoffloadedMessage"] = message_id(first, topic)
        return answer

    return router


def _ledger(name: TopicName, topic: Topic) -> ManagedLedger:
    assert isinstance(topic, PersistentTopic), f"the path is that of a stored topic, {name} is not"
    return topic.ledger
