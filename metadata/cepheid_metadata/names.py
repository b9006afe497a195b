"""Names that many records are about: a topic, and a position in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cepheid_metadata.errors import InvalidNameError


class Position(NamedTuple):
    """An entry of a topic. (ledger, -1) stands before the ledger's first entry. Compare only within one ledger: the order of
    ledgers is the chain's, not that of their ids."""

    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """`domain://tenant/namespace/local name`. A partition is a topic of its own: its local name ends in `-partition-N`."""

    domain: str
    tenant: str
    namespace: str
    local_name: str

    def __post_init__(self) -> None:
        if not (self.domain and self.tenant and self.namespace and self.local_name):
            raise InvalidNameError(f"not a topic name: {str(self)!r}", topic=str(self))

    def __str__(self) -> str:
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.local_name}"

    @staticmethod
    def parse(text: str) -> TopicName:
        """Takes the full form only. Short forms are completed by clients, before they are sent."""
        domain, _, path = text.partition("://")
        parts = path.split("/", 2)
        if len(parts) != 3:
            raise InvalidNameError(f"not a topic name: {text!r}", topic=text)
        return TopicName(domain, *parts)
