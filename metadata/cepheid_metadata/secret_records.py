"""Secrets that the processes of a cluster share in metadata. In ZooKeeper only the cluster can read them (zookeeper_acls.py)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeInt

from cepheid_metadata.record import Record, RecordPart


class TicketKeyPart(RecordPart):
    """One key of read tickets."""

    key_id: NonNegativeInt = Field(lt=1 << 32)
    secret: bytes = Field(min_length=16, repr=False)
    signs_from_ms: NonNegativeInt = Field(description="Wall clock. Until then bookies read the key, and no broker signs with it.")


class TicketKeys(Record):
    """The keys of read tickets. Brokers sign with the newest one that may sign; bookies accept all of them."""

    NAME: ClassVar[str] = "ticket keys"

    keys: tuple[TicketKeyPart, ...] = Field(min_length=1)
