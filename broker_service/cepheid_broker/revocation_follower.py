"""Keeps the authenticator in step with the cluster's list of revoked tokens, whichever broker changed it.

    list in metadata ── watch ──► RevokedTokens ──► Authenticator, then `on_changed`: connections of revoked tokens are closed

While metadata cannot be reached, the last known list stays in force.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cepheid_metadata import MetadataStore, RevocationList, WatchedRecord, WatchedRecords, keys, revocation_list
from cepheid_ports import TaskOwner
from cepheid_security.authenticator import Authenticator
from cepheid_security.revocations import RevokedTokens

log = logging.getLogger(__name__)


class RevocationFollower:
    """`start` once, before clients are served."""

    def __init__(
        self, store: MetadataStore, tasks: TaskOwner, authenticator: Authenticator, on_changed: Callable[[], None]
    ) -> None:
        self._store = store
        self._records = WatchedRecords(store, tasks)
        self._authenticator = authenticator
        self._on_changed = on_changed
        self._watched: WatchedRecord[RevocationList] | None = None

    def __repr__(self) -> str:
        return f"<RevocationFollower {self._records!r}>"

    async def start(self) -> None:
        """Read the list. Raises MetadataError, also when it cannot be understood: revoked tokens must not be accepted then."""
        await revocation_list(self._store).get(None)
        self._watched = await self._records.use(keys.REVOCATIONS_KEY, RevocationList, self, self._take)
        self._take()

    def _take(self) -> None:
        if self._watched is None or self._watched.record is None:
            return
        entries = self._watched.record.entries
        self._authenticator.revoked = RevokedTokens(
            digests=frozenset(entry.value for entry in entries if entry.kind == "digest"),
            token_ids=frozenset(entry.value for entry in entries if entry.kind == "id"),
            roles={entry.value: entry.issued_up_to_ms or 0 for entry in entries if entry.kind == "role"},
        )
        log.info("revocations.changed", extra={"entries": len(entries)})
        self._on_changed()
