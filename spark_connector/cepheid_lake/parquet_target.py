"""A table as a folder of Parquet files, on a file system or in a bucket, that DuckDB, Polars, Spark and pyarrow can read directly.

    rows ──► local temporary file ──► _staging/NAME ──► _cepheid/000…7.json (created, never replaced) ──► NAME

    FOLDER/0000000007-3f9c0a1b.parquet     rows; one file per commit
    FOLDER/_cepheid/0000000007.json        the commit: its file, and the positions reached in the topic
    FOLDER/_staging/…                      a file before its commit; readers skip names that begin with an underscore

Rules
1. The commit record decides. It is written only if its number is free, so only one of two exports succeeds.
2. A file gets its final name after its commit. Opening the table completes this for the last commit, so a crash
   delays rows until the next run and duplicates none.
3. Staged files without a commit are left over from killed exports. They are deleted after a day: younger ones may be in use.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from cepheid_lake.errors import ConcurrentExportError, LakeTargetError
from cepheid_lake.target import FORMAT, Committed, check_format
from cepheid_tiered.object_store import StoreUrl
from cepheid_tiered.remote_objects import RemoteObjects, error_of
from cepheid_tiered.segment import SegmentError

_COMMITS, _STAGING = "_cepheid", "_staging"
_RECORD = re.compile(r"(\d{10})\.json")
_RUBBISH_AFTER_S = 24 * 3600.0
_ROW_GROUP_ROWS = 1 << 20


class ParquetTarget:
    """A folder of Parquet files as a `Target`. `url`: parquet:///path, parquet+s3://bucket/prefix and so on."""

    def __init__(self, url: str) -> None:
        place = url.removeprefix("parquet://") if url.startswith("parquet://") else url.removeprefix("parquet+")
        self._url = url
        self._folder: _Folder = _LocalFolder(place) if place.startswith("/") else _Bucket(place)
        self._last = 0
        self._writer: pq.ParquetWriter | None = None
        self._local: Path | None = None
        self._rows = 0

    def __repr__(self) -> str:
        return f"<ParquetTarget {self._url}, commit {self._last}>"

    def open(self) -> Committed | None:
        numbers = [int(found[1]) for name in self._folder.list(_COMMITS) if (found := _RECORD.fullmatch(name))]
        self._last = max(numbers, default=0)
        self._clean_up()
        if not self._last:
            return None
        record = self._record(self._last)
        self._publish(record["file"])  # rule 2
        return Committed(record["topic"], record["mode"], record["positions"])

    def add(self, batch: Any) -> int:
        table = pa.Table.from_batches([batch])
        if self._writer is not None and self._writer.schema != table.schema:
            raise LakeTargetError("the columns changed in the middle of a file")
        if self._writer is None or self._local is None:
            handle, name = tempfile.mkstemp(suffix=".parquet", prefix="cepheid-lake-")
            os.close(handle)
            self._local = Path(name)
            self._writer = pq.ParquetWriter(self._local, table.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self._rows += table.num_rows
        return self._local.stat().st_size

    def commit(self, committed: Committed) -> None:
        assert self._writer is not None, "there are no rows to commit"
        assert self._local is not None
        self._writer.close()
        number = self._last + 1
        name = f"{number:010d}-{secrets.token_hex(4)}.parquet"
        record = {
            "format": FORMAT,
            "topic": committed.topic,
            "mode": committed.mode,
            "positions": dict(committed.positions),
            "file": name,
            "rows": self._rows,
        }
        staged = f"{_STAGING}/{name}"
        self._folder.upload(self._local, staged)
        if not self._folder.create(f"{_COMMITS}/{number:010d}.json", json.dumps(record, indent=1).encode()):
            self._folder.delete(staged)
            raise ConcurrentExportError(f"another export has written commit {number} of {self._url}", url=self._url)
        self._last = number
        self._publish(name)
        self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        local, self._local = self._local, None
        self._rows = 0
        if writer is not None:
            writer.close()
        if local is not None:
            local.unlink(missing_ok=True)

    def _record(self, number: int) -> dict[str, Any]:
        name = f"{_COMMITS}/{number:010d}.json"
        try:
            record: dict[str, Any] = json.loads(self._folder.read(name))
            fields = record["file"], record["topic"], record["mode"], record["positions"]
        except (ValueError, TypeError, KeyError) as error:
            raise LakeTargetError(f"{self._url}/{name} is not a commit of an export: {error!r}", url=self._url) from None
        check_format(record.get("format"), f"{self._url}/{name}")
        if not isinstance(fields[3], dict):
            raise LakeTargetError(f"{self._url}/{name} has no positions", url=self._url)
        return record

    def _publish(self, name: str) -> None:
        """Move a committed file to its place, unless it is there already."""
        staged = f"{_STAGING}/{name}"
        if self._folder.exists(staged):
            self._folder.move(staged, name)
        elif not self._folder.exists(name):
            raise LakeTargetError(f"the file {name} of the last commit is not in {self._url}: rows are missing", url=self._url)

    def _clean_up(self) -> None:
        number_of_last = f"{self._last:010d}-"
        for name in self._folder.list(_STAGING, older_than_s=_RUBBISH_AFTER_S):
            if not name.startswith(number_of_last):  # the last commit's own file may still have to be published
                self._folder.delete(f"{_STAGING}/{name}")


class _Folder(Protocol):
    """A folder of files. Names are relative, with slashes. Every method raises LakeTargetError."""

    def list(self, below: str, *, older_than_s: float = 0.0) -> Iterable[str]: ...
    def exists(self, name: str) -> bool: ...
    def read(self, name: str) -> bytes: ...
    def upload(self, local: Path, name: str) -> None: ...
    def create(self, name: str, data: bytes) -> bool:
        """Return False if the file exists. The file gets all of its data, or is not created."""

    def move(self, name: str, to: str) -> None: ...
    def delete(self, name: str) -> None: ...


class _LocalFolder:
    """A folder on a file system. The effect of a method survives a power loss once it returns."""

    def __init__(self, path: str) -> None:
        self._root = Path(path)

    def list(self, below: str, *, older_than_s: float = 0.0) -> Iterator[str]:
        until = time.time() - older_than_s
        with self._told(below):
            try:
                found = list(os.scandir(self._root / below))
            except FileNotFoundError:
                return
            for entry in found:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.stat().st_mtime <= until:
                        yield entry.name

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def read(self, name: str) -> bytes:
        with self._told(name):
            return (self._root / name).read_bytes()

    def upload(self, local: Path, name: str) -> None:
        target = self._root / name
        with self._told(name):
            self._make_folder(target.parent)
            with local.open("rb") as source, target.open("xb") as written:
                shutil.copyfileobj(source, written, 1 << 20)
                written.flush()
                os.fsync(written.fileno())
            _sync(target.parent)

    def create(self, name: str, data: bytes) -> bool:
        target = self._root / name
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        with self._told(name):
            self._make_folder(target.parent)
            try:
                with part.open("xb") as written:
                    written.write(data)
                    written.flush()
                    os.fsync(written.fileno())
                os.link(part, target)  # unlike a rename, fails if the target exists
            except FileExistsError:
                return False
            finally:
                part.unlink(missing_ok=True)
            _sync(target.parent)
        return True

    def move(self, name: str, to: str) -> None:
        with self._told(name):
            try:
                os.replace(self._root / name, self._root / to)
            except FileNotFoundError:
                if not self.exists(to):  # otherwise another run did it at the same time
                    raise
            _sync(self._root)

    def delete(self, name: str) -> None:
        with self._told(name):
            (self._root / name).unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _sync(folder.parent)

    def _told(self, name: str) -> _Told:
        return _Told(f"{self._root}/{name}")


class _Bucket:
    """A folder in object storage, through the library for offloading. Credentials come from the environment."""

    def __init__(self, url: str) -> None:
        self._base = url
        with _Told(url):
            self._at, self._store = RemoteObjects().store_of(url)

    def list(self, below: str, *, older_than_s: float = 0.0) -> Iterator[str]:
        import obstore

        prefix, until = self._key(below), time.time() - older_than_s
        with self._told(below):
            for chunk in obstore.list(self._store, prefix):
                for found in chunk:
                    if found["last_modified"].timestamp() <= until:
                        yield found["path"].removeprefix(f"{prefix}/")

    def exists(self, name: str) -> bool:
        import obstore

        try:
            obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._failed(name, error) from None
        return True

    def read(self, name: str) -> bytes:
        import obstore

        with self._told(name):
            return bytes(obstore.get(self._store, self._key(name)).bytes())

    def upload(self, local: Path, name: str) -> None:
        import obstore

        with self._told(name):
            obstore.put(self._store, self._key(name), local)

    def create(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self._store, self._key(name), data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self.read(name) == data  # our own request whose first answer was lost has written it
        except Exception as error:
            raise self._failed(name, error) from None
        return True

    def move(self, name: str, to: str) -> None:
        import obstore

        with self._told(name):
            try:
                obstore.copy(self._store, self._key(name), self._key(to))
            except FileNotFoundError:
                if not self.exists(to):  # otherwise another run did it at the same time
                    raise
                return
            obstore.delete(self._store, self._key(name))

    def delete(self, name: str) -> None:
        import obstore

        with self._told(name), suppress(FileNotFoundError):
            obstore.delete(self._store, self._key(name))

    def _key(self, name: str) -> str:
        base = self._at.key.strip("/")
        return f"{base}/{name}" if base else name

    def _told(self, name: str) -> _Told:
        return _Told(StoreUrl.parse(self._base).with_key(self._key(name)))

    def _failed(self, name: str, error: Exception) -> LakeTargetError:
        url = StoreUrl.parse(self._base).with_key(self._key(name))
        return LakeTargetError(str(error_of(url, error).args[0]), url=url)


class _Told:
    """Turns errors of the file system and the object store into LakeTargetErrors that name the place."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LakeTargetError | GeneratorExit) or not isinstance(error, Exception):
            return
        if isinstance(error, SegmentError):
            raise LakeTargetError(str(error), url=self._where) from None
        if isinstance(error, OSError) and error.strerror:
            raise LakeTargetError(f"{self._where}: {error.strerror}", url=self._where) from None
        raise LakeTargetError(str(error_of(self._where, error).args[0]), url=self._where) from None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
