"""What the ledger client needs of a bookie, whoever carries the bytes: in-process, gRPC, or the simulator's network.

    LedgerWriter ──queue──► AddSource (a BookieChannel) ◄──next_message── AddStream (transport) ──► bookie
                                       └───────on_answers / on_broken──────────┘

The transport *pulls* its next message when it can take one, so what arrives meanwhile travels together (self-clocked).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_rpc.entry_group import EntryGroup
from cepheid_rpc.status import Status

MAX_MESSAGE_BYTES = 1 << 20
"""Soft bound of one add message and of one chunk of a read answer: soft by one entry."""

SCAN_CHUNK_BYTES = tuple(MAX_MESSAGE_BYTES << power for power in range(4))
"""What a scan may ask for as the size of a chunk. The largest, with a block and an entry on top, is below gRPC's bound."""

MASTER_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class AddRequest:
    """One group to store. `recovery` adds pass the fence and overwrite equal bytes.

    `background` adds are copies that repair makes. The bookie admits them at the pace that other adds leave, and refuses them
    where free space is short, `recovery` or not. A bookie of an older release stores them like any add. One ledger's adds on one
    stream are either all `background` or none, since their answers could otherwise overtake each other.
    """

    group: EntryGroup
    master_key: bytes
    recovery: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class AddAnswer:
    """The fate of entries `first..last` (inclusive) of a ledger. OK: every one of them is durable here.

    For one ledger the answers of one stream come in the order of its requests; an answer may cover a part of a request,
    or several requests.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class LacRequest:
    """Asks for the bookie's LAC of a ledger. With `fence`: refuses regular adds from now on, durably, before it answers.

    With `wait_ms` (a long poll, never with `fence`): the answer may come late, when the LAC is above `above`, the ledger is fenced
    or deleted here, or the time is over. It may come earlier, too: a bookie bounds what it parks.
    `ticket` (never with `fence`) stands in for the master key, which readers past the brokers are not given.
    """

    ledger_id: int
    master_key: bytes
    fence: bool = False
    above: int = -1
    wait_ms: int = 0
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class LacAnswer:
    """OK: `last_add_confirmed` is the larger of explicit LAC and, from `highest_entry`, the piggybacked one.

    `highest_entry` is the entry with the largest id held here (one-entry group), so that a recoverer can check the digest
    of the header its LAC comes from; None when the bookie holds none. NO_LEDGER / NO_ENTRY after a fence: fenced, and empty.
    """

    status: Status
    last_add_confirmed: int = -1
    explicit_lac: int = -1
    highest_entry: EntryGroup | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Entries `first..last` (inclusive). With `fence` (recovery reads): fenced durably before anything is answered.

    `scan` (never with `fence`): of a reader past the brokers, served from a budget of its own, in chunks of `chunk_bytes` (one of
    SCAN_CHUNK_BYTES) that end where blocks do, so soft by a block. `ticket` is its signed permission; a bookie without security
    accepts any. A bookie of an older release serves a scan like any read.
    `from_disk` (checks of copies): no block is taken from memory, where it may be sound although the disk is not. An older bookie
    takes it from memory all the same.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    max_bytes: int = MAX_MESSAGE_BYTES
    fence: bool = False
    master_key: bytes = b""
    ticket: bytes = b""
    scan: bool = False
    chunk_bytes: int = MAX_MESSAGE_BYTES
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """One chunk of an answer. Every id from the request's first (or the previous chunk's `next_entry_id`) up to
    `next_entry_id` - 1 is either in `groups` or named in `missing`; an end for size says nothing of later ids.
    `retry_after_ms`: with the refusal of a scan, when it should be tried again.
    """

    groups: tuple[EntryGroup, ...]
    missing: tuple[MissingEntries, ...]
    next_entry_id: int
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class MissingEntries:
    """Entries `first..last` that are not returned, and whether that is a certain no (`status.certain_no`) or unknown."""

    first_entry_id: int
    last_entry_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class ExplicitLac:
    """The writer tells its LAC when it is idle. Never moves a bookie's knowledge backwards."""

    ledger_id: int
    last_add_confirmed: int
    master_key: bytes


class AddSource(Protocol):
    """Called by a transport, in the loop."""

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        """What waits, up to `max_bytes` (at least one request if any waits); empty when nothing waits."""

    def on_answers(self, answers: Sequence[AddAnswer]) -> None: ...

    def on_broken(self, error: BaseException) -> None:
        """The stream ended; whatever was taken from it and not answered has an unknown fate. Called at most once."""


class AddStream(Protocol):
    def wake(self) -> None:
        """Tells the transport that something waits. Cheap, may be called often."""

    async def aclose(self) -> None: ...


class BookieConnection(Protocol):
    """One bookie as seen by one client. Methods raise BookieUnavailableError when no answer can come: all is unknown then."""

    @property
    def bookie_id(self) -> str: ...

    def open_add_stream(self, source: AddSource) -> AddStream: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        """Chunks of about `MAX_MESSAGE_BYTES` until `last` or `max_bytes` is reached; at least one entry if there is one.

        Request-wide refusals (UNAUTHORIZED, STOPPED, …) come as one chunk whose `missing` covers the whole range.
        """

    async def write_lac(self, request: ExplicitLac) -> Status: ...

    async def aclose(self) -> None: ...
