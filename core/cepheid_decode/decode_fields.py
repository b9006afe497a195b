"""Parses fields of many protobuf messages at once: all messages advance in lockstep, one numpy step per field.

    message 0   │tag key│len│k k k│tag size│100│            step 1: every tag is `key`: one gather for all lengths
    message 1   │tag key│len│k k│tag size│98│               step 2: every tag is `size`: one gather for all values
    message 2   │tag size│100│                              if tags differ, a step is done for each tag that occurs

Rule 1: what is accepted here is parsed exactly as the protobuf library parses it. Anything unusual (groups, tags of three bytes,
numbers that do not fit their field, sizes beyond the end) is marked `odd`, and the library decides about it.
Rule 2: at most `PADDING_BYTES` are read after the end of a message, so the caller's bytes must have as many more at their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

PADDING_BYTES = 16

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Spans: TypeAlias = tuple[Ints, Ints]  # starts and ends

_NOWHERE = 1 << 61  # a position after every end; so is the sum of two
_MAX_LENGTH = (1 << 31) - 1


class Kind(Enum):
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"  # all 64-bit fields, uint64 as the int64 of the same bits
    BOOL = "bool"  # kept as a number, true: not 0
    BYTES = "bytes"
    REPEATED = "repeated bytes"


_RANGES = {Kind.INT32: (-(1 << 31), (1 << 31) - 1), Kind.UINT32: (0, (1 << 32) - 1)}
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class FieldTable:
    """The fields of `count` messages; a field that is in no message is not in the dictionaries. If a message has a field more than
    once, the last one counts, as in protobuf."""

    count: int
    odd: Bools
    numbers: dict[int, Ints] = field(default_factory=dict)
    spans: dict[int, Spans] = field(default_factory=dict)
    repeated: dict[int, list[tuple[Ints, Ints, Ints]]] = field(default_factory=dict)  # message, start, end
    has: dict[int, Bools] = field(default_factory=dict)

    def present(self, number: int) -> Bools:
        found = self.has.get(number)
        return np.zeros(self.count, bool) if found is None else found

    def has_all(self, number: int) -> bool:
        found = self.has.get(number)
        return found is not None and bool(found.all())

    def number(self, number: int, default: int = 0) -> Ints:
        values = self.numbers.get(number)
        if values is None:
            return np.full(self.count, default, np.int64)
        return values if default == 0 else np.where(self.has[number], values, default)

    def span(self, number: int) -> Spans:
        """Return start and end, both 0 if the field is absent."""
        found = self.spans.get(number)
        return (np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)) if found is None else found

    def elements(self, number: int) -> tuple[Ints, Ints, Ints]:
        """Return owner, start and end of each element of a repeated field, by owner, in the owner's order."""
        parts = self.repeated.get(number)
        if not parts:
            none = np.zeros(0, np.int64)
            return none, none, none
        owners, starts, ends = (np.concatenate([part[i] for part in parts]) for i in range(3))
        order = np.argsort(owners, kind="stable")
        return owners[order], starts[order], ends[order]


def parse_fields(data: Bytes, starts: Ints, ends: Ints, fields: Mapping[int, Kind]) -> FieldTable:
    """Parse the given `fields` (by number) of the messages at `data[starts[i]:ends[i]]`; others are skipped."""
    count = len(starts)
    table = FieldTable(count, np.zeros(count, bool))
    rows: Ints | None = None  # None: all
    at, stop = starts, ends
    while True:
        live = at < stop
        if not live.all():
            rows = np.flatnonzero(live) if rows is None else rows[live]
            at, stop = at[live], stop[live]
        if not len(at):
            return table
        following = _step(table, fields, data, rows, at)
        fits = following <= stop
        if not fits.all():
            table.odd[np.flatnonzero(~fits) if rows is None else rows[~fits]] = True
            rows = np.flatnonzero(fits) if rows is None else rows[fits]
            following, stop = following[fits], stop[fits]
        at = following


def _step(table: FieldTable, fields: Mapping[int, Kind], data: Bytes, rows: Ints | None, at: Ints) -> Ints:
    """Parse one field of every message in `rows`; return where each continues."""
    tags: npt.NDArray[Any] = data[at]
    if tags[0] < 0x80 and (tags == tags[0]).all():
        return _read(table, fields, int(tags[0]), data, rows, at + 1)
    tags = tags.astype(np.int64)
    wide = np.flatnonzero(tags >= 0x80)
    behind = at + 1
    if len(wide):
        second = data[behind[wide]].astype(np.int64)
        # 0 is not a tag. A tag of three bytes is an unknown field; two bytes for a tag that fits in one are left to the library.
        tags[wide] = np.where((second == 0) | (second >= 0x80), 0, (tags[wide] & 0x7F) | second << 7)
        behind[wide] += 1
    if (tags == tags[0]).all():
        return _read(table, fields, int(tags[0]), data, rows, behind)
    following = np.empty_like(at)
    for tag in np.flatnonzero(np.bincount(tags)):
        some = np.flatnonzero(tags == tag)
        following[some] = _read(table, fields, int(tag), data, some if rows is None else rows[some], behind[some])
    return following


