"""Makes data directories private: they hold messages and the master keys of ledgers. Files are 0640 or stricter, directories 0750.

RocksDB and ZooKeeper choose the modes of their files themselves, so the process's umask limits them, and the modes of files that an
older release created are restricted when they are opened.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o027
_FILE_BITS, _DIRECTORY_BITS = 0o640, 0o750


def make_new_files_private() -> None:
    """Limit the modes of all files that this process and its children create. A stricter umask is kept."""
    os.umask(os.umask(PRIVATE_UMASK) | PRIVATE_UMASK)


def make_private(directory: Path, names: Sequence[str] | None = None) -> None:
    """Remove the permissions of others from `directory` and its contents, if this user is allowed to. Blocking.

    `names`: only entries whose names begin with these are ours; None: all are. Symbolic links are not followed, and a directory in
    which all users create files (such as /tmp) keeps its mode.
    """
    refused = [path for path in _inside(directory, names) if not _tighten(path)]
    if refused:
        hint = "other users of this machine may read them: change the modes to 0640 (files) and 0750 (directories)"
        log.warning("files.not_private", extra={"path": str(refused[0]), "paths": len(refused), "hint": hint})


def _inside(directory: Path, names: Sequence[str] | None) -> Iterator[str]:
    yield str(directory)
    for parent, directories, files in os.walk(directory):
        if names is not None and parent == str(directory):
            directories[:] = [name for name in directories if name.startswith(tuple(names))]
            files = [name for name in files if name.startswith(tuple(names))]
        for name in (*directories, *files):
            yield os.path.join(parent, name)


def _tighten(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            return True
        private = mode & ~0o777 | mode & (_DIRECTORY_BITS if stat.S_ISDIR(mode) else _FILE_BITS)
        if private != mode:
            os.chmod(path, stat.S_IMODE(private))
    except FileNotFoundError:
        pass  # it was removed in the meantime
    except OSError:
        return False
    return True
