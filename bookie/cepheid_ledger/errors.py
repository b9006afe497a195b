"""Errors of ledgers, by type. Callers decide by class, never by the text.

A failed append says nothing about the entry: it may be on bookies, and recovery may keep it. Only `LedgerClient.recover` shows
whether it is stored.
"""

from __future__ import annotations

from typing import ClassVar

from cepheid_ports import CepheidError


class LedgerError(CepheidError):
    """Root of this package's errors."""


class InvalidQuorumsError(LedgerError):
    """Ensemble size, write quorum and ack quorum do not satisfy E >= Qw >= Qa >= 1."""

    hint: ClassVar[str] = "choose ensemble size >= write quorum >= ack quorum >= 1"


class NotEnoughBookiesError(LedgerError):
    """There are fewer usable bookies than the ledger needs."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "start more bookies, free disk space on read-only ones, or lower the ensemble size and quorums"


class BookiesUnusableError(NotEnoughBookiesError):
    """There would be enough bookies if the known ones accepted new ledgers."""

    hint: ClassVar[str] = "free space on the disks of these bookies, start those that are down, or start further ones"


class NotEnoughRacksError(NotEnoughBookiesError):
    """The usable bookies are in too few racks, and strict placement keeps the copies of an entry in different ones."""

    hint: ClassVar[str] = (
        "start bookies in further racks, set `rack` of the bookies that have none, lower the write quorum, or unset "
        "ledger.strict_racks"
    )


class LedgerFencedError(LedgerError):
    """Another process recovers or has recovered the ledger: this writer is shut out, and unconfirmed entries are undecided."""

    hint: ClassVar[str] = "another process took the ledger over; recover it and continue with a new ledger"


class LedgerClosedError(LedgerError):
    """The ledger accepts no more entries: this writer or another process closed it."""


class LedgerWriteError(LedgerError):
    """The ledger cannot be written any more: too few of its bookies accept entries. Unconfirmed entries are undecided."""

    hint: ClassVar[str] = "check the bookies named here; recover the ledger and continue with a new one"


class UnauthorizedLedgerError(LedgerError):
    """The bookies know the ledger under another master key."""

    hint: ClassVar[str] = "the ledger's metadata was replaced, or another cluster uses the same bookies"


class NoSuchLedgerError(LedgerError):
    """The ledger certainly has no metadata: it was deleted, or never created."""


class LedgerLostError(LedgerError):
    """Metadata and bookies contradict each other: entries that must exist are certainly nowhere."""

    hint: ClassVar[str] = "data was lost or deleted by mistake; do not delete the metadata, look for the bookies' disks"


class LedgerTooShortError(LedgerLostError):
    """The chain records more entries of a ledger than its closed record has. Entries below that end may be intact."""


class NoSuchEntryError(LedgerError):
    """Every replica answered with certainty that it never acknowledged this entry."""


class EntryBeyondEndError(LedgerError):
    """The entry is above what is known to be confirmed, or above the end of a closed ledger."""


class EntryUnavailableError(LedgerError):
    """No replica returned a valid copy, and not all of them answered no with certainty: the entry may exist."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "check the bookies named here; reading succeeds once one of them answers with a valid copy"


class EntryDamagedError(EntryUnavailableError):
    """Every replica answered with certainty, none has a valid copy, and at least one reports that its copy is damaged.

    A retry fails too until a disk is repaired; a caller that does not need the entry need not wait for that.
    """

    hint: ClassVar[str] = "the copies on the bookies named here are damaged: look for older disks, or give the entry up"


class RecoveryFailedError(LedgerError):
    """Too few bookies answered to decide where the ledger ends. It stays in recovery; the next attempt continues."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = (
        "bring the bookies named here back; nothing was decided or lost. "
        "If their disks are lost for good: cepheid ledgers recover-from"
    )


class WriteBackFailedError(RecoveryFailedError):
    """The entries at the ledger's end were found, but too few bookies accepted copies of them. The next attempt finds them
    again."""

    hint: ClassVar[str] = (
        "start further bookies, or free space on the disks of read-only ones, until an ack quorum takes entries "
        "(cepheid bookies list); nothing was decided or lost"
    )


class TailDamagedError(RecoveryFailedError):
    """Every bookie answered, and what cannot be decided is an entry with damaged copies and no valid one."""

    hint: ClassVar[str] = "it is unknown whether the damaged entry was confirmed: look for older disks of the bookies named here"


class BookieProtocolError(LedgerError):
    """A bookie's answer does not match what was requested."""

    hint: ClassVar[str] = "the bookie runs another version, or has a defect; its connection was dropped"


class LedgerClientClosedError(LedgerError):
    """The client was closed by its owner."""


def is_entry_gone(error: BaseException) -> bool:
    """Return whether a read failed because its first entry certainly has no valid copy, so that a retry would fail too."""
    return isinstance(error, EntryDamagedError | NoSuchEntryError | LedgerLostError) and not isinstance(error, LedgerTooShortError)
