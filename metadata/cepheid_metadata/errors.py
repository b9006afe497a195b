"""What can go wrong in a metadata store, by type, so that callers decide by class and never by words.

A write that fails with `StoreUnavailableError` or `SessionLostError` and `outcome_unknown` may have happened: read the key
again and decide from what it says (a compare-and-set that finds its own value there has succeeded).
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
    """A key that no store takes: relative, with empty or dotted segments, or with characters outside printable ASCII."""

    hint: ClassVar[str] = "build keys with cepheid_metadata.keys, which encodes names"


class NoSuchKeyError(MetadataError):
    """The key is not there; for a listing: the parent is not there."""


class KeyExistsError(MetadataError):
    """Create found the key taken."""


class BadVersionError(MetadataError):
    """Somebody else changed the record since it was read. Definite: this write did not happen."""


class NotEmptyError(MetadataError):
    """Delete of a key that has children."""


class EphemeralParentError(MetadataError):
    """Create below an ephemeral key: those have no children."""


class ValueTooLargeError(MetadataError):
    """One request carries more than `MAX_REQUEST_BYTES`."""

    hint: ClassVar[str] = "keep large state in a ledger and its id in the record; ZooKeeper refuses requests above 1 MB"


class StoreUnavailableError(MetadataError):
    """The store cannot be reached or cannot write now. `outcome_unknown`: this write may or may not have happened."""

    retriable: ClassVar[bool] = True

    def __init__(self, message: str, *, outcome_unknown: bool = False, **facts: Any) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown, **facts)
        self.outcome_unknown = outcome_unknown


class SessionLostError(MetadataError):
    """The session expired: its ephemeral keys are gone and watches are void. Drop handles and reopen from the records."""

    def __init__(self, message: str, *, outcome_unknown: bool = False, **facts: Any) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown, **facts)
        self.outcome_unknown = outcome_unknown


class AccessDeniedError(MetadataError):
    """The store keeps this key from this user."""

    hint: ClassVar[str] = "every process of a cluster needs the same credentials; keys made without any are open to all"


class StoreClosedError(MetadataError):
    """The store was closed by its owner: nothing more is attempted. A write that was under way may have happened."""


class StoreOpenError(MetadataError):
    """The store's directory cannot be opened."""

    hint: ClassVar[str] = "check that the data directory is a directory on a disk with space, and that this user may write in it"


class StoreDamagedError(MetadataError):
    """The store's files contradict their checksums. Reading on would mean guessing."""

    hint: ClassVar[str] = "stop, keep a copy of the directory, check the disk, and restore the directory from a backup"


class StoreInUseError(StoreOpenError):
    """Another process has the store's directory open."""

    hint: ClassVar[str] = "stop the other process or choose another data directory"


class NewerFormatError(MetadataError):
    """Written by a newer release, in a format that this one does not know."""

    hint: ClassVar[str] = "run a release that knows this format; nothing was changed"


class CorruptRecordError(MetadataError):
    """A key holds bytes that are not the record that belongs there."""

    hint: ClassVar[str] = "do not delete it: restore the record from a backup, or report it with the key and its bytes"
    version: int | None = None
    """Of the key, where it was read from a store."""


class LedgerIdsRolledBackError(MetadataError):
    """The id counter is below a ledger that exists: ids would be given out twice."""

    hint: ClassVar[str] = "the metadata was restored from an old backup or edited: raise /ledgers/ids above the id named here"


class InvalidNameError(MetadataError):
    """A name that cannot be part of a key: empty, or not encodable as UTF-8."""
