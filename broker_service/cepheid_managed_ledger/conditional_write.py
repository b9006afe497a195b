"""A conditional write to the metadata store that finds out its outcome if the answer is lost.

multi ──► done
  ├── bad version, key exists, no such key ──► another process changed it: MetadataError to the caller
  └── outcome unknown ──► read: are our values in place? ──yes──► done
                             │         ├──no, versions as before──► write again (a late first attempt and this one
                             │         │                            exclude each other)
                             │         └──no, another value has our version──► the conflict, as certain as above
                             └──cannot be decided any more: others wrote since, or the store stays unavailable──► unknown

The caller decides how long the store may stay unavailable: an open topic waits as long as its session may live (a write is always
under way when a store fails, and giving it up would close every topic), an opening does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cepheid_managed_ledger.settings import ManagedLedgerSettings
from cepheid_metadata import (
    BadVersionError,
    Check,
    Delete,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    Op,
    Put,
    StoreUnavailableError,
)

CONFLICTS = (BadVersionError, KeyExistsError, NoSuchKeyError)


MAX_PAUSE_S = 0.5


async def write(
    store: MetadataStore,
    ops: Sequence[Op],
    settings: ManagedLedgerSettings,
    is_patient: Callable[[], bool] = lambda: False,
    *,
    repeats: bool = True,
) -> None:
    """Write all of `ops` or none. After a Put the key has the version after the expected one.

    `repeats`: write again if the values are not in place; otherwise the outcome is reported as unknown.

    Raises one of CONFLICTS (certain: nothing was written), StoreUnavailableError and other MetadataErrors. With `outcome_unknown`
    set, even reading failed until the deadline, and as long as `is_patient` returned True. Do not cancel it: the outcome would be
    unknown.
    """
    deadline = asyncio.get_running_loop().time() + settings.metadata_timeout_s
    doubt: StoreUnavailableError | None = None
    while True:
        conflict: MetadataError | None = None
        try:
            await store.multi(ops)
            return
        except CONFLICTS as error:
            if doubt is None:
                raise
            conflict = error  # perhaps a conflict with our own first attempt
        except StoreUnavailableError as error:
            if doubt is None and not error.outcome_unknown:
                raise
            doubt = error
        if await _look(store, ops, doubt, lambda: is_patient() or asyncio.get_running_loop().time() < deadline, settings):
            return
        if conflict is not None:
            raise conflict
        if not repeats:
            raise StoreUnavailableError(f"{doubt}; it is not in place", outcome_unknown=True) from doubt


async def _look(
    store: MetadataStore,
    ops: Sequence[Op],
    doubt: StoreUnavailableError,
    may_wait: Callable[[], bool],
    settings: ManagedLedgerSettings,
) -> bool:
    """Return whether our values are in place. Raises StoreUnavailableError with `outcome_unknown` if that cannot be decided."""
    pause_s = settings.metadata_retry_s
    while may_wait():
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, pause_s * 2)
        try:
            in_place = await _in_place(store, ops)
        except StoreUnavailableError:
            continue
        if in_place is None:
            raise StoreUnavailableError(f"{doubt}; the key was written again since", outcome_unknown=True) from doubt
        return in_place
    raise StoreUnavailableError(f"{doubt}; the store stays unavailable", outcome_unknown=True) from doubt


async def _in_place(store: MetadataStore, ops: Sequence[Op]) -> bool | None:
    """Decide by one changed key for all of them. None: it cannot be decided any more.

    An equal value is our own, since only the topic's owner writes these keys. Another value at exactly the version that ours would
    have means that ours was never written; at a higher version, ours may have been overwritten.
    """
    for op in ops:
        if isinstance(op, Check):
            continue
        found = await store.get(op.key)
        if isinstance(op, Delete):
            return found is None
        if found is None:
            return None if isinstance(op, Put) else False
        version = op.expected_version + 1 if isinstance(op, Put) else 0
        if found.version > version:
            return None
        return found.version == version and found.value == op.value
    return True
