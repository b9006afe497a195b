"""Election by one ephemeral record: the process that creates it is elected until its session ends.

    stand ──► create the record ── created ──► elected
                   └── exists ──► is it the one that we wrote? ── yes ──► elected: the answer of an earlier attempt was lost
                                                               └── no ──► not elected

Two processes may both believe for a moment that they are elected: one that was suspended past its session learns that late. So what
an elected process does must be harmless if two do it, or be checked against the record where it takes effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from cepheid_metadata.errors import KeyExistsError
from cepheid_metadata.record import Record
from cepheid_metadata.repositories import Records

R = TypeVar("R", bound=Record)


class Election(Generic[R]):
    """The candidacy of one process for the record in `records`, which has the noun None."""

    def __init__(self, records: Records[None, R], new_candidacy: Callable[[], R]) -> None:
        """`new_candidacy` returns the record to write: no two candidacies may be equal."""
        self._records = records
        self._new_candidacy = new_candidacy
        self._candidacy: R | None = None  # the record that it wrote, or may have written

    def __repr__(self) -> str:
        return f"<Election by {self._records.key_of(None)}, candidacy {self._candidacy}>"

    @property
    def candidacy(self) -> R | None:
        """The record of this process while it is elected."""
        return self._candidacy

    async def stand(self) -> bool:
        """Become elected if no other process is; return whether this one is now. Raises MetadataError."""
        if self._candidacy is None:
            self._candidacy = self._new_candidacy()
        try:
            await self._records.create(None, self._candidacy, ephemeral=True)
        except KeyExistsError:
            found = await self._records.get(None)
            if found is None:
                return False  # the other has just ended: the next attempt decides
            if found.record != self._candidacy:
                self._candidacy = None
            return self._candidacy is not None
        return True

    async def resign(self) -> None:
        """Give up the election. Raises MetadataError."""
        found = await self._records.get(None)
        if found is not None and found.record == self._candidacy:
            await self._records.delete(None, found.version)
        self._candidacy = None

    async def holds(self) -> bool:
        """Return whether this process is still elected according to the record. Raises MetadataError."""
        found = await self._records.get(None)
        if found is None or found.record != self._candidacy:
            self._candidacy = None
        return self._candidacy is not None
