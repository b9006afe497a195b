"""The base of all records: frozen, validated, versioned JSON.

    value = {"format": 1, …fields}         bytes fields are base64

Rules:
1. Readers refuse a format newer than theirs explicitly (NewerFormatError). New code reads old formats, and writes them until
   an operator finishes the cluster's upgrade.
2. Within one format the fields are fixed: an unknown field is damage, not an extension. Adding one means a new format.
3. Garbage raises CorruptRecordError that names the key; it never counts as "no record".
4. A record that grew (`GrownRecord`) is written in the oldest format that can hold its values: older releases can read it unless an
   operator sets something that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from cepheid_metadata.errors import CorruptRecordError, NewerFormatError


class RecordPart(BaseModel):
    """A value inside a record."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed, validated as a whole (`model_copy` would not)."""
        return type(self).model_validate({**self.__dict__, **changes})  # not dict(self): its generator takes longer than the rest


class Record(RecordPart):
    """A whole value in the store."""

    NAME: ClassVar[str]
    FORMAT: ClassVar[int] = 1

    format: PositiveInt = 1

    def encode(self) -> bytes:
        # What model_dump_json calls, without the conversion to str: thousands of cursor records are written a second.
        return self.__pydantic_serializer__.to_json(self)

    @classmethod
    def decode(cls, value: bytes, key: str) -> Self:
        """Return the record. Raises NewerFormatError, CorruptRecordError; both name `key`."""
        try:
            record = cls.model_validate_json(value)
        except ValidationError as error:
            cls._refuse_newer(_format_of(value), key)
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            message = f"{key} does not hold a valid {cls.NAME} record: {where} {problem['msg']} ({len(value)} bytes)"
            raise CorruptRecordError(message, key=key, record=cls.NAME) from None
        cls._refuse_newer(record.format, key)
        return record

    @classmethod
    def _refuse_newer(cls, found: int, key: str) -> None:
        if found > cls.FORMAT:
            message = f"{key} holds a {cls.NAME} record of format {found}; this release knows formats up to {cls.FORMAT}"
            raise NewerFormatError(message, key=key, record=cls.NAME, format=found, known_format=cls.FORMAT)


class GrownRecord(Record):
    """A record whose later formats have more fields, each None until it is set (rule 4)."""

    ADDED: ClassVar[Mapping[str, int]] = {}
    """The fields that format 1 does not have, with the format that added them."""

    @model_validator(mode="after")
    def _fit_format(self) -> Self:
        self._find_format()
        return self

    def _find_format(self) -> None:
        given, values = self.__pydantic_fields_set__, self.__dict__
        if "format" not in given:
            oldest = max([since for name, since in self.ADDED.items() if values[name] is not None], default=1)
            values["format"] = oldest  # the only write to a frozen model, before any other code has it
        elif len(given) > 1 and (early := [name for name in given if self.ADDED.get(name, 0) > self.format]):
            raise ValueError(f"format {self.format} has no field {min(early)}")

    def replace(self, **changes: Any) -> Self:
        fields = {**self.__dict__, **changes}
        if "format" not in changes:
            del fields["format"]  # determined again: it depends on what is set
        return type(self).model_validate(fields)

    def encode(self) -> bytes:
        later = {name for name, since in self.ADDED.items() if since > self.format}
        return self.__pydantic_serializer__.to_json(self, exclude=later)


def _format_of(value: bytes) -> int:
    """Return the format in a value, 0 if it has none."""
    try:
        fields = json.loads(value)
    except ValueError:
        return 0
    found = fields.get("format", 0) if isinstance(fields, dict) else 0
    return found if isinstance(found, int) else 0
