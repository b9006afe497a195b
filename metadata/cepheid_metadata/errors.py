"""Errors of a metadata store, by type: callers decide by class and never by the text.

A write that fails with `StoreUnavailableError` or `SessionLostError` and `outcome_unknown` may have happened: read the key
again and decide from its value (a compare-and-set that finds its own value there has succeeded).
"""

from __future__ import annotations

from typing import Any, ClassVar

from cepheid_ports import CepheidError


class MetadataError(CepheidError):
    """Root of this package's errors. `op_index` is the failing operation of a `multi`, else None."""

    def __init__(self, message: str, *, op_index: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.op_index = op_index


class InvalidKeyError(MetadataError):
    """A key that no store accepts: relative, with empty or dotted segments, or with characters outside printable ASCII."""

    hint: ClassVar[str] = "build keys with cepheid_metadata.keys, which encodes names"


class NoSuchKeyError(MetadataError):
    """The key does not exist; for a listing: the parent does not exist."""


class KeyExistsError(MetadataError):
    """The key to create exists."""


class BadVersionError(MetadataError):
    """Another process changed the record since it was read. Definite: this write did not happen."""


class NotEmptyError(MetadataError):
    """The key to delete has children."""


class EphemeralParentError(MetadataError):
    """The parent of the key to create is ephemeral, and cannot have children."""


class ValueTooLargeError(MetadataError):
    """A request is larger than `MAX_REQUEST_BYTES`."""

    hint: ClassVar[str] = "keep large state in a ledger and its id in the record; ZooKeeper refuses requests above 1 MB"


class StoreUnavailableError(MetadataError):
    """The store cannot be reached or cannot write now. `outcome_unknown`: this write may or may not have happened."""

    retriable: ClassVar[bool] = True

    def __init__(self, message: str, *, outcome_unknown: bool = False, **facts: Any) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown, **facts)
        self.outcome_unknown = outcome_unknown


class SessionLostError(MetadataError):
    """The session expired: its ephemeral keys are deleted and watches are void. Drop handles and reopen from the records."""

    def __init__(self, message: str, *, outcome_unknown: bool = False, **facts: Any) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown, **facts)
        self.outcome_unknown = outcome_unknown


class AccessDeniedError(MetadataError):
    """The store does not allow this user to access the key."""

    hint: ClassVar[str] = "every process of a cluster needs the same credentials; keys created without any are open to all"


class StoreClosedError(MetadataError):
    """The store was closed by its owner: nothing more is attempted. A write in progress may have happened."""


class StoreOpenError(MetadataError):
    """The store's directory cannot be opened."""

    hint: ClassVar[str] = "check that the data directory is a directory on a disk with space, and that this user may write to it"


class StoreDamagedError(MetadataError):
    """The store's files do not match their checksums. Reading on would mean guessing."""

    hint: ClassVar[str] = "stop, keep a copy of the directory, check the disk, and restore the directory from a backup"


class StoreInUseError(StoreOpenError):
    """Another process has the store's directory open."""

    hint: ClassVar[str] = "stop the other process or choose another data directory"


class NewerFormatError(MetadataError):
    """The data was written by a newer release, in a format that this one does not know."""

    hint: ClassVar[str] = "run a release that knows this format; nothing was changed"


class CorruptRecordError(MetadataError):
    """A key has bytes that are not the expected record."""

    hint: ClassVar[str] = "do not delete it: restore the record from a backup, or report it with the key and its bytes"
    version: int | None = None
    """Version of the key, if it was read from a store."""


class LedgerIdsRolledBackError(MetadataError):
    """The id counter is below an existing ledger: ids would be given out twice."""

    hint: ClassVar[str] = "the metadata was restored from an old backup or edited: raise /ledgers/ids above the id named here"


class InvalidNameError(MetadataError):
    """A name that cannot be part of a key: empty, or not encodable as UTF-8."""
