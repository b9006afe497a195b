"""The ledger client's interface to a bookie, independent of the transport: in-process, gRPC, or the simulator's network.

    LedgerWriter ──queue──► AddSource (a BookieChannel) ◄──next_message── AddStream (transport) ──► bookie
                                       └───────on_answers / on_broken──────────┘

The transport *pulls* its next message when it can take one, so what arrives meanwhile is sent together (self-clocked).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_rpc.entry_group import EntryGroup
from cepheid_rpc.status import Status

MAX_MESSAGE_BYTES = 1 << 20
"""Soft limit of one add message and of one chunk of a read answer; it may be exceeded by one entry."""

SCAN_CHUNK_BYTES = tuple(MAX_MESSAGE_BYTES << power for power in range(4))
"""Chunk sizes that a scan may request. The largest, with one more block and entry, is below gRPC's limit."""

MASTER_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A group to store. `recovery` adds pass the fence and overwrite equal bytes.

    `background` adds are copies made by repair. The bookie admits them at the pace that other adds leave, and refuses them
    if free space is short, `recovery` or not. A bookie of an older release stores them like any add. One ledger's adds on one
    stream are either all `background` or none, since their answers could otherwise overtake each other.
    """

    group: EntryGroup
    master_key: bytes
    recovery: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class AddAnswer:
    """The fate of entries `first..last` (inclusive) of a ledger. OK: all of them are durable at this bookie.

    For one ledger the answers on one stream have the order of its requests; an answer may cover a part of a request,
    or several requests.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class LacRequest:
    """Requests the bookie's LAC of a ledger. With `fence`: the bookie first refuses regular adds, durably, from now on.

    With `wait_ms` (a long poll, never with `fence`): the answer may be delayed until the LAC is above `above`, the ledger is fenced
    or deleted here, or the time is over. It may also be sent earlier: a bookie limits the requests that it parks.
    `ticket` (never with `fence`) replaces the master key, which readers that bypass the brokers do not have.
    """

    ledger_id: int
    master_key: bytes
    fence: bool = False
    above: int = -1
    wait_ms: int = 0
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class LacAnswer:
    """The answer to a LacRequest. OK: `last_add_confirmed` is the larger of explicit LAC and the one in `highest_entry`.

    `highest_entry` is the entry with the largest id held here (one-entry group), so that a recoverer can check the digest
    of the header its LAC comes from; None if the bookie holds none. NO_LEDGER / NO_ENTRY after a fence: fenced, and empty.
    """

    status: Status
    last_add_confirmed: int = -1
    explicit_lac: int = -1
    highest_entry: EntryGroup | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Requests entries `first..last` (inclusive). With `fence` (recovery reads): the bookie is fenced durably before it answers.

    `scan` (never with `fence`): for a reader that bypasses the brokers, with its own budget, in chunks of `chunk_bytes` (one of
    SCAN_CHUNK_BYTES) that end at block boundaries, so soft by a block. `ticket` is its signed permission; a bookie without security
    accepts any. A bookie of an older release serves a scan like any read.
    `from_disk` (checks of copies): no block is read from memory, where it may be intact although the disk is not. An older bookie
    ignores this.
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
    `next_entry_id` - 1 is either in `groups` or in `missing`; an end for size tells nothing about later ids.
    `retry_after_ms`: when to retry a refused scan.
    """

    groups: tuple[EntryGroup, ...]
    missing: tuple[MissingEntries, ...]
    next_entry_id: int
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class MissingEntries:
    """Entries `first..last` that are not returned, because of a certain no (`status.certain_no`) or for an unknown reason."""

    first_entry_id: int
    last_entry_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class ExplicitLac:
    """The LAC of an idle writer. Never lowers what a bookie knows."""

    ledger_id: int
    last_add_confirmed: int
    master_key: bytes


class AddSource(Protocol):
    """A source of adds, called by a transport on the loop."""

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        """Return what waits, up to `max_bytes` (at least one request if any waits); empty if nothing waits."""

    def on_answers(self, answers: Sequence[AddAnswer]) -> None: ...

    def on_broken(self, error: BaseException) -> None:
        """Note that the stream ended; the fate of unanswered requests is unknown. Called at most once."""


class AddStream(Protocol):
    def wake(self) -> None:
        """Notify the transport that something waits. Cheap, may be called often."""

    async def aclose(self) -> None: ...


class BookieConnection(Protocol):
    """One client's connection to a bookie.

    Methods raise BookieUnavailableError if there is no answer: everything is then unknown.
    """

    @property
    def bookie_id(self) -> str: ...

    def open_add_stream(self, source: AddSource) -> AddStream: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        """Yield chunks of about `MAX_MESSAGE_BYTES` until `last` or `max_bytes` is reached; at least one entry if there is one.

        Refusals of the whole request (UNAUTHORIZED, STOPPED, …) are one chunk whose `missing` covers the whole range.
        """

    async def write_lac(self, request: ExplicitLac) -> Status: ...

    async def aclose(self) -> None: ...
