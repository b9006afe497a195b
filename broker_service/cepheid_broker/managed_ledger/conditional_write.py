"""A conditional write to the metadata store whose outcome is known in the end.

multi ──► done
  ├── bad version, key exists, no such key ──► somebody else changed it: MetadataError to the caller
  └── outcome unknown ──► look: are our values in place? ──yes──► done
                             │         └──no, versions as before──► write again (a late first attempt and this one
                             └──not even that could be found out──► until the deadline         exclude each other)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cepheid_broker.managed_ledger.settings import ManagedLedgerSettings
from cepheid_metadata import (
    BadVersionError,
    Check,
    Create,
    Delete,
    KeyExistsError,
    MetadataStore,
    NoSuchKeyError,
    Op,
    Put,
    StoreUnavailableError,
)

CONFLICTS = (BadVersionError, KeyExistsError, NoSuchKeyError)


async def write(store: MetadataStore, ops: Sequence[Op], settings: ManagedLedgerSettings) -> None:
    """All of `ops` or none. After a Put the key has the version after the expected one.

    Raises one of CONFLICTS (certain: nothing was written), StoreUnavailableError and other MetadataErrors; when
    `outcome_unknown` is set on it, even looking failed until the deadline. Do not cancel it: the outcome would be unknown.
    """
    deadline = asyncio.get_running_loop().time() + settings.metadata_timeout_s
    doubtful = False
    while True:
        try:
            await store.multi(ops)
            return
        except CONFLICTS:
            # Our own first attempt may have landed after we had looked.
            if doubtful and await _in_place(store, ops):
                return
            raise
        except StoreUnavailableError as error:
            if not error.outcome_unknown:
                if doubtful:
                    raise StoreUnavailableError(str(error), outcome_unknown=True) from error
                raise
            unknown = error
        doubtful = True
        while True:
            if asyncio.get_running_loop().time() >= deadline:
                raise unknown
            await asyncio.sleep(settings.metadata_retry_s)
            try:
                if await _in_place(store, ops):
                    return
                break
            except StoreUnavailableError:
                continue


async def _in_place(store: MetadataStore, ops: Sequence[Op]) -> bool:
    """One changed key tells of all. Only the topic's owner writes these keys, so an equal value is our own."""
    for op in ops:
        if isinstance(op, Check):
            continue
        found = await store.get(op.key)
        if isinstance(op, Delete):
            return found is None
        if isinstance(op, Put):
            return found is not None and found.value == op.value and found.version == op.expected_version + 1
        assert isinstance(op, Create)
        return found is not None and found.value == op.value
    return True
