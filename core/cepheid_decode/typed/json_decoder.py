"""JSON values as columns of the schema to show: by pyarrow.json if possible, otherwise record by record."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from cepheid_decode.typed.arrow_types import arrow_type, is_record
from cepheid_decode.typed.avro_schema import Node, Record
from cepheid_decode.typed.json_lines import JsonLines, NoJsonLinesError
from cepheid_decode.typed.json_record import JsonRecordDecoder
from cepheid_decode.typed.records import Decoded, complete, decode_each


class JsonDecoder:
    """`names`: the needed fields of the record; others may be null."""

    def __init__(self, node: Node, names: Collection[str] | None = None) -> None:
        self.type: pa.DataType = arrow_type(node)
        self.is_record = is_record(node)
        self._records = JsonRecordDecoder(node)
        self._lines = _lines(node, names)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        if self._lines is None:
            return decode_each(values, self._records.decode, self.type)
        array, left = self._lines.decode(values)
        return complete(array, left, values, self._records.decode)


def _lines(node: Node, names: Collection[str] | None) -> JsonLines | None:
    try:
        return JsonLines(node, names) if isinstance(node, Record) and node.fields else None
    except NoJsonLinesError:
        return None
