"""What can go wrong with a topic's managed ledger, by type.

A failed append says nothing of the entries' fate: they may be stored and be found when the topic is opened again.
"""

from __future__ import annotations

from typing import ClassVar

from cepheid_ports import CepheidError


class ManagedLedgerError(CepheidError):
    """Root of this package's errors."""


class ChainDamagedError(ManagedLedgerError):
    """The chain names a ledger that does not exist, or that has fewer entries than recorded. Nothing is opened over it."""

    hint: ClassVar[str] = (
        "acknowledged entries are missing: do not delete the topic; restore the ledger's metadata or the bookies' disks"
    )


class ManagedLedgerFencedError(ManagedLedgerError):
    """Another opening of the topic has changed its records: this one is over, for good."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "look the topic up again; its new owner serves it"


class ManagedLedgerFailedError(ManagedLedgerError):
    """A write failed. Opening the topic again recovers what is stored and continues."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "the topic is opened again by itself; see the cause for the bookies or the store to look at"


class ManagedLedgerClosedError(ManagedLedgerError):
    """Closed or being closed by its owner."""

    retriable: ClassVar[bool] = True


class ManagedLedgerDeletedError(ManagedLedgerError):
    """Deleted or being deleted."""


class ChainNotDeletableError(ManagedLedgerError):
    """A ledger of the topic can be neither closed nor read, so the topic was not deleted: it has all that it had."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = (
        "bring back the bookies or restore the record named here, or close the ledger at what one bookie holds "
        "(cepheid ledgers recover-from); then delete the topic again"
    )


class NoOpenLedgerError(ManagedLedgerError):
    """There is no ledger to append to, since too few bookies take new ones. What is stored is read and acknowledged as ever."""

    retriable: ClassVar[bool] = True


class TopicTerminatedError(ManagedLedgerError):
    """The topic was terminated: it is read, never appended to."""

    hint: ClassVar[str] = "publish to another topic; what is here can still be consumed"


class TooManyAppendsError(ManagedLedgerError):
    """More bytes wait to be stored than one topic may have waiting. Nothing was kept."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "the bookies are slower than the producers; publish more slowly or spread over partitions"


class EntryTrimmedError(ManagedLedgerError):
    """The entry's ledger was trimmed; what comes next is still there."""

    retriable: ClassVar[bool] = True


class CursorExistsError(ManagedLedgerError):
    """A cursor of this name exists."""


class NoSuchCursorError(ManagedLedgerError):
    """No cursor of this name."""


class CursorStateDamagedError(ManagedLedgerError):
    """Saved cursor state that cannot be what was saved."""

    hint: ClassVar[str] = "the subscription continues from its last good state, so some messages come again"


class CursorLedgerError(ManagedLedgerError):
    """No ledger for large cursor states could be written lately, and it is not tried again yet."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "see the cause for the bookies to look at; acknowledgements are saved once they can be"


class CursorStateNewerError(ManagedLedgerError):
    """Saved cursor state that a newer release wrote. The topic is not opened: to go on without it would forget acknowledgements."""

    hint: ClassVar[str] = "run the release that wrote it, or a newer one"


class TooManyCursorsError(ManagedLedgerError):
    """A topic has a bounded number of durable cursors."""

    hint: ClassVar[str] = "delete subscriptions that nobody uses"


class OffloadError(ManagedLedgerError):
    """An administrator's request to offload ledgers of a topic was refused."""


class OffloadRunningError(OffloadError):
    """A request to offload is being carried out already."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "wait until its state is no longer RUNNING, then ask again"


class OffloadOffError(OffloadError):
    """The topic's policies do not say where ledgers are offloaded to."""

    hint: ClassVar[str] = "set an offload policy with a URL for the topic or its namespace"


class NoObjectStoreError(ManagedLedgerError):
    """Ledgers are, or should be, in an object store, and this broker runs without the libraries for that."""

    hint: ClassVar[str] = "pip install cepheid[tiered] on every broker, and restart it"
