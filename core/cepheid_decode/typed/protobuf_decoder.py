"""Protobuf values as columns of the message type to show: in lockstep if possible, otherwise by the library."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
from google.protobuf.descriptor import Descriptor

from cepheid_decode.typed.protobuf_lockstep import NoLockstepError, ProtobufLockstep
from cepheid_decode.typed.protobuf_record import ProtobufRecordDecoder
from cepheid_decode.typed.records import MIN_LOCKSTEP_ROWS, Decoded, complete, decode_each


class ProtobufDecoder:
    """`names`: the needed fields; others may be null."""

    def __init__(self, descriptor: Descriptor, names: Collection[str] | None = None) -> None:
        self._records = ProtobufRecordDecoder(descriptor)
        self.type: pa.DataType = self._records.type
        self.is_record = pa.types.is_struct(self.type)
        self._lockstep = _lockstep(descriptor, names) if self.is_record else None

    def decode(self, values: pa.BinaryArray) -> Decoded:
        if self._lockstep is None or len(values) < MIN_LOCKSTEP_ROWS:
            return decode_each(values, self._records.decode, self.type)
        array, left = self._lockstep.decode(values)
        return complete(array, left, values, self._records.decode)


def _lockstep(descriptor: Descriptor, names: Collection[str] | None) -> ProtobufLockstep | None:
    try:
        return ProtobufLockstep(descriptor, names)
    except NoLockstepError:
        return None
