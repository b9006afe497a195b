"""A channel's state for one stream: what the transport took, and which of it is unanswered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from cepheid_ledger.lane import Lane
from cepheid_rpc import AddAnswer, AddRequest, AddStream


class StreamOwner(Protocol):
    """The channel."""

    def next_message(self, stream: ChannelStream, max_bytes: int) -> Sequence[AddRequest]: ...

    def on_answers(self, stream: ChannelStream, answers: Sequence[AddAnswer]) -> None: ...

    def drop_stream(self, error: BaseException) -> None: ...


class ChannelStream:
    """The source of one stream. Implements `cepheid_rpc.AddSource`. Ignores everything once the channel has dropped it."""

    __slots__ = ("owner", "sent", "transport")

    def __init__(self, owner: StreamOwner) -> None:
        self.owner: StreamOwner | None = owner
        self.sent: dict[int, Unanswered] = {}  # by ledger
        self.transport: AddStream | None = None

    def wake(self) -> None:
        if self.transport is not None:  # otherwise it is being opened, and will be woken then
            self.transport.wake()

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        return self.owner.next_message(self, max_bytes) if self.owner is not None else ()

    def on_answers(self, answers: Sequence[AddAnswer]) -> None:
        if self.owner is not None:
            self.owner.on_answers(self, answers)

    def on_broken(self, error: BaseException) -> None:
        if self.owner is not None:
            self.owner.drop_stream(error)


class Unanswered:
    """Requests of one ledger, in the order in which they were sent and will be answered."""

    __slots__ = ("items", "next_entry_id")

    def __init__(self) -> None:
        self.items: deque[tuple[int, Lane, AddRequest]] = deque()  # with the last entry id
        self.next_entry_id = -1  # where the next answer starts if it is inside the first item, else -1

    def is_next(self, answer: AddAnswer) -> bool:
        """Whether this answers what must be answered next: a request, a part of it, or adjoining ones. Peers are not trusted.

        Ids need not rise from request to request: a recovery may send lower ones than the writer before it.
        """
        begins = self.next_entry_id
        expected = answer.first_entry_id
        for item_last, _, request in self.items:
            if expected != (begins if begins >= 0 else request.group.first_entry_id):
                return False
            if answer.last_entry_id <= item_last:
                return answer.last_entry_id >= expected
            expected, begins = item_last + 1, -1
        return False
