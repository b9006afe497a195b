"""The list of revoked tokens: one record for the cluster, which every broker watches."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from cepheid_metadata.record import Record, RecordPart


class Revocation(RecordPart):
    """One revocation: a token by its digest or its id, or the tokens of a role that were issued up to a time."""

    kind: Literal["digest", "id", "role"]
    value: str = Field(min_length=1, max_length=1000, description="SHA-256 of the signed part of the token, `jti`, or role.")
    issued_up_to_ms: NonNegativeInt | None = Field(None, description="For a role: time up to which its tokens were issued.")
    until_ms: NonNegativeInt | None = Field(
        None, description="Time at which the token expires, after which the entry is removed. None: the entry stays."
    )
    revoked_at_ms: NonNegativeInt
    reason: str = Field("", max_length=200)


class RevocationList(Record):
    """All revocations in force. Every write removes entries whose tokens have expired."""

    NAME: ClassVar[str] = "list of revoked tokens"

    entries: tuple[Revocation, ...] = Field(())
