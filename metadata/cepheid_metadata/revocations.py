"""Changes of the list of revoked tokens, by compare-and-set: concurrent changes by several brokers are all kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from cepheid_metadata.errors import BadVersionError, KeyExistsError, MetadataError, StoreUnavailableError
from cepheid_metadata.repositories import revocation_list
from cepheid_metadata.revocation_records import Revocation, RevocationList
from cepheid_metadata.store import MetadataStore

MAX_REVOCATIONS = 4000
_MAX_RECORD_BYTES = 800_000  # a value in metadata has at most 1 MB
_TRIES = 20

Entries = tuple[Revocation, ...]


class RevocationListFullError(MetadataError):
    """No more tokens can be revoked one by one."""

    hint: ClassVar[str] = "revoke all tokens of a role at once (`cepheid tokens revoke --role`) and cancel the single ones"


async def list_revocations(store: MetadataStore) -> Entries:
    """Return the entries of the list, the oldest first. Raises MetadataError."""
    found = await revocation_list(store).get(None)
    return () if found is None else found.record.entries


async def revoke(store: MetadataStore, revocation: Revocation, now_ms: int) -> None:
    """Add an entry to the list, replacing an earlier one for the same token or role. Raises RevocationListFullError."""

    def change(entries: Entries) -> Entries:
        same = [entry for entry in entries if (entry.kind, entry.value) == (revocation.kind, revocation.value)]
        added = revocation
        if revocation.issued_up_to_ms is not None:  # never shorten what an earlier revocation of the role covers
            latest = max([revocation.issued_up_to_ms, *(entry.issued_up_to_ms or 0 for entry in same)])
            lasting = [entry.until_ms for entry in (revocation, *same)]
            until_ms = None if None in lasting else max(filter(None, lasting), default=None)
            added = revocation.replace(issued_up_to_ms=latest, until_ms=until_ms)
        return (*(entry for entry in entries if entry not in same), added)

    await _change(store, change, now_ms)


async def cancel_revocation(store: MetadataStore, kind: str, value: str, now_ms: int) -> bool:
    """Remove an entry from the list, and return whether there was one: the token is valid again."""
    found = False

    def change(entries: Entries) -> Entries:
        nonlocal found
        left = tuple(entry for entry in entries if (entry.kind, entry.value) != (kind, value))
        found = len(left) < len(entries)
        return left

    await _change(store, change, now_ms)
    return found


async def _change(store: MetadataStore, change: Callable[[Entries], Entries], now_ms: int) -> None:
    """Change the list. Raises RevocationListFullError, MetadataError."""
    records = revocation_list(store)
    for _ in range(_TRIES):
        found = await records.get(None)
        before = () if found is None else found.record.entries
        valid = tuple(entry for entry in before if entry.until_ms is None or entry.until_ms > now_ms)
        record = RevocationList(entries=change(valid))
        if len(record.entries) > len(valid):
            _check_size(record)
        try:
            if found is None:
                await records.create(None, record)
            else:
                await records.replace(None, record, found.version)
        except (BadVersionError, KeyExistsError):
            continue  # another change came first
        return
    raise StoreUnavailableError(f"the list of revoked tokens was changed by others {_TRIES} times: try again")


def _check_size(record: RevocationList) -> None:
    """Raise RevocationListFullError for a list that is too large."""
    if len(record.entries) > MAX_REVOCATIONS or len(record.encode()) > _MAX_RECORD_BYTES:
        raise RevocationListFullError(f"the list of revoked tokens is full: it has {len(record.entries) - 1} entries")
