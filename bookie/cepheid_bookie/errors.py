"""Operating errors of the storage node. Each says which file or ledger, which numbers, and what to do."""

from __future__ import annotations

import errno

from cepheid_ports import CepheidError

_START_EMPTY = (
    "if there is none, and the other replicas are well, move the contents of all directories of this bookie away and start it with "
    "--accept-empty-disk: what was lost is answered as unknown, never denied"
)


class BookieError(CepheidError):
    """Root of what a bookie raises."""


class FormatVersionError(BookieError):
    """A file was written by a newer version."""

    hint = "start the version that wrote it, or a newer one; a downgrade needs the data written back first"


class JournalCorruptError(BookieError):
    """Damage inside what the journal had synced: entries, fences or keys that were acknowledged may be lost."""

    hint = f"restore the file from a copy; {_START_EMPTY}"


class JournalMissingError(BookieError):
    """A journal segment that the log mark still needs is not there."""

    hint = f"put the journal back from a copy; {_START_EMPTY}"


class MarkCorruptError(BookieError):
    """No readable log mark, although one was written."""

    hint = f"restore the `mark` files from a copy; {_START_EMPTY}"


class BlockCorruptError(BookieError):
    """A block of an entry log is not what was written: its entries are unknown here, not absent."""

    hint = "the entries have to be read from another replica; check the disk"


class IndexCorruptError(BookieError):
    """Damage inside what the block index had synced: it would deny entries, or forget fences."""

    hint = (
        "restore the index directory from a copy, or make a new index from the entry logs with `cepheid bookie-shell rebuild-index`"
    )


class CookieError(BookieError):
    """The directories do not belong to this bookie as metadata knows it."""


class DirectoryUnusableError(BookieError):
    """A directory of the bookie is none, and cannot be made."""

    hint = "name another one (`--data`, `--journal`), or mend its permissions"


class DiskTooSmallError(BookieError):
    """The bookie could not take a single entry on this disk."""

    hint = "use a larger disk, or lower these settings"


class DiskFullError(BookieError, OSError):
    """The bookie cannot start, because it cannot write to its disk. Callers that handle OSError see ENOSPC."""

    hint = "free some space on that disk and start the bookie again; it then collects what was deleted by itself"

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message, **facts)
        self.errno = errno.ENOSPC


class LogUnreadableError(BookieError):
    """An entry log does not give what the index says it has."""

    hint = "look at the disk; entries that other bookies have are read there, and `cepheid ledgers verify` names those that are not"


class LogGoneError(LogUnreadableError):
    """It was deleted since the index was asked, as the ledgers in it were."""

    hint = "ask again: the index says by now where the entries are, or that they are deleted"


class LedgersNotListedError(BookieError):
    """It is not known yet which ledgers the bookie holds."""

    retriable = True
    hint = "ask again in a few seconds"


class PortInUseError(BookieError):
    """A port of the bookie cannot be opened."""

    hint = (
        "stop the process that holds the port (`ss -ltnp` names it), or give the bookie another one: "
        "`--port`, `--http-port`, `--scan-port`"
    )
