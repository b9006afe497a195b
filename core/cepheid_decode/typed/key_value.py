"""Key/value schemas: two schemas in one, and values that contain a key.

definition   as clients send it: key length (4 bytes, big-endian; -1: none), key definition, value length, value definition;
             or as in the admin API: {"key": …, "value": …}
properties   key.schema.type, key.schema.properties (JSON), the same for `value`, kv.encoding.type
INLINE       a message's value is: key length (4 bytes, big-endian; -1: null), key, value length, value
SEPARATED    the key is the message's key (base64 in its metadata, so the `key_bytes` of the row), the value is its value
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.typed.lanes import BytesView, gather, read_be32
from cepheid_decode.typed.records import Decoded, Mask, ValueDecoder, decode_present

SEPARATED = "SEPARATED"
_LENGTH = struct.Struct(">i")


def split_schema(schema: SchemaVersion) -> tuple[SchemaVersion, SchemaVersion]:
    """Return the schemas of key and value. Raises BadOptionError."""
    try:
        if schema.definition[:1] == b"{":
            document = json.loads(schema.definition)
            key, value = (_definition(document[side]) for side in ("key", "value"))
        else:
            key, offset = _part(schema.definition, 0)
            value, _ = _part(schema.definition, offset)
        return _side(schema, "key", key), _side(schema, "value", value)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise BadOptionError(f"the key/value schema cannot be read ({error!r}); read with readMode=messages") from None


def _definition(part: Any) -> bytes:
    if part in ("", None):
        return b""
    return part.encode() if isinstance(part, str) else json.dumps(part).encode()


def _part(data: bytes, offset: int) -> tuple[bytes, int]:
    end = offset + _LENGTH.size + max(0, _LENGTH.unpack_from(data, offset)[0])
    if end > len(data):
        raise ValueError(f"it ends after {len(data)} bytes, in a definition up to {end}")
    return data[offset + _LENGTH.size : end], end


def _side(schema: SchemaVersion, side: str, definition: bytes) -> SchemaVersion:
    properties: Mapping[str, Any] = json.loads(schema.properties.get(f"{side}.schema.properties") or "{}")
    kind = schema.properties.get(f"{side}.schema.type", "BYTES")
    return SchemaVersion(schema.version, kind, definition, {name: str(value) for name, value in properties.items()})


def is_separated(schema: SchemaVersion) -> bool:
    return schema.properties.get("kv.encoding.type", "INLINE") == SEPARATED


class KeyValueDecoder:
    """Decodes one schema version. `names` are the columns: `key` and `value`."""

    def __init__(self, key: ValueDecoder, value: ValueDecoder, *, separated: bool) -> None:
        self.fields = [pa.field("key", key.type), pa.field("value", value.type)]
        self._key = key
        self._value = value
        self._separated = separated

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray | None) -> tuple[list[pa.Array], dict[int, str]]:
        errors: dict[int, str] = {}
        if self._separated:
            keys = pa.nulls(len(values), pa.binary()) if keys is None else keys
        else:
            keys, values, errors = split_inline(values)
        found: list[Decoded] = [decode_present(self._key, keys), decode_present(self._value, values)]
        for side, part in zip(("key", "value"), found, strict=True):
            for row, text in part.errors.items():
                errors.setdefault(row, f"{side}: {text}")
        return [part.array for part in found], errors


def split_inline(values: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.BinaryArray, dict[int, str]]:
    """Return keys and values of the packed form, all at once; null if they are null or the packed form is invalid."""
    view = BytesView(values)
    present = values.is_valid().to_numpy(zero_copy_only=False)
    key_start, key_size, ok = _sized(view, view.starts, view.ends)
    value_start, value_size, value_ok = _sized(view, key_start + np.maximum(key_size, 0), view.ends)
    broken = present & ~(ok & value_ok & (value_start + np.maximum(value_size, 0) == view.ends))
    good = present & ~broken
    errors = {int(row): "its packing of key and value is broken" for row in np.flatnonzero(broken)}
    keys = _parts(view, key_start, key_size, good)
    return keys, _parts(view, value_start, value_size, good), errors


def _sized(
    view: BytesView, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Mask]:
    has_length = starts + 4 <= ends
    sizes = read_be32(view, starts)
    starts = starts + 4
    ok = has_length & (sizes >= -1) & (starts + np.maximum(sizes, 0) <= ends)
    return np.where(ok, starts, ends), np.where(ok, sizes, 0), ok


def _parts(view: BytesView, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], good: Mask) -> pa.BinaryArray:
    return gather(view, starts, np.where(good, np.maximum(sizes, 0), 0), good & (sizes >= 0))
