"""JSON values as columns of the schema that is shown: pyarrow.json where it can, record by record where not."""

from __future__ import annotations

import pyarrow as pa

from cepheid_scan.typed.arrow_types import arrow_type, is_record
from cepheid_scan.typed.avro_schema import Node
from cepheid_scan.typed.json_record import JsonRecordDecoder
from cepheid_scan.typed.records import Decoded, decode_each


class JsonDecoder:
    def __init__(self, node: Node) -> None:
        self.type: pa.DataType = arrow_type(node)
        self.is_record = is_record(node)
        self._records = JsonRecordDecoder(node)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        return decode_each(values, self._records.decode, self.type)
