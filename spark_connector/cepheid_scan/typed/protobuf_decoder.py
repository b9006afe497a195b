"""Protobuf values as columns of the message type that is shown."""

from __future__ import annotations

import pyarrow as pa
from google.protobuf.descriptor import Descriptor

from cepheid_scan.typed.protobuf_record import ProtobufRecordDecoder
from cepheid_scan.typed.records import Decoded, decode_each


class ProtobufDecoder:
    def __init__(self, descriptor: Descriptor) -> None:
        self._records = ProtobufRecordDecoder(descriptor)
        self.type: pa.DataType = self._records.type
        self.is_record = pa.types.is_struct(self.type)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        return decode_each(values, self._records.decode, self.type)
