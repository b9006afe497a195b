"""Which acknowledgements wait to be sent, and which messages of a batch are acknowledged. No I/O.

An entry is acknowledged as a whole once all of its messages are. Until then the broker is told which messages of the batch are
left, as bits: bit i is 1 while message i is not acknowledged.
"""

from __future__ import annotations

from cepheid_wire import pulsar_api_pb2 as pb

Place = tuple[int, int]
"""Ledger and entry."""

_WORD = (1 << 64) - 1
_SIGN = 1 << 63


class AckTracker:
    """Of one topic consumer. `batch_index`: tell the broker about parts of batches too."""

    def __init__(self, *, batch_index: bool) -> None:
        self._batch_index = batch_index
        self._left: dict[Place, int] = {}  # entries acknowledged in part
        self._waiting: dict[Place, int] = {}  # to be sent: 0 for the whole entry, else the bits that are left
        self._cumulative: tuple[Place, int] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._cumulative is not None)

    @property
    def waiting_entries(self) -> int:
        return len(self._waiting)

    def ack(self, place: Place, index: int, batch_size: int) -> None:
        """Acknowledge one message. `index` -1: the whole entry."""
        if index < 0 or batch_size <= 1:
            self._left.pop(place, None)
            self._waiting[place] = 0
            return
        left = self._left.get(place)
        if left is None:
            if self._waiting.get(place) == 0:
                return  # complete already
            left = (1 << batch_size) - 1
        left &= ~(1 << index)
        if left == 0:
            self._left.pop(place, None)
            self._waiting[place] = 0
        else:
            self._left[place] = left
            if self._batch_index:
                self._waiting[place] = left

    def ack_cumulative(self, place: Place, index: int, batch_size: int) -> None:
        """Acknowledge a message and all before it in the topic."""
        left = 0
        if index >= 0 and index < batch_size - 1:
            left = ((1 << batch_size) - 1) & ~((1 << (index + 1)) - 1)
            if not self._batch_index:
                place, left = (place[0], place[1] - 1), 0  # entry -1 means: before the first entry of the ledger
        if self._cumulative is None or (place, -left) > (self._cumulative[0], -self._cumulative[1]):
            self._cumulative = (place, left)
        for earlier in [each for each in self._left if each < place or (each == place and not left)]:
            del self._left[earlier]

    def deliver(self, place: Place, delivered: int) -> None:
        """Of this batch only the messages of these bits are delivered: with them the whole entry is acknowledged."""
        if self._waiting.get(place) != 0:
            self._left[place] = delivered

    def left_of(self, place: Place) -> int | None:
        """Return the bits of messages not acknowledged; None: all of them, or the entry is acknowledged."""
        return self._left.get(place)

    def take_individual(self) -> list[pb.MessageIdData]:
        """Return what must be sent, and forget it."""
        ids = [_id_of(place, left) for place, left in self._waiting.items()]
        self._waiting.clear()
        return ids

    def take_cumulative(self) -> pb.MessageIdData | None:
        cumulative, self._cumulative = self._cumulative, None
        return None if cumulative is None else _id_of(*cumulative)

    def forget_parts(self) -> None:
        """Batches may come again whole: another client may have moved the subscription back."""
        self._left = {place: left for place, left in self._left.items() if place in self._waiting}  # the broker will have these

    def clear(self) -> None:
        """Forget everything: the subscription was moved to another place."""
        self._left.clear()
        self._waiting.clear()
        self._cumulative = None


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
