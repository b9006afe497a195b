"""Reads a range of confirmed entries from any replica that has it (rules 11-13 of the README).

    first replica ──valid copies──► done
         ├── damaged, missing, unknown ──► next replica
         └── silent for `speculative_read_s` ──► next replica in addition; the first valid answer wins

If all fail, the entry does not exist only if *every* replica answered no with certainty. One unknown among them means that it may
exist. Damage is certain if the bookie reports it for its own disk; damage found here may come from the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from cepheid_ledger.errors import EntryDamagedError, EntryUnavailableError, LedgerError, LedgerLostError, NoSuchEntryError
from cepheid_ledger.recovery_state import write_set_positions
from cepheid_ledger.settings import LedgerSettings
from cepheid_metadata import LedgerMetadata
from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    BookieConnection,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
)

ConnectionOf = Callable[[str], BookieConnection]


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """Why one replica returned nothing. `status` is its answer; None: it gave none, or an invalid one."""

    bookie: str
    reason: str
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class ReplicaCopies:
    """At least one entry, verified, consecutive from the first requested one."""

    bookie: str
    groups: list[EntryGroup]


async def read_range(
    request: ReadRequest, replicas: Sequence[str], connection_of: ConnectionOf, settings: LedgerSettings
) -> ReplicaCopies:
    """Read a run of entries from the first one on. Raises NoSuchEntryError, LedgerLostError, EntryUnavailableError
    (EntryDamagedError)."""
    if len(replicas) == 1:
        outcome = await _read_from(replicas[0], request, connection_of, settings)
        if isinstance(outcome, ReplicaCopies):
            return outcome
        raise explain(request, [outcome])
    failures: list[ReplicaFailure] = []
    running: list[asyncio.Task[ReplicaCopies | ReplicaFailure]] = []
    loop, left = asyncio.get_running_loop(), list(replicas)
    try:
        while left or running:
            if left:
                running.append(loop.create_task(_read_from(left.pop(0), request, connection_of, settings)))
            patience_s = settings.speculative_read_s if left else None
            done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:  # in order of the requests: `done` is a set
                running.remove(task)
                outcome = task.result()
                if isinstance(outcome, ReplicaCopies):
                    return outcome
                failures.append(outcome)
        raise explain(request, failures)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)


async def read_entry(ledger: LedgerMetadata, entry_id: int, connection_of: ConnectionOf, settings: LedgerSettings) -> EntryGroup:
    """Read one confirmed entry, without regard to LAC. Raises as `read_range` does."""
    request = ReadRequest(ledger.ledger_id, entry_id, entry_id, MAX_MESSAGE_BYTES)
    ensemble = ledger.fragment_of(entry_id).ensemble
    replicas = [ensemble[position] for position in write_set_positions(entry_id, len(ensemble), ledger.write_quorum)]
    copies = await read_range(request, replicas, connection_of, settings)
    return copies.groups[0]


def explain(request: ReadRequest, failures: Sequence[ReplicaFailure]) -> LedgerError:
    """Return the most informative error: anything unknown outranks a no, because that replica may have the entry."""
    entry = f"entry {request.ledger_id}:{request.first_entry_id}"
    why = ", ".join(f"{failure.bookie}: {failure.reason}" for failure in failures)
    facts = {"ledger_id": request.ledger_id, "entry_id": request.first_entry_id, "bookies": why}
    statuses = [failure.status for failure in failures]
    if all(status is Status.NO_LEDGER for status in statuses):
        return LedgerLostError(f"no bookie has ledger {request.ledger_id}, but its metadata exists ({why})", **facts)
    if all(status is not None and status.certain_no for status in statuses):
        return NoSuchEntryError(f"{entry} is not on any replica ({why})", **facts)
    if all(status is not None and (status.certain_no or status is Status.BAD_DIGEST) for status in statuses):
        return EntryDamagedError(f"{entry} has no valid copy ({why})", **facts)
    return EntryUnavailableError(f"{entry} cannot be read now ({why})", **facts)


@contextlib.asynccontextmanager
async def answers_of(connection: BookieConnection, request: ReadRequest) -> AsyncIterator[AsyncIterator[ReadAnswer]]:
    """Open the answers of a read, whose stream is closed when the caller has enough."""
    answers = connection.read(request)
    try:
        yield answers
    finally:
        aclose = getattr(answers, "aclose", None)
        if aclose is not None:
            await aclose()


def verified_parts(group: EntryGroup) -> Iterator[tuple[EntryGroup, bool]]:
    """Yield the group and whether it is valid; entry by entry if it is not, so that a damaged entry affects no other."""
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        if len(group) == 1:
            yield group, False
            return
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            yield from verified_parts(group.slice(entry_id, entry_id))
    else:
        yield group, True


async def _read_from(
    bookie: str, request: ReadRequest, connection_of: ConnectionOf, settings: LedgerSettings
) -> ReplicaCopies | ReplicaFailure:
    groups: list[EntryGroup] = []
    failure: ReplicaFailure | None = None
    expected = request.first_entry_id
    try:
        async with asyncio.timeout(settings.read_timeout_s), answers_of(connection_of(bookie), request) as answers:
            async for answer in answers:
                for group in answer.groups:
                    if group.ledger_id != request.ledger_id or group.first_entry_id != expected:
                        break  # a gap: what follows is not consecutive
                    group.verify()
                    groups.append(group)
                    expected = group.last_entry_id + 1
                failure = _missing_at(bookie, answer, expected)
                if failure is not None or expected < answer.next_entry_id:
                    break
    except (BookieUnavailableError, DigestMismatchError, MalformedGroupError) as error:
        failure = ReplicaFailure(bookie, str(error))
    except TimeoutError:
        failure = ReplicaFailure(bookie, f"no answer within {settings.read_timeout_s:g} s")
    if groups and groups[-1].last_entry_id > request.last_entry_id:
        failure, groups = ReplicaFailure(bookie, "returned more than was requested"), []
    if groups:
        return ReplicaCopies(bookie, groups)
    return failure or ReplicaFailure(bookie, "an empty answer")


def _missing_at(bookie: str, answer: ReadAnswer, entry_id: int) -> ReplicaFailure | None:
    for missing in answer.missing:
        if missing.first_entry_id <= entry_id <= missing.last_entry_id:
            return ReplicaFailure(bookie, missing.status.name, missing.status)
    return None
