"""Files of metadata backups: under its name a backup is complete and checked, or absent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

from cepheid_metadata.backup_format import BackupEntry, BackupSummary, backup_entries, check_backup
from cepheid_ports import CepheidError


class BackupFileError(CepheidError):
    """The file of a backup cannot be read or written."""

    hint: ClassVar[str] = "check the path, its permissions and the space on its disk"


async def save_backup(path: Path, pieces: AsyncIterator[bytes]) -> BackupSummary:
    """Write a backup, check it, and give it its name; an older file of this name stays until then.

    Raises BackupFileError, BackupDamagedError if the pieces end early, and the errors of `pieces`. Leaves no other file behind.
    """
    try:
        # A unique name, as another backup to this path may be running. mkstemp uses mode 0600: the file has passwords of ledgers.
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
        partial = path.with_name(os.path.basename(name))
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            summary = check_file(partial)
            partial.replace(path)
            _sync_directory(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BackupFileError(f"the backup cannot be written to {path}: {error.strerror}", path=str(path)) from None
    return summary


def check_file(path: Path) -> BackupSummary:
    """Read a backup to its end. Raises BackupFileError, BackupDamagedError, NewerFormatError."""
    return check_backup(_lines(path))


def entries_of(path: Path) -> Iterator[BackupEntry]:
    """Return the records of a checked file."""
    return backup_entries(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise BackupFileError(f"the backup {path} cannot be read: {error.strerror}", path=str(path)) from None


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
