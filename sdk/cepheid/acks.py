"""Tracks acknowledgements that wait to be sent, and the acknowledged messages of batches. No I/O.

An entry is acknowledged as a whole once all of its messages are. Until then the broker is sent the messages of the batch that are
left, as bits: bit i is 1 while message i is not acknowledged.

Applications acknowledge messages of the same batch one after the other. `ack` returns the batch's record: while the batch waits to
be sent anyway, the caller marks further messages there, which takes neither a lookup nor arithmetic on numbers of 1,000 bits.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from cepheid_wire import pulsar_api_pb2 as pb

T = TypeVar("T")
Place = tuple[int, int]
"""Ledger and entry."""

_WORD = (1 << 64) - 1
_SIGN = 1 << 63
_DIGITS = bytes.maketrans(b"\0\1", b"01")


class BatchPart:
    """The unacknowledged messages of one batch. `flags` has a byte for each message: 1 while it is left."""

    __slots__ = ("flags", "is_waiting", "left")

    def __init__(self, flags: bytearray) -> None:
        self.flags = flags
        self.left = flags.count(1)
        self.is_waiting = False  # waits to be sent to the broker, and is in the tracker

    def ack(self, index: int) -> bool:
        """Mark a message of a waiting batch. Return False, without any change, if the tracker must do it."""
        if not self.is_waiting or self.left <= 1:
            return False
        if self.flags[index]:
            self.flags[index] = 0
            self.left -= 1
        return True

    @property
    def bits(self) -> int:
        return int(self.flags[::-1].translate(_DIGITS), 2)


class AckTracker:
    """The acknowledgements of one topic consumer. `batch_index`: send partial acknowledgements of batches, too."""

    def __init__(self, *, batch_index: bool) -> None:
        self._batch_index = batch_index
        self._left: dict[Place, BatchPart] = {}  # entries acknowledged in part
        self._waiting: dict[Place, BatchPart | None] = {}  # to be sent: None for the whole entry, otherwise what is left of it
        self._cumulative: tuple[Place, int] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._cumulative is not None)

    @property
    def waiting_entries(self) -> int:
        return len(self._waiting)

    def ack(self, place: Place, index: int, batch_size: int) -> BatchPart | None:
        """Acknowledge one message. `index` -1: the whole entry. Return what is left of its batch."""
        if index < 0 or batch_size <= 1:
            self._complete(place)
            return None
        part = self._left.get(place)
        if part is None:
            if self._is_complete(place):
                return None
            part = self._left[place] = BatchPart(bytearray(b"\1") * batch_size)
        if index < len(part.flags) and part.flags[index]:
            part.flags[index] = 0
            part.left -= 1
        if part.left == 0:
            self._complete(place)
            return None
        if self._batch_index:
            self._waiting[place] = part
            part.is_waiting = True
        return part

    def ack_cumulative(self, place: Place, index: int, batch_size: int) -> None:
        """Acknowledge a message and all before it in the topic."""
        left = 0
        if index >= 0 and index < batch_size - 1:
            left = ((1 << batch_size) - 1) & ~((1 << (index + 1)) - 1)
            if not self._batch_index:
                place, left = (place[0], place[1] - 1), 0  # entry -1 means before the first entry of the ledger
        if self._cumulative is None or (place, -left) > (self._cumulative[0], -self._cumulative[1]):
            self._cumulative = (place, left)
        for earlier in [each for each in self._left if each < place or (each == place and not left)]:
            self._forget(earlier)

    def deliver(self, place: Place, delivered: int) -> None:
        """Note that only the messages of these bits are delivered: once they are acknowledged, the whole entry is."""
        if not self._is_complete(place):
            self._forget(place)
            self._left[place] = BatchPart(bytearray(map(int, f"{delivered:b}"[::-1])))

    def left_of(self, place: Place) -> int | None:
        """Return the bits of unacknowledged messages; None: all of them, or the entry is acknowledged."""
        part = self._left.get(place)
        return None if part is None else part.bits

    def take_individual(self) -> list[pb.MessageIdData]:
        """Return what must be sent, and forget it."""
        ids = []
        for place, part in self._waiting.items():
            if part is not None:
                part.is_waiting = False
            ids.append(_id_of(place, 0 if part is None else part.bits))
        self._waiting.clear()
        return ids

    def take_cumulative(self) -> pb.MessageIdData | None:
        cumulative, self._cumulative = self._cumulative, None
        return None if cumulative is None else _id_of(*cumulative)

    def forget_parts(self) -> None:
        """Forget partly acknowledged batches:

        another client may have moved the subscription back, so they may be delivered whole.
        """
        self._left = {place: part for place, part in self._left.items() if place in self._waiting}  # the broker will have these

    def clear(self) -> None:
        """Forget everything: the subscription was moved to another place."""
        for place in list(self._left):
            self._forget(place)
        self._waiting.clear()
        self._cumulative = None

    def _is_complete(self, place: Place) -> bool:
        """Return whether the whole entry is acknowledged and waits to be sent."""
        return place in self._waiting and self._waiting[place] is None

    def _complete(self, place: Place) -> None:
        self._forget(place)
        self._waiting[place] = None

    def _forget(self, place: Place) -> None:
        """Detach the batch's record: messages that hold it acknowledge through the tracker from now on."""
        if (part := self._left.pop(place, None)) is not None:
            part.is_waiting = False


class DeliveredMessages(Generic[T]):
    """Messages that the application neither acknowledged nor gave back, for consumers with an acknowledgement timeout.

    All messages have the same time limit, so that they expire in the order of delivery.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._given: dict[tuple[Place, int], tuple[float, T]] = {}

    def add(self, place: Place, index: int, message: T, now_s: float) -> None:
        self._given.pop((place, index), None)  # an earlier delivery: the new one expires last
        self._given[place, index] = now_s + self.timeout_s, message

    def discard(self, place: Place, index: int) -> None:
        self._given.pop((place, index), None)

    def discard_through(self, place: Place, index: int) -> None:
        """Discard the messages of a cumulative acknowledgement. `index` -1: of the whole entry."""
        for each in list(self._given):
            if each[0] < place or (each[0] == place and (index < 0 or each[1] <= index)):
                del self._given[each]

    def clear(self) -> None:
        self._given.clear()

    def next_deadline(self) -> float | None:
        return next(iter(self._given.values()))[0] if self._given else None

    def take_expired(self, now_s: float) -> list[T]:
        expired = []
        while self._given:
            key = next(iter(self._given))
            deadline, message = self._given[key]
            if deadline > now_s:
                break
            del self._given[key]
            expired.append(message)
        return expired


def words_of(bits: int) -> list[int]:
    """Return bits as the protocol's signed 64-bit words, lowest first, without zero words at the end."""
    words = []
    while bits:
        word, bits = bits & _WORD, bits >> 64
        words.append(word - (1 << 64) if word & _SIGN else word)
    return words


def bits_of(words: list[int]) -> int:
    """Return the bits of a received ack set."""
    bits = 0
    for index, word in enumerate(words):
        bits |= (word & _WORD) << (64 * index)
    return bits


def _id_of(place: Place, left: int) -> pb.MessageIdData:
    return pb.MessageIdData(ledgerId=place[0], entryId=place[1] & _WORD, ack_set=words_of(left))
