"""Objects as files below a folder, for one machine or a shared file system.

    upload ──► .name.parquet.<random>.part   fsync, rename, fsync of the folder ──►   name.parquet

A file with its final name is complete and survives a power loss. A crash during an upload leaves `.part` files: no listing shows
them, and deleting the object removes them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from cepheid_ports import Worker, own_pages
from cepheid_rpc import Buffer
from cepheid_tiered.object_store import StoredObject, StoreRefusedError, StoreUnavailableError, StoreUrl, UnusableNameError
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError, SegmentError

T = TypeVar("T")
_PART = ".part"
_LARGE_BYTES = 256 << 10


class FileObjects:
    """All files of the machine, by file:// URL. `worker` runs blocking operations."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def get_range(self, url: str, start: int, end: int) -> Buffer:
        return (await self.get_ranges(url, [(start, end)]))[0]

    async def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return await self._run(url, lambda: _read(url, ranges))

    async def size(self, url: str) -> int:
        return await self._run(url, lambda: _path(url).stat().st_size)

    async def put(self, url: str, data: Buffer) -> None:
        def write() -> None:
            upload = _Upload(url)
            try:
                upload.write(data)
                upload.finish()
            except BaseException:
                upload.abort()
                raise

        await self._run(url, write)

    async def upload(self, url: str, parts: AsyncIterator[Buffer]) -> int:
        upload = await self._run(url, lambda: _Upload(url))
        writing: asyncio.Future[None] | None = None  # while the next part is made
        try:
            async for part in parts:
                if writing is not None:
                    await writing
                writing = asyncio.ensure_future(self._run(url, lambda part=part: upload.write(part)))  # type: ignore[misc]
            if writing is not None:
                await writing
            await self._run(url, upload.finish)
        except BaseException:
            if writing is not None:
                writing.add_done_callback(_ignore)
            # Not waited for: the call may have been cancelled. The worker runs it after what it is doing now.
            self._worker.submit(upload.abort, lambda _result, _error: None)
            raise
        return upload.size_bytes

    async def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        for found in await self._run(prefix_url, lambda: _list(prefix_url)):
            yield found

    async def delete(self, url: str) -> None:
        def remove() -> None:
            path = _path(url)
            _require_base(path)
            try:
                for name in (path, *path.parent.glob(f".{path.name}.*{_PART}")):
                    name.unlink(missing_ok=True)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return  # there can be no such file
                raise
            if path.parent.is_dir():
                _sync_folder(path.parent)

        await self._run(url, remove)

    async def _run(self, url: str, work: Callable[[], T]) -> T:
        try:
            return await self._worker.run(work)
        except OSError as error:
            raise _told(url, error) from error


def _ignore(writing: asyncio.Future[None]) -> None:
    """Ignore the failure of an upload's last part, because the upload has failed already."""
    if not writing.cancelled():
        writing.exception()


class _Upload:
    def __init__(self, url: str) -> None:
        self._path = _path(url)
        self.size_bytes = 0
        _require_base(self._path)
        _make_folders(self._path.parent)
        self._part = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}{_PART}")
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        self._ended = False

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(self._fd, view) :]
        self.size_bytes += memoryview(data).nbytes
        os.fdatasync(self._fd)  # after each part: one large sync would delay the journal of a bookie on the same disk

    def finish(self) -> None:
        os.fsync(self._fd)
        os.rename(self._part, self._path)
        _sync_folder(self._path.parent)
        os.close(self._fd)
        self._ended = True

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            os.close(self._fd)
            self._part.unlink(missing_ok=True)


def _path(url: str) -> Path:
    return Path("/" + StoreUrl.parse(url).key)


def _require_base(path: Path) -> None:
    """Raise FileNotFoundError if the directory of the policy is missing, as when its disk is not mounted. A directory created here
    would be hidden when the disk is mounted again."""
    above = path.parents[len(_BELOW_BASE) :]
    if above and not above[0].is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(above[0]))


_BELOW_BASE = ("topic", "namespace", "tenant")


def make_base(store_url: str) -> None:
    """Create the directory of a policy that is being set. Blocking. Raises OSError."""
    _make_folders(_path(store_url))


def _make_folders(folder: Path) -> None:
    """Create the folder and its parents durably, so that their names survive a power loss."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
    found: list[Buffer] = []
    with open(_path(url), "rb", buffering=0) as file:
        for start, end in ranges:
            data = own_pages(end - start) if end - start >= _LARGE_BYTES else memoryview(bytearray(end - start))
            view, at = data, start
            while len(view):
                count = os.preadv(file.fileno(), [view], at)
                if not count:
                    raise DamagedSegmentError(f"{url} has {at} bytes, of which {start} to {end} were asked for", url=url)
                view, at = view[count:], at + count
            found.append(data)
    return found


def _list(prefix_url: str) -> list[StoredObject]:
    prefix, found = StoreUrl.parse(prefix_url), []
    for folder, folders, names in os.walk(_path(prefix_url), onerror=_raise_unless_missing):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(_PART) and name.startswith("."):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            found.append(StoredObject(prefix.with_key(str(path)[1:]), status.st_size, status.st_mtime_ns // 1_000_000))
    return found


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _told(url: str, error: OSError) -> SegmentError:
    if isinstance(error, FileNotFoundError):
        folder = _path(url).parent
        if folder.is_dir():
            return NoSuchSegmentError(f"{url} does not exist", url=url)
        return StoreUnavailableError(f"{url}: the folder {folder} does not exist. Is its disk mounted?", url=url)
    if error.errno == errno.ENAMETOOLONG:
        longest = max(len(part.encode()) for part in _path(url).parts)
        message = f"{url}: the topic makes a file name of {longest} bytes, and the file system takes fewer (mostly 255)"
        return UnusableNameError(message, url=url)
    if isinstance(error, PermissionError):
        return StoreRefusedError(f"{url}: no permission ({error.strerror})", url=url)
    return StoreUnavailableError(f"{url}: {error.strerror or error}", url=url)
