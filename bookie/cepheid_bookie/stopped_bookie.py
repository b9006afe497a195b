"""The directories of a stopped bookie, opened for inspection. Nothing in them is changed, except by `index_rebuild.py`.

Rule 1: the lock of a bookie is held meanwhile, so the directories of a running bookie are refused, and none can start in between.
Rule 2: damaged or missing parts hide nothing else: an index that cannot be read becomes a text (`index_problem`), not an error.
Rule 3: the index is opened through links in a temporary directory. The database changes none of its files when it is opened for
reading, but its Python binding writes a file beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.bookie_life import load_life
from cepheid_bookie.cookie import Cookie, check_not_swapped, load_cookie
from cepheid_bookie.disk import Disk, DiskFile, ReadOnlyDisk, RealDisk
from cepheid_bookie.entry_log import log_path
from cepheid_bookie.errors import BookieError, IndexCorruptError, MarkCorruptError
from cepheid_bookie.journal_format import parse_segment_name, segment_path
from cepheid_bookie.journal_mark import MarkFile
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_ports import CepheidError

INDEX = "index"
_SIGNS = ("VERSION", "entrylog", INDEX, "mark.0", "mark.1")
"""Every data directory in which a bookie has started has at least one of these files or folders."""


class NotABookieDirectoryError(BookieError):
    """A directory in which no bookie has ever started."""

    hint: ClassVar[str] = (
        "--data names the directory that `cepheid bookie --data` names; for a standalone server it is DATA/bookie-1"
    )


class NoJournalHereError(BookieError):
    """The journal is not in the data directory."""

    hint: ClassVar[str] = "name its directory: --journal DIRECTORY"


class NoSuchFileHereError(BookieError):
    """There is no such journal segment or entry log."""

    hint: ClassVar[str] = "`cepheid bookie-shell files` lists those that there are"


class StoppedBookie:
    """The directories as a context manager, which locks them.

    Raises NotABookieDirectoryError, NoJournalHereError, DirectoryInUseError; CookieError if the two directories are swapped.

    `to_change`: `writable_disks` may be used, and missing lock files are created.
    """

    def __init__(self, data_dir: Path, journal_dir: Path | None = None, *, to_change: bool = False) -> None:
        if journal_dir is not None and journal_dir.resolve() == data_dir.resolve():
            journal_dir = None  # the same as unset; one directory is locked once
        self.data_dir = data_dir
        self.journal_dir = journal_dir
        self.writable_disks: list[RealDisk] = []  # the data directory first
        self._to_change = to_change
        self.data: Disk = ReadOnlyDisk(data_dir)
        self.journal: Disk = self.data if journal_dir is None else ReadOnlyDisk(journal_dir)
        self.index: RocksBlockIndex | None = None
        self.index_problem = ""
        self._opened = ExitStack()

    def __enter__(self) -> StoppedBookie:
        with ExitStack() as opened:
            self._check_directories()
            if self._to_change:
                self.writable_disks = [RealDisk(path) for path in (self.data_dir, self.journal_dir) if path is not None]
            for disk in self.writable_disks or dict.fromkeys((self.data, self.journal)):
                disk.lock()
                opened.callback(disk.unlock)
            self._open_index(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()

    def cookies(self) -> dict[str, Cookie | str | None]:
        """Return the cookie of each directory, what is wrong with it, or None if the directory has none."""
        found: dict[str, Cookie | str | None] = {}
        for where, disk in self._disks().items():
            try:
                found[where] = load_cookie(disk, where) if disk.exists("VERSION") else None
            except (CepheidError, OSError, TypeError) as error:
                found[where] = _words(error)
        return found

    def lives(self) -> dict[str, int | str]:
        """Return the number in the LIFE file of each directory, or what is wrong with it."""
        found: dict[str, int | str] = {}
        for where, disk in self._disks().items():
            try:
                found[where] = load_life(disk, where)
            except (CepheidError, OSError, ValueError) as error:
                found[where] = _words(error)
        return found

    def stamp(self) -> tuple[str | None, str]:
        """Return the incarnation in the index, or None and the problem."""
        if self.index is None:
            return None, self.index_problem
        try:
            stamp = self.index.stamp()
        except Exception as error:  # any error of the database
            return None, str(_unreadable(self.data_dir, error).args[0])
        return (None, "the index has no stamp") if stamp is None else (stamp.decode("utf-8", "replace"), "")

    def mark(self) -> MarkFile | str:
        """Return the log mark, or what is wrong with it."""
        mark = MarkFile(self.data)
        try:
            mark.load()
        except (MarkCorruptError, OSError) as error:
            return _words(error)
        return mark

    def logs(self) -> list[int]:
        """Return the ids of the entry logs, judged by the whole file name."""
        if not self.data.exists("entrylog"):
            return []
        return sorted(int(name[:-4], 16) for name in self.data.listdir("entrylog") if _is_log_name(name))

    def segments(self) -> list[int]:
        """Return the ids of the journal segments. Raises NoJournalHereError."""
        if not self.journal.exists("journal"):
            raise NoJournalHereError(f"there is no journal in {self.data_dir}")
        return sorted(found for name in self.journal.listdir("journal") if (found := parse_segment(name)) is not None)

    def open_log(self, log_id: int) -> DiskFile:
        """Raises NoSuchFileHereError."""
        return self._open(self.data, log_path(log_id), "entry log")

    def open_segment(self, segment_id: int) -> DiskFile:
        """Raises NoSuchFileHereError."""
        self.segments()
        return self._open(self.journal, segment_path(segment_id), "journal segment")

    def require_index(self) -> RocksBlockIndex:
        """Raises IndexCorruptError."""
        if self.index is None:
            raise IndexCorruptError(self.index_problem, path=str(self.data_dir / INDEX))
        return self.index

    def blocks(self) -> Iterator[BlockRef]:
        """Yield every block of the index. Raises IndexCorruptError, also in the middle."""
        index = self.require_index()
        try:
            yield from index.blocks()
        except Exception as error:  # any error of the database
            raise _unreadable(self.data_dir, error) from error

    def records(self) -> Iterator[tuple[int, LedgerRecord]]:
        """Yield every ledger record of the index. Raises IndexCorruptError, also in the middle."""
        index = self.require_index()
        try:
            yield from index.records()
        except Exception as error:  # any error of the database
            raise _unreadable(self.data_dir, error) from error

    def _check_directories(self) -> None:
        if not self.data_dir.is_dir():
            raise NotABookieDirectoryError(f"there is no directory {self.data_dir}", path=str(self.data_dir))
        if not any(self.data.exists(sign) for sign in _SIGNS):
            message = f"{self.data_dir} is not the data directory of a bookie: it has no file VERSION, no index and no entry logs"
            raise NotABookieDirectoryError(message, path=str(self.data_dir))
        check_not_swapped(self.data, self.journal)
        if self.journal_dir is not None and not (self.journal_dir / "journal").is_dir():
            raise NoJournalHereError(f"there is no journal in {self.journal_dir}", path=str(self.journal_dir))

    def _disks(self) -> dict[str, Disk]:
        named = {"the data directory": self.data}
        return named if self.journal is self.data else named | {"the journal directory": self.journal}

    def _open(self, disk: Disk, path: str, kind: str) -> DiskFile:
        try:
            return disk.open(path)
        except FileNotFoundError:
            raise NoSuchFileHereError(f"there is no {kind} {path} in {self.data_dir}", path=path) from None

    def _open_index(self, opened: ExitStack) -> None:
        path = self.data_dir / INDEX
        if not (path / "CURRENT").exists():
            self.index_problem = f"there is no block index in {path}"
            return
        links = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bookie-shell-")))
        for file in path.iterdir():
            (links / file.name).symlink_to(file.resolve())
        for name in ("LOCK", "rocksdict-config.json"):
            (links / name).unlink(missing_ok=True)
        try:
            self.index = RocksBlockIndex(links, read_only=True)
        except Exception as error:  # any error of the database
            self.index_problem = f"the block index {path} cannot be opened: {_words(error).replace(str(links), str(path))}"
        else:
            opened.callback(self.index.close)


def parse_segment(name: str) -> int | None:
    """Return the id in the name of a segment file; None for any other file."""
    try:
        return parse_segment_name(name)
    except ValueError:
        return None


def _is_log_name(name: str) -> bool:
    stem, dot, suffix = name.partition(".")
    return bool(dot) and suffix == "log" and len(stem) == 8 and all(digit in "0123456789abcdef" for digit in stem)


def _unreadable(data_dir: Path, error: Exception) -> IndexCorruptError:
    path = str(data_dir / INDEX)
    return IndexCorruptError(f"the block index {path} cannot be read to its end: {_words(error)}", path=path)


def _words(error: Exception) -> str:
    """Return the message of an error without its hint."""
    return str(error.args[0]) if error.args and not isinstance(error, OSError) else str(error)
