"""Operating errors of the storage node. Each names the file or ledger, the numbers, and what to do."""

from __future__ import annotations

import errno

from cepheid_ports import CepheidError

_START_EMPTY = (
    "if there is none, and the other replicas are well, move the contents of all directories of this bookie away and start it with "
    "--accept-empty-disk: what was lost is answered as unknown, never denied"
)


class BookieError(CepheidError):
    """Base class of a bookie's errors."""


class FormatVersionError(BookieError):
    """A file was written by a newer version."""

    hint = "start the version that wrote it, or a newer one; a downgrade needs the data written back first"


class JournalCorruptError(BookieError):
    """Damage inside what the journal had synced: entries, fences or keys that were acknowledged may be lost."""

    hint = f"restore the file from a copy; {_START_EMPTY}"


class JournalMissingError(BookieError):
    """A journal segment that the log mark still needs is missing."""

    hint = f"put the journal back from a copy; {_START_EMPTY}"


class MarkCorruptError(BookieError):
    """There is no readable log mark, although one was written."""

    hint = f"restore the `mark` files from a copy; {_START_EMPTY}"


class BlockCorruptError(BookieError):
    """A block of an entry log is not as written: its entries are unknown here, not absent."""

    hint = "the entries have to be read from another replica; check the disk"


class IndexCorruptError(BookieError):
    """Damage inside what the block index had synced: it would deny entries, or forget fences."""

    hint = (
        "restore the index directory from a copy, or make a new index from the entry logs with `cepheid bookie-shell rebuild-index`"
    )


class CookieError(BookieError):
    """The directories do not belong to this bookie as metadata knows it."""


class DirectoryUnusableError(BookieError):
    """A directory of the bookie is not a directory, and cannot be created."""

    hint = "name another one (`--data`, `--journal`), or correct its permissions"


class DiskTooSmallError(BookieError):
    """The disk is too small for a single entry."""

    hint = "use a larger disk, or lower these settings"


class DiskFullError(BookieError, OSError):
    """The bookie cannot start, because it cannot write to its disk. Callers that handle OSError see ENOSPC."""

    hint = "free some space on that disk and start the bookie again; it then collects deleted data by itself"

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message, **facts)
        self.errno = errno.ENOSPC


class LogUnreadableError(BookieError):
    """An entry log does not contain what the index says."""

    hint = "check the disk; entries that other bookies have are read there, and `cepheid ledgers verify` lists those that they lack"


class LogGoneError(LogUnreadableError):
    """The entry log was deleted after the index was read, as were the ledgers in it."""

    hint = "try again: the index now has the new place of the entries, or they are deleted"


class LedgersNotListedError(BookieError):
    """The list of the ledgers that the bookie holds is not complete yet."""

    retriable = True
    hint = "try again in a few seconds"


class PortInUseError(BookieError):
    """A port of the bookie cannot be opened."""

    hint = (
        "stop the process that holds the port (`ss -ltnp` names it), or give the bookie another one: "
        "`--port`, `--http-port`, `--scan-port`"
    )
