"""Schemas of one topic: the list of its versions, and each version's definition beside it.

    /schemas/T/N/bb/topic              SchemaHistory: one small row per version, changed by compare-and-set
    /schemas/T/N/bb/topic/TOKEN-0 …    the encoding of one SchemaDefinition, cut if it does not fit one request

A topic's partitions share the history of their base name, and so do both domains (the admin API names neither).
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.record import Record, RecordPart


class SchemaVersion(RecordPart):
    """The row of one version, which every connect reads; definitions are read only if one must be compared."""

    version: NonNegativeInt
    type: str = Field(min_length=1, description="Name of the admin API: AVRO, KEY_VALUE …")
    content_hash: str = Field(min_length=1, description="Equal for equivalent definitions.")
    token: str = Field(min_length=1, description="Random: part of the keys of the definition.")
    parts: PositiveInt
    size_bytes: NonNegativeInt = Field(description="Bytes of all parts.")
    created_at_ms: NonNegativeInt


class SchemaHistory(Record):
    NAME: ClassVar[str] = "schema history"

    next_version: NonNegativeInt = Field(0, description="Next version. Numbers are never given out twice: entries carry them.")
    current_from: NonNegativeInt = Field(0, description="Versions below this were deleted: readable by number, but not in force.")
    versions: tuple[SchemaVersion, ...] = Field((), description="Ascending.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = [row.version for row in self.versions]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise ValueError("versions do not ascend")
        if self.current_from > self.next_version or (numbers and numbers[-1] >= self.next_version):
            raise ValueError(f"next_version {self.next_version} was given out already")
        return self

    @property
    def current(self) -> tuple[SchemaVersion, ...]:
        """The versions in force, the latest last."""
        return tuple(row for row in self.versions if row.version >= self.current_from)

    def find(self, version: int) -> SchemaVersion | None:
        return next((row for row in self.versions if row.version == version), None)


class SchemaDefinition(Record):
    """A definition as a client sent it."""

    NAME: ClassVar[str] = "schema definition"

    type: str = Field(min_length=1)
    data: bytes
    properties: dict[str, str] = Field(default_factory=dict)
