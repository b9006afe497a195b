"""The disk port: the only module of the storage node that opens files. The simulator's disk forgets what was not synced.

Every call blocks: call them in a `Worker`, or at start and stop only. Paths are relative to the disk's root.

Rule 1: to survive power loss, data must be written, then `sync()`ed, and its directory entry `sync_dir()`ed after creation or
rename.
Rule 2: after a failed `sync` the kernel may have dropped the data and report success next time: never retry and acknowledge.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from cepheid_ports import CepheidError, make_private
from cepheid_rpc import Buffer

_MAX_BUFFERS = 1024  # IOV_MAX on Linux and macOS
_LOCK = "LOCK"
_OURS = (
    "VERSION",
    "LIFE",
    "SCRUB",
    _LOCK,
    "PROBE",
    "mark.",
    "journal",
    "entrylog",
    "index",
)  # prefixes of names at the root of a disk


class SyncFailedError(OSError):
    """A sync failed. The data that it covered may be lost even if the next sync succeeds (rule 2)."""


class DirectoryInUseError(CepheidError):
    """Another process holds the data directory."""

    hint = "stop the other process, or give this one a data directory of its own"


@contextmanager
def sync_failures() -> Iterator[None]:
    """Raise an OSError of the block as SyncFailedError."""
    try:
        yield
    except OSError as error:
        raise SyncFailedError(error.errno, error.strerror or str(error)) from error


class DiskFile(Protocol):
    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write all of `data`; if it raises OSError, an unknown part was written."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write many buffers, laid end to end, like `pwrite`."""

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """Return up to `size_bytes`; fewer only at the end of the file."""

    def drop_cached(self, offset: int, size_bytes: int) -> None:
        """Advise the system that these bytes will not be read again soon, so that it can free their memory. A hint only."""

    def size(self) -> int: ...

    def preallocate(self, size_bytes: int) -> None:
        """Make the file at least this large, reading as zeros, with its space reserved where the system can."""

    def truncate(self, size_bytes: int) -> None: ...

    def sync(self) -> None:
        """Make content and size durable (fdatasync). Raises SyncFailedError."""

    def close(self) -> None: ...


class Disk(Protocol):
    @property
    def can_share(self) -> bool:
        """Whether its files can be shared with other processes through `share`."""

    def share(self, path: str) -> int:
        """Return a read-only descriptor to pass on and close. Raises OSError."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open for reading and writing. Raises FileNotFoundError unless `create`."""

    def exists(self, path: str) -> bool: ...

    def listdir(self, path: str) -> list[str]:
        """Sorted names."""

    def mkdir(self, path: str) -> None:
        """Create the directory and its parents; no error if it exists."""

    def rename(self, old: str, new: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None:
        """Make the names in this directory durable. Raises SyncFailedError."""

    def free_bytes(self) -> int: ...

    def lock(self) -> None:
        """Lock the root for this process until it ends or calls `unlock`. Raises DirectoryInUseError."""

    def unlock(self) -> None: ...


class RealFile:
    def __init__(self, path: Path, *, create: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o640)

    def pwrite(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        for start in range(0, len(buffers), _MAX_BUFFERS):
            part = buffers[start : start + _MAX_BUFFERS]
            size = sum(map(len, part))
            written = os.pwritev(self._fd, part, offset)
            if written < size:  # the disk is full or a signal came: the slow path finds out
                self.pwrite(b"".join(part)[written:], offset + written)
            offset += size

    def pread(self, size_bytes: int, offset: int) -> bytes:
        data = os.pread(self._fd, size_bytes, offset)
        while len(data) < size_bytes and (more := os.pread(self._fd, size_bytes - len(data), offset + len(data))):
            data += more
        return data

    def drop_cached(self, offset: int, size_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def preallocate(self, size_bytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, size_bytes)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems do not support it
                    raise
        if self.size() < size_bytes:  # macOS: set at least the size, so that syncs need not write it each time
            os.ftruncate(self._fd, size_bytes)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)

    def sync(self) -> None:
        with sync_failures():
            if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the drive's cache
                fcntl.fcntl(self._fd, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class RealDisk:
    """The directory `root` of this machine's file system."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(0o750, parents=True, exist_ok=True)
        for path in reversed(new):
            _sync_dir(path.parent)
        self._lock_fd: int | None = None

    def __repr__(self) -> str:
        return f"<RealDisk {self.root}>"

    @property
    def can_share(self) -> bool:
        return sys.platform == "linux"  # other systems do not tell which process is at the other end of a socket

    def share(self, path: str) -> int:
        return os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)

    def open(self, path: str, *, create: bool = False) -> RealFile:
        return RealFile(self.root / path, create=create)

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self.root / path))

    def mkdir(self, path: str) -> None:
        (self.root / path).mkdir(0o750, parents=True, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        (self.root / old).rename(self.root / new)

    def unlink(self, path: str) -> None:
        (self.root / path).unlink()

    def sync_dir(self, path: str) -> None:
        _sync_dir(self.root / path)

    def free_bytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def size_bytes(self) -> int:
        """Return the size of the whole file system, used or not; 0 where it is not known."""
        status = os.statvfs(self.root)
        return status.f_blocks * status.f_frsize

    def lock(self) -> None:
        self._lock_fd = _lock(self.root, os.O_RDWR | os.O_CREAT)
        make_private(self.root, _OURS)  # files that an older release, or the index's database, left open to other users

    def unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


class ReadOnlyFile(RealFile):
    """A file that cannot be changed through this object: the system rejects every write (EBADF)."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class ReadOnlyDisk(RealDisk):
    """An existing directory of a bookie that is stopped. Nothing in it is created, changed or removed.

    `lock` takes the same lock as a bookie. A directory without a LOCK file is a copy, or no bookie has run in it; it is read
    without a lock, because creating the file would change the directory.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._lock_fd = None

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            raise _read_only(self.root / path)
        return ReadOnlyFile(self.root / path)

    def mkdir(self, path: str) -> None:
        raise _read_only(self.root / path)

    def rename(self, old: str, new: str) -> None:
        raise _read_only(self.root / old)

    def unlink(self, path: str) -> None:
        raise _read_only(self.root / path)

    def lock(self) -> None:
        if self.exists(_LOCK):
            self._lock_fd = _lock(self.root, os.O_RDONLY)


def _read_only(path: Path) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def _lock(root: Path, flags: int) -> int:
    """Return the descriptor that holds the lock of a directory. Raises DirectoryInUseError."""
    fd = os.open(root / _LOCK, flags | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise DirectoryInUseError(f"data directory {root} is in use by another process", path=str(root)) from None
    return fd


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with sync_failures():
            os.fsync(fd)
    finally:
        os.close(fd)
