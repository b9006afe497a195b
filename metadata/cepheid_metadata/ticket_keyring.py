"""The keys of read tickets as one process knows them: read by bookies, created and rotated by brokers.

    broker   start ──► no keys? create one ──► follow ──► every `ROTATION_CHECK_S`: rotation due? ──► compare-and-set
    bookie   start ──► follow                      a ticket with an unknown key ──► read again at once, but not too often

Rule 1: known keys stay in use while metadata is unavailable: readers continue, and so does signing.
Rule 2: a key is published `NOTICE_S` before it signs, so that no bookie gets a ticket whose key it has not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cepheid_metadata import keys as layout
from cepheid_metadata.errors import BadVersionError, KeyExistsError, MetadataError, StoreClosedError
from cepheid_metadata.repositories import Records
from cepheid_metadata.secret_records import TicketKeyPart, TicketKeys
from cepheid_metadata.store import MetadataStore, security_of
from cepheid_metadata.upgrade import SIGNED_TICKETS_SINCE, StorageFormat
from cepheid_metadata.watched_records import WatchedRecord, WatchedRecords
from cepheid_ports import Ports, TaskOwner
from cepheid_security.read_tickets import (
    PREFIX,
    SECRET_BYTES,
    ReadTicket,
    TicketKey,
    TicketVerdict,
    check_ticket,
    plan_rotation,
    sign_ticket,
    signing_key,
)

log = logging.getLogger(__name__)

NOTICE_S = 60.0
ROTATION_CHECK_S = 60.0
LOOK_AGAIN_S = 1.0
_ATTEMPTS = 5


def ticket_keys(store: MetadataStore) -> Records[None, TicketKeys]:
    """Return the record of the keys: there is one, with the noun None."""
    return Records(store, lambda _: layout.TICKET_KEYS_KEY, TicketKeys)


class TicketKeyring:
    """Signs and checks tickets. `start` once, `aclose` once. `life_s`: how long tickets signed here are valid."""

    def __init__(self, store: MetadataStore, ports: Ports, *, life_s: float = 3600.0) -> None:
        self._store = store
        self._ports = ports
        self._life_ms = round(1000 * life_s)
        self._tasks = TaskOwner("ticket-keyring")
        self._records = WatchedRecords(store, self._tasks)
        self._watched: WatchedRecord[TicketKeys] | None = None
        self._format: WatchedRecord[StorageFormat] | None = None
        self._keys: dict[int, TicketKey] = {}
        self._looked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<TicketKeyring of {len(self._keys)} keys>"

    @property
    def keys(self) -> Mapping[int, TicketKey]:
        """The keys by id; none before a broker created one."""
        return self._keys

    @property
    def are_required(self) -> bool:
        """Whether each process of the cluster knows signed tickets: its upgrade was finished, or it was founded with them.

        Until then brokers and readers of the previous release must be able to use a plan, so it contains master keys as well.
        """
        record = None if self._format is None else self._format.record
        return record is not None and record.storage_format >= SIGNED_TICKETS_SINCE

    @property
    def problem(self) -> str | None:
        """Why others may know the keys; None: they are private to the cluster, as far as this process can tell."""
        security = security_of(self._store)
        if not security.user:
            return "every client that can reach ZooKeeper can read the keys of read tickets: set metadata_auth_file"
        if not security.private:
            return "the keys of read tickets may be readable by every client that reaches ZooKeeper while metadata_private is false"
        return None

    async def start(self, *, rotate_s: float | None = None) -> None:
        """Return when the present keys are known. `rotate_s`: this process creates keys, and new ones at this age.

        Raises the errors of the store.
        """
        if (problem := self.problem) is not None:
            log.warning("ticket_keys.open", extra={"error": problem, "hint": "see ZooKeeper in docs/security.md"})
        if rotate_s is not None:
            await self._rotate(rotate_s)
        self._watched = await self._records.use(layout.TICKET_KEYS_KEY, TicketKeys, self, self._on_changed)
        self._on_changed()
        self._format = await self._records.use(layout.STORAGE_FORMAT_KEY, StorageFormat, self, _do_nothing)
        if rotate_s is not None:
            self._tasks.start(self._keep_rotating(rotate_s), name="rotate")

    async def aclose(self) -> None:
        if self._watched is not None:
            self._records.leave(self._watched, self)
        if self._format is not None:
            self._records.leave(self._format, self)
        await self._tasks.aclose()

    def sign(self, ledger_id: int, last_entry_id: int, role: str) -> bytes:
        """Return a ticket for the entries of a ledger up to `last_entry_id`."""
        now_ms = self._ports.wall_ms()
        key = signing_key(list(self._keys.values()), now_ms)
        assert key is not None, "a process that signs has made a key when it started"
        return sign_ticket(key, ReadTicket(ledger_id, 0, last_entry_id, role, now_ms + self._life_ms))

    def check(self, ticket: bytes, ledger_id: int, first_entry_id: int, last_entry_id: int) -> TicketVerdict:
        """Return whether the ticket permits this read. After an unknown key the keys are read again, for the next attempt."""
        verdict = check_ticket(ticket, self._keys, self._ports.wall_ms(), ledger_id, first_entry_id, last_entry_id)
        if verdict is TicketVerdict.UNKNOWN_KEY:
            self._look_again()
        return verdict

    def check_upgrading(self, ticket: bytes, ledger_id: int, first_entry_id: int, last_entry_id: int) -> TicketVerdict:
        """Check a ticket; until signed tickets are required, those of readers of the previous release are valid, too."""
        if not self.are_required and not ticket.startswith(PREFIX):
            return TicketVerdict.VALID
        return self.check(ticket, ledger_id, first_entry_id, last_entry_id)

    def _look_again(self) -> None:
        """Read the keys again, at most once in `LOOK_AGAIN_S`: anyone can send a made-up key id."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at = now
            self._tasks.start(self._read(), name="look-again")

    async def _read(self) -> None:
        try:
            found = await ticket_keys(self._store).get(None)
        except MetadataError as error:
            log.warning("ticket_keys.not_read", extra={"error": str(error)})
            return
        if found is not None:
            self._take(found.record)

    def _on_changed(self) -> None:
        assert self._watched is not None
        if self._watched.record is not None:
            self._take(self._watched.record)

    def _take(self, record: TicketKeys) -> None:
        self._keys = {part.key_id: TicketKey(part.key_id, part.secret, part.signs_from_ms) for part in record.keys}

    async def _keep_rotating(self, rotate_s: float) -> None:
        while True:
            await asyncio.sleep(ROTATION_CHECK_S)
            try:
                await self._rotate(rotate_s)
            except StoreClosedError:
                return
            except MetadataError as error:  # rule 1
                log.warning("ticket_keys.not_rotated", extra={"error": str(error)})

    async def _rotate(self, rotate_s: float) -> None:
        """Create the first key, or the next one, unless another broker does."""
        records = ticket_keys(self._store)
        for _ in range(_ATTEMPTS):
            found = await records.get(None)
            before = () if found is None else tuple(TicketKey(p.key_id, p.secret, p.signs_from_ms) for p in found.record.keys)
            planned = plan_rotation(
                before,
                self._ports.wall_ms(),
                rotate_ms=round(1000 * rotate_s),
                life_ms=self._life_ms,
                notice_ms=round(1000 * NOTICE_S),
                new_secret=self._new_secret,
            )
            if planned is None:
                return
            record = TicketKeys(
                keys=tuple(TicketKeyPart(key_id=k.key_id, secret=k.secret, signs_from_ms=k.signs_from_ms) for k in planned)
            )
            try:
                if found is None:
                    await records.create(None, record)
                else:
                    await records.replace(None, record, found.version)
            except (KeyExistsError, BadVersionError):
                continue  # another broker was first: read its keys
            self._take(record)
            log.info("ticket_keys.rotated", extra={"keys": [key.key_id for key in planned]})
            return

    def _new_secret(self) -> tuple[int, bytes]:
        return self._ports.random.getrandbits(32), self._ports.random.randbytes(SECRET_BYTES)


def _do_nothing() -> None:
    """Do nothing: `are_required` reads the record when it is needed."""
