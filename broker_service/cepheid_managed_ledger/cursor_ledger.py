"""Cursor states that are too large for a metadata record: written as a whole to one ledger per topic.

    snapshot = n entries (parts), appended as one group:
        format 1 │ generation │ snapshot number │ part k │ parts n │ size of name │ name │ piece of the state
        1          8            8                 4        4         2              …      …

Rules:
1. A snapshot counts only with all of its parts. Of a cursor's complete snapshots of its present generation, the last one counts.
2. A cursor's record names the ledger only after a snapshot of that generation is durable in it.
3. Recovery closes the ledger, which ends the old owner's saves; the new owner starts another one.
4. What is certainly lost or damaged is skipped: the last whole snapshot counts. That repeats messages; a topic that never opens
   would lose them. What is not certain is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cepheid_ledger import EntryDamagedError, LedgerClient, LedgerError, LedgerWriter, NoSuchEntryError, TailDamagedError
from cepheid_managed_ledger.cursor_state import CursorState, decode_state
from cepheid_managed_ledger.errors import CursorStateDamagedError, CursorStateNewerError
from cepheid_ports import CepheidError
from cepheid_rpc import EntryGroup

log = logging.getLogger(__name__)

FORMAT = 1
_HEAD = struct.Struct("<BqQIIH")
_READ_BACK_ENTRIES = 64
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    name: str
    generation: int
    state: bytes


class CursorLedger:
    """The cursor ledger that is being written."""

    def __init__(self, writer: LedgerWriter, part_bytes: int) -> None:
        self.writer = writer
        self._part_bytes = part_bytes
        self._number = 0

    def __repr__(self) -> str:
        return f"<CursorLedger {self.ledger_id}, {self._number} snapshots, {self.writer.length} B>"

    @property
    def ledger_id(self) -> int:
        return self.writer.ledger_id

    @property
    def size_bytes(self) -> int:
        return self.writer.length

    async def save(self, snapshots: Sequence[Snapshot]) -> None:
        """Write snapshots; they are durable when it returns. Raises LedgerError: the ledger accepts no more."""
        payloads: list[bytes] = []
        for snapshot in snapshots:
            self._number += 1
            payloads += parts_of(snapshot, self._number, self._part_bytes)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_done(outcome: EntryGroup | LedgerError) -> None:
            if done.done():
                return
            if isinstance(outcome, LedgerError):
                done.set_exception(outcome)
            else:
                done.set_result(None)

        self.writer.append(payloads, on_done)
        await done

    async def aclose(self) -> None:
        """Close the ledger, which spares the next owner its recovery; if that fails, recovery closes it."""
        try:
            await self.writer.close()
        except (CepheidError, TimeoutError) as error:
            log.info("cursor.ledger_left_open", extra={"ledger_id": self.ledger_id, "error": str(error)})
        await self.writer.aclose()


def parts_of(snapshot: Snapshot, number: int, part_bytes: int) -> list[bytes]:
    name = snapshot.name.encode()
    pieces = [snapshot.state[start : start + part_bytes] for start in range(0, len(snapshot.state), part_bytes)]
    return [
        _HEAD.pack(FORMAT, snapshot.generation, number, part, len(pieces), len(name)) + name + piece
        for part, piece in enumerate(pieces)
    ]


class SnapshotReader:
    """Assembles snapshots from parts in any order: a pure core."""

    def __init__(self, generations: Mapping[str, int]) -> None:
        self._generations = generations
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}
        self._found: dict[str, tuple[int, CursorState]] = {}
        self.damaged = 0

    def feed(self, payload: bytes | memoryview) -> None:
        """Take one part. Raises CursorStateNewerError."""
        if payload and payload[0] > FORMAT:
            message = f"a cursor snapshot has format {payload[0]}; this release knows formats up to {FORMAT}"
            raise CursorStateNewerError(message, format=payload[0], known_format=FORMAT)
        try:
            version, generation, number, part, parts, name_size = _HEAD.unpack_from(payload)
            if version != FORMAT:
                raise CursorStateDamagedError(f"a cursor snapshot has format {version}, which does not exist")
            name = bytes(payload[_HEAD.size : _HEAD.size + name_size]).decode()
        except (struct.error, UnicodeDecodeError, CursorStateDamagedError):
            self.damaged += 1
            return
        if self._generations.get(name) != generation or self._found.get(name, (-1,))[0] >= number:
            return
        pieces = self._parts.setdefault((name, number), {})
        pieces[part] = bytes(payload[_HEAD.size + name_size :])
        if len(pieces) == parts:  # rule 1
            del self._parts[name, number]
            try:
                self._found[name] = number, decode_state(b"".join(pieces[index] for index in range(parts)))
            except (CursorStateDamagedError, KeyError):
                self.damaged += 1

    @property
    def states(self) -> dict[str, CursorState]:
        return {name: state for name, (_, state) in self._found.items()}

    @property
    def is_complete(self) -> bool:
        """Whether there is a state for every cursor. If fed from the end backwards, it is the newest one."""
        return len(self._found) == len(self._generations)


@dataclass(frozen=True, slots=True)
class RecoveredStates:
    states: Mapping[str, CursorState]
    """The newest state of each cursor that the ledger has; those without any are missing."""
    lost_entries: int
    """Entries that were skipped (rule 4). If not 0, they may have held newer states."""


async def recover_states(client: LedgerClient, ledger_id: int, generations: Mapping[str, int]) -> RecoveredStates:
    """Return the newest states of these cursors (name → generation).

    Raises errors that are worth another attempt, NoSuchLedgerError and CursorStateNewerError.
    """
    lost_entries = 0
    try:
        end = await client.recover(ledger_id)
    except TailDamagedError:
        end, lost_entries = await client.recover(ledger_id, despite_damage=True), 1
    reader = await client.open_reader(ledger_id)
    found = SnapshotReader(generations)
    last = end.last_entry_id
    while last >= 0 and not found.is_complete:
        first = max(0, last - _READ_BACK_ENTRIES + 1)
        payloads: list[memoryview] = []
        next_entry_id = first
        while next_entry_id <= last:
            try:
                groups = await reader.read(next_entry_id, last, max_bytes=_READ_BYTES)
            except (NoSuchEntryError, EntryDamagedError):
                next_entry_id += 1
                lost_entries += 1
                continue
            for group in groups:
                payloads += group.payloads()
            next_entry_id = groups[-1].last_entry_id + 1
        for payload in reversed(payloads):
            found.feed(payload)
        last = first - 1
    return RecoveredStates(found.states, lost_entries + found.damaged)