def _read(table: FieldTable, fields: Mapping[int, Kind], tag: int, data: Bytes, rows: Ints | None, at: Ints) -> Ints:
    """Parse the field of `tag`, whose contents begin at `at`; return the ends, `_NOWHERE` if it cannot be parsed."""
    number, wire_type = tag >> 3, tag & 7
    kind = fields.get(number)
    if wire_type == _VARINT and number:
        values, following = read_varints(data, at)
        # A known field with another wire type counts as unknown, as in protobuf.
        if kind is not None and kind is not Kind.BYTES and kind is not Kind.REPEATED:
            if kind in _RANGES:
                low, high = _RANGES[kind]
                fits = (values >= low) & (values <= high)
                if not fits.all():
                    following = np.where(fits, following, _NOWHERE)
            _keep_number(table, number, rows, values)
        return following
    if wire_type == _DELIMITED and number:
        lengths, start = read_varints(data, at)
        if int(lengths.max()) > _MAX_LENGTH or int(lengths.min()) < 0:
            lengths = np.where((lengths < 0) | (lengths > _MAX_LENGTH), _NOWHERE, lengths)
        end = start + lengths
        if kind is Kind.BYTES:
            _keep_span(table, number, rows, start, end)
        elif kind is Kind.REPEATED:
            owners = np.arange(table.count) if rows is None else rows
            table.repeated.setdefault(number, []).append((owners, start, end))
            _keep_presence(table, number, rows)
        return end
    if wire_type == _FIXED64 and number:
        return at + 8
    if wire_type == _FIXED32 and number:
        return at + 4
    return np.full(len(at), _NOWHERE)


def read_varints(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Return values (64 bits as int64) and where each ends: `_NOWHERE` if it does not end within ten bytes."""
    values = data[at].astype(np.int64)
    following = at + 1
    more = np.flatnonzero(values >= 0x80)
    if not len(more):
        return values, following
    if len(more) == len(at):
        return _long_varints(data, at)
    values[more], following[more] = _long_varints(data, at[more])
    return values, following


def _long_varints(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Read varints of several bytes: eight bytes as one number, from which three steps remove the highest bit of each byte."""
    words = np.ndarray(len(data) - 7, np.dtype("<u8"), data, strides=(1,))[at]
    ends = ~words & np.uint64(0x8080808080808080)
    end = ends & (~ends + np.uint64(1))  # the lowest bit that is set: the highest of the last byte
    words &= (end - np.uint64(1)) & np.uint64(0x7F7F7F7F7F7F7F7F)
    words = words & np.uint64(0x007F007F007F007F) | (words & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    words = words & np.uint64(0x00003FFF00003FFF) | (words & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    words = words & np.uint64(0x000000000FFFFFFF) | (words & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    values = words.view(np.int64)
    sizes = np.frexp(end.astype(np.float64))[1].astype(np.int64) >> 3  # `end` is 2^(8 · size − 1)
    following = at + sizes
    beyond = np.flatnonzero(end == 0)
    if len(beyond):
        values[beyond], following[beyond] = _longest_varints(data, at[beyond], values[beyond])
    return values, following


def _longest_varints(data: Bytes, at: Ints, low_bits: Ints) -> tuple[Ints, Ints]:
    """Read varints of nine or ten bytes, of which the first eight are known."""
    ninth, tenth = data[at + 8].astype(np.int64), data[at + 9].astype(np.int64)
    is_long = ninth >= 0x80
    values = low_bits | (ninth & 0x7F) << 56 | np.where(is_long, tenth, 0) << 63
    following = at + np.where(is_long, 10, 9)
    following[is_long & (tenth > 1)] = _NOWHERE  # an eleventh byte, or more than 64 bits: the library decides
    return values, following


def _keep_presence(table: FieldTable, number: int, rows: Ints | None) -> None:
    if rows is None:
        table.has[number] = np.ones(table.count, bool)
        return
    present = table.has.get(number)
    if present is None:
        present = table.has[number] = np.zeros(table.count, bool)
    present[rows] = True


def _keep_number(table: FieldTable, number: int, rows: Ints | None, values: Ints) -> None:
    _keep_presence(table, number, rows)
    if rows is None:
        table.numbers[number] = values
        return
    kept = table.numbers.get(number)
    if kept is None:
        kept = table.numbers[number] = np.zeros(table.count, np.int64)
    kept[rows] = values


def _keep_span(table: FieldTable, number: int, rows: Ints | None, start: Ints, end: Ints) -> None:
    _keep_presence(table, number, rows)
    if rows is None:
        table.spans[number] = (start, end)
        return
    kept = table.spans.get(number)
    if kept is None:
        kept = table.spans[number] = (np.zeros(table.count, np.int64), np.zeros(table.count, np.int64))
    kept[0][rows] = start
    kept[1][rows] = end


def big_endian_32(data: Bytes, at: Ints) -> Ints:
    """Return the four-byte numbers at these positions: one gather, over a view in which a number begins at each byte."""
    numbers = np.ndarray(len(data) - 3, np.dtype(">u4"), data, strides=(1,))
    return numbers[at].astype(np.int64)
