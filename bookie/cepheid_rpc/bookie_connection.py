"""What the ledger client needs from a bookie, over any transport: in-process, gRPC, or the simulator's network.

    LedgerWriter ──queue──► AddSource (a BookieChannel) ◄──next_message── AddStream (transport) ──► bookie
                                       └───────on_answers / on_broken──────────┘

The transport *pulls* its next message when it can send one, so requests that arrive meanwhile are sent together (self-clocked).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_rpc.entry_group import EntryGroup
from cepheid_rpc.status import Status

MAX_MESSAGE_BYTES = 1 << 20
"""Limit of one add message and of one chunk of a read answer; may be exceeded by one entry."""

SCAN_CHUNK_BYTES = tuple(MAX_MESSAGE_BYTES << power for power in range(4))
"""The chunk sizes that a scan may request. The largest, with a block and an entry on top, is below gRPC's limit."""

MASTER_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class AddRequest:
    """One group to store. `recovery` adds pass the fence and overwrite equal bytes.

    `background` adds are copies by repair. The bookie admits them at the pace that other adds leave, and refuses them
    if free space is short, `recovery` or not. A bookie of an older release stores them like any add. One ledger's adds on one
    stream are either all `background` or none, since their answers could otherwise overtake each other.
    """

    group: EntryGroup
    master_key: bytes
    recovery: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class AddAnswer:
    """The outcome of entries `first..last` (inclusive) of a ledger. OK: all of them are durable here.

    For one ledger the answers of one stream come in the order of its requests; an answer may cover a part of a request,
    or several requests.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class LacRequest:
    """Asks for the bookie's LAC of a ledger. With `fence`: the bookie durably refuses regular adds before it answers.

    With `wait_ms` (a long poll, never with `fence`): the answer may be late, when the LAC is above `above`, the ledger is fenced
    or deleted here, or the time is over. It may also be earlier: a bookie limits the requests that it parks.
    `ticket` (never with `fence`) replaces the master key, which readers past the brokers do not have.
    """

    ledger_id: int
    master_key: bytes
    fence: bool = False
    above: int = -1
    wait_ms: int = 0
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class LacAnswer:
    """The LAC of a ledger. OK: `last_add_confirmed` is the larger of explicit LAC and, from `highest_entry`, the piggybacked one.

    `highest_entry` is the entry with the largest id held here (one-entry group), so that a recovery can check the digest
    of the header with its LAC; None if the bookie holds none. NO_LEDGER / NO_ENTRY after a fence: fenced, and empty.
    """

    status: Status
    last_add_confirmed: int = -1
    explicit_lac: int = -1
    highest_entry: EntryGroup | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Asks for entries `first..last` (inclusive). With `fence` (recovery reads): fenced durably before anything is answered.

    `scan` (never with `fence`): by a reader past the brokers, served from a budget of its own, in chunks of `chunk_bytes` (one of
    SCAN_CHUNK_BYTES) that end at block ends, so they may be a block larger. `ticket` is its signed permission; a bookie without
    security accepts any. A bookie of an older release serves a scan like any read.
    `from_disk` (checks of copies): no block is read from memory, where it may be intact although the disk is not, and entries that
    are in no block yet are returned once they are synced. A bookie of an older release reads from memory all the same.
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
    `next_entry_id` - 1 is either in `groups` or in `missing`; a chunk that ends because of its size says nothing about later ids.
    `retry_after_ms`: with the refusal of a scan, when to try it again.
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
    """The writer's LAC, sent when it is idle. It never lowers what a bookie knows."""

    ledger_id: int
    last_add_confirmed: int
    master_key: bytes


class AddSource(Protocol):
    """The source of adds for a transport, called in the loop."""

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        """Return waiting requests up to `max_bytes` (at least one if any waits); empty if none waits."""

    def on_answers(self, answers: Sequence[AddAnswer]) -> None: ...

    def on_broken(self, error: BaseException) -> None:
        """Note the end of the stream; the outcome of requests taken from it and not answered is unknown. Called at most once."""


class AddStream(Protocol):
    def wake(self) -> None:
        """Tell the transport that requests wait. Cheap, may be called often."""

    async def aclose(self) -> None: ...


class BookieConnection(Protocol):
    """One bookie as seen by one client. Methods raise BookieUnavailableError if there is no answer: everything is unknown then."""

    @property
    def bookie_id(self) -> str: ...

    def open_add_stream(self, source: AddSource) -> AddStream: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        """Return chunks of about `MAX_MESSAGE_BYTES` until `last` or `max_bytes` is reached; at least one entry if there is one.

        Refusals of the whole request (UNAUTHORIZED, STOPPED, …) are one chunk whose `missing` covers the whole range.
        """

    async def write_lac(self, request: ExplicitLac) -> Status: ...

    async def aclose(self) -> None: ...
