"""Errors of a topic's managed ledger.

A failed append says nothing about its entries: they may be stored, and be there when the topic is opened again.
"""

from __future__ import annotations

from typing import ClassVar

from cepheid_ports import CepheidError


class ManagedLedgerError(CepheidError):
    """Root of this package's errors."""


class ChainDamagedError(ManagedLedgerError):
    """The chain names a ledger that does not exist, or that has fewer entries than recorded. The topic is not opened without it."""

    hint: ClassVar[str] = (
        "acknowledged entries are missing: do not delete the topic; restore the ledger's metadata or the bookies' disks"
    )


class ManagedLedgerFencedError(ManagedLedgerError):
    """Another opening of the topic has changed its records: this one has ended for good."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "look the topic up again; its new owner serves it"


class ManagedLedgerFailedError(ManagedLedgerError):
    """A write failed. Opening the topic again recovers what is stored and continues."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "the topic is opened again automatically; the cause names the bookies or the store to check"


class ManagedLedgerClosedError(ManagedLedgerError):
    """The managed ledger is closed, or being closed by its owner."""

    retriable: ClassVar[bool] = True


class ManagedLedgerDeletedError(ManagedLedgerError):
    """The managed ledger is deleted, or being deleted."""


class ChainNotDeletableError(ManagedLedgerError):
    """A ledger of the topic can be neither closed nor read, so the topic was not deleted and is unchanged."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = (
        "bring back the bookies or restore the record named here, or close the ledger at what one bookie holds "
        "(cepheid ledgers recover-from); then delete the topic again"
    )


class NoOpenLedgerError(ManagedLedgerError):
    """There is no ledger to append to, since too few bookies accept new ones. Stored entries can be read and acknowledged."""

    retriable: ClassVar[bool] = True


class TopicTerminatedError(ManagedLedgerError):
    """The topic was terminated: it can be read, but not appended to."""

    hint: ClassVar[str] = "publish to another topic; this topic can still be consumed"


class TooManyAppendsError(ManagedLedgerError):
    """More bytes wait to be stored than one topic may have waiting. Nothing was stored."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "the bookies are slower than the producers; publish more slowly or spread over partitions"


class EntryTrimmedError(ManagedLedgerError):
    """The entry's ledger was trimmed; later entries are still there."""

    retriable: ClassVar[bool] = True


class CursorExistsError(ManagedLedgerError):
    """A cursor with this name exists."""


class NoSuchCursorError(ManagedLedgerError):
    """There is no cursor with this name."""


class CursorStateDamagedError(ManagedLedgerError):
    """Saved cursor state is damaged."""

    hint: ClassVar[str] = "the subscription continues from its last good state, so some messages are delivered again"


class CursorLedgerError(ManagedLedgerError):
    """No ledger for large cursor states could be written lately, and the next attempt is not due yet."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "the cause names the bookies to check; acknowledgements are saved as soon as possible"


class CursorStateNewerError(ManagedLedgerError):
    """Cursor state was saved by a newer release. The topic is not opened: without the state it would forget acknowledgements."""

    hint: ClassVar[str] = "run the release that wrote it, or a newer one"


class TooManyCursorsError(ManagedLedgerError):
    """The topic has as many durable cursors as it may have."""

    hint: ClassVar[str] = "delete unused subscriptions"


class OffloadError(ManagedLedgerError):
    """An administrator's request to offload ledgers of a topic was refused."""


class OffloadRunningError(OffloadError):
    """A request to offload is running already."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "wait until its state is no longer RUNNING, then ask again"


class OffloadOffError(OffloadError):
    """The topic's policies name no place to offload ledgers to."""

    hint: ClassVar[str] = "set an offload policy with a URL for the topic or its namespace"


class NoObjectStoreError(ManagedLedgerError):
    """Ledgers are, or should be, in an object store, and this broker runs without the libraries for it."""

    hint: ClassVar[str] = "pip install cepheid[tiered] on every broker, and restart it"
