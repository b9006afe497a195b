"""Why data written with one schema cannot be read with another."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference of two schemas. `field`: a path (`address.zip`, `orders[].id`), empty for the whole schema; then what each
    side has."""

    field: str
    reader_has: str
    writer_has: str

    def under(self, prefix: str) -> Mismatch:
        return replace(self, field=joined(prefix, self.field))

    def text(self, reader: str, writer: str) -> str:
        where = f"field {shown(self.field)}" if self.field else "the type"
        return f"{where}: {reader} has {self.reader_has}, {writer} has {self.writer_has}"


def joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path and path[0] not in "[{" else prefix + path


def shown(value: Any) -> str:
    """Return a value sent by a peer, bounded and printable, for use in messages."""
    text = value if isinstance(value, str) else json.dumps(value)
    return ascii(text if len(text) <= 100 else text[:100] + "…")
