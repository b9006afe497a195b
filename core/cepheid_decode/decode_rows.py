"""Messages as rows: combines the messages of entries and of batches.

batch messages   m0 m1 m2 m3 │ messages alone   s0 s1        two tables with fields of different numbers
rows             m0 m1 s0 m2 m3 s1                           picked from both, in the order of the topic
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cepheid_decode import entry_metadata as entry_fields
from cepheid_decode.decode_batches import BatchMessages
from cepheid_decode.decode_fields import Bools, Bytes, Ints, Spans
from cepheid_decode.entry_metadata import EntryTable
from cepheid_decode.history import Piece

ALONE = -1
"""Used as batch index for messages that are not in a batch."""


@dataclass(frozen=True, slots=True)
class _Field:
    """The same field in SingleMessageMetadata and in MessageMetadata."""

    in_batch: int
    in_entry: int


KEY = _Field(2, entry_fields.PARTITION_KEY)
EVENT_TIME = _Field(5, entry_fields.EVENT_TIME)
KEY_IS_BASE64 = _Field(6, entry_fields.KEY_IS_BASE64)
ORDERING_KEY = _Field(7, entry_fields.ORDERING_KEY)
SEQUENCE_ID = _Field(8, entry_fields.SEQUENCE_ID)
NULL_VALUE = _Field(9, entry_fields.NULL_VALUE)
NULL_KEY = _Field(10, entry_fields.NULL_KEY)
COMPACTED_OUT = 4


@dataclass(slots=True)
class Alone:
    """Messages that are not in a batch, and batches that are shown as one row: `known` is false for these, because the metadata of
    a batch repeats that of its first message, which does not apply to the others."""

    entries: Ints
    payload_starts: Ints
    payload_ends: Ints
    has_payload: Bools
    known: Bools


@dataclass(slots=True)
class MessageRows:
    """`pick[i]` is the index of row i among all batch messages, followed by all `alone`; None: all of them in this order."""

    piece: Piece
    data: Bytes
    entries: EntryTable
    batch_entries: Ints  # for each batch message, its row in `entries`
    batch: BatchMessages
    alone: Alone
    contexts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # by row in `entries`: of encrypted ones
    reasons: Mapping[int, str] = field(default_factory=dict)  # by row in `entries`: why it is bad, for those that are shown as rows
    pick: Ints | None = None

    def __post_init__(self) -> None:
        if len(self.batch_entries) and len(self.alone.entries):
            self.pick = np.argsort(np.concatenate((self.batch_entries, self.alone.entries)), kind="stable")

    def keep(self, wanted: Bools) -> None:
        """Keep only the rows that are `wanted`."""
        if not wanted.all():
            self.pick = np.flatnonzero(wanted) if self.pick is None else self.pick[wanted]

    def parts(self, limit: int) -> Iterator[MessageRows]:
        """Yield the same rows, at most `limit` at a time."""
        if len(self) <= limit:
            yield self
            return
        pick = np.arange(len(self)) if self.pick is None else self.pick
        for start in range(0, len(pick), limit):
            part = copy(self)
            part.pick = pick[start : start + limit]
            yield part

    def __len__(self) -> int:
        return len(self.batch_entries) + len(self.alone.entries) if self.pick is None else len(self.pick)

    def entry_rows(self) -> Ints:
        return self.picked(self.batch_entries, self.alone.entries)

    def batch_index(self) -> Ints:
        return self.picked(self.batch.index, np.full(len(self.alone.entries), ALONE))

    def numbers(self, wanted: _Field) -> Ints:
        """0 if absent."""
        return self.picked(
            self.batch.fields.number(wanted.in_batch),
            np.where(self.alone.known, self.entries.fields.number(wanted.in_entry)[self.alone.entries], 0),
        )

    def present(self, wanted: _Field) -> Bools:
        in_entry = self.entries.fields.present(wanted.in_entry)[self.alone.entries] & self.alone.known
        return self.picked(self.batch.fields.present(wanted.in_batch), in_entry)

    def spans(self, wanted: _Field) -> Spans:
        in_batch, in_entry = self.batch.fields.span(wanted.in_batch), self.entries.fields.span(wanted.in_entry)
        start, end = (self.picked(in_batch[i], in_entry[i][self.alone.entries]) for i in (0, 1))
        return start, end

    def payloads(self) -> tuple[Ints, Ints, Bools]:
        """Return start, end, and whether there is a payload: not for tombstones, and not if it could not be decompressed."""
        present = self.picked(np.ones(len(self.batch_entries), bool), self.alone.has_payload)
        starts = self.picked(self.batch.payload_starts, self.alone.payload_starts)
        ends = self.picked(self.batch.payload_ends, self.alone.payload_ends)
        return starts, ends, present & (self.numbers(NULL_VALUE) == 0)

    def picked(self, in_batch: npt.NDArray[Any], alone: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Combine an array for the batch messages and one for those alone to one array for the rows."""
        if not len(alone):
            everything = in_batch
        elif not len(in_batch):
            everything = alone
        else:
            everything = np.concatenate((in_batch, alone))
        return everything if self.pick is None else everything[self.pick]
