"""A disk that forgets what was not synced. Implements `cepheid_bookie.disk.Disk` for the crash tests and the simulator.

    pwrite ──► content (what the process and a restarted process read) ──sync──► durable (what survives power loss)
    open(create), rename, unlink, mkdir ──► names ──sync_dir──► durable names

    disk = SimDisk(random.Random(7)); disk.crash_at = 12          raises NodeCrashed instead of operation 12 (counted from 0)
    disk = disk.power_loss()      or   disk.process_crash()       the disk as the next process finds it; the old one is dead

What power loss does: each unsynced write survives wholly, not at all, or in a random subset of its sectors; each
change of a directory that was not synced happened or did not; a directory that vanishes takes its files along. Sectors (of 512
bytes, or as large as `sector_bytes` says) that were lost in the grown part of a file read as zeros or as *stale bytes*: old
contents of other files.
What a crash of the process alone does: everything written is there (a write that was under way: any prefix of it).

Faults on order: `full` (ENOSPC), `fail(operation, path)` (EIO once; a failed sync drops the data and later syncs succeed),
`flip_bit`, `cut_off`, `take_away` and `put_back`, and hooks: `on_operation` and `on_read` see every change and every read before it
happens and may raise, `on_loss` hears what a power loss did.
"""

from __future__ import annotations

import errno
import posixpath
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from cepheid_bookie.disk import DirectoryInUseError, sync_failures
from cepheid_rpc import Buffer
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_medium import (
    ROOT,
    SECTOR_BYTES,
    Inode,
    NameChange,
    Names,
    Write,
    apply_write,
    distinct,
    lose_unsynced,
    normal_path,
    parent_of,
)

NAME_LOST = "name lost by a power loss"
_A_WRITE_BYTES = 32 << 10
"""More than what is written at once."""


class SimFile:
    def __init__(self, disk: SimDisk, path: str, inode: Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._closed = False

    def __repr__(self) -> str:
        return f"<SimFile {self._path}, {len(self._inode.content)} B>"

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._write(bytes(data), offset, "pwrite")

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._write(b"".join(buffers), offset, "pwritev")

    def pread(self, size_bytes: int, offset: int) -> bytes:
        self._check_open()
        self._disk._read(self._path, offset)
        return bytes(self._inode.content[offset : offset + size_bytes])

    def drop_cached(self, offset: int, size_bytes: int) -> None:
        self._check_open()

    def size(self) -> int:
        self._check_open()
        self._disk._check_alive()
        return len(self._inode.content)

    def preallocate(self, size_bytes: int) -> None:
        self._check_open()
        self._disk._operation("preallocate", self._path)
        if size_bytes > len(self._inode.content):
            self._disk._check_space(size_bytes - len(self._inode.content))
            self._resize(size_bytes)

    def truncate(self, size_bytes: int) -> None:
        self._check_open()
        self._disk._operation("truncate", self._path)
        self._resize(size_bytes)

    def sync(self) -> None:
        self._check_open()
        inode = self._inode
        try:
            with sync_failures():
                self._disk._operation("sync", self._path)
        except OSError:
            inode.unsynced.clear()  # the kernel dropped the pages and will report success next time
            raise
        for write in inode.unsynced:
            apply_write(inode.durable, write)
        inode.unsynced.clear()

    def close(self) -> None:
        self._closed = True

    def _write(self, data: bytes, offset: int, operation: str) -> None:
        self._check_open()
        disk = self._disk
        disk._operation(operation, self._path, lambda: self._put(data[: disk.random.randrange(len(data) + 1)], offset))
        grown = offset + len(data) - len(self._inode.content)
        try:
            disk._check_space(grown)
        except OSError:
            self._put(data[: disk.random.randrange(max(1, len(data) - grown + 1))], offset)  # the part that fitted
            raise
        self._put(data, offset)

    def _put(self, data: bytes, offset: int) -> None:
        if data:
            write = Write(offset, data)
            apply_write(self._inode.content, write)
            self._inode.unsynced.append(write)
            self._inode.last_write = offset

    def _resize(self, size_bytes: int) -> None:
        write = Write(size_bytes, None)
        apply_write(self._inode.content, write)
        self._inode.unsynced.append(write)

    def _check_open(self) -> None:
        assert not self._closed, f"{self._path} was closed"


class SimDisk:
    """One process's view of a disk; `power_loss` and `process_crash` end it and return the next process's."""

    def __init__(self, rng: random.Random, *, capacity_bytes: int = 1 << 30, sector_bytes: int = SECTOR_BYTES) -> None:
        self.random = rng
        self.capacity_bytes = capacity_bytes
        self.sector_bytes = sector_bytes
        self.full = False
        self.crash_at: int | None = None
        self.on_operation: Callable[[str, str], None] | None = None
        self.on_read: Callable[[str, int], None] | None = None
        self.on_loss: Callable[[str], None] | None = None
        self.operations = 0
        self.log: list[str] | None = None  # set to a list to see every change: "12 sync journal/00000001"
        self.dead = False
        self._locked = False
        self._failures: list[tuple[str, str, int]] = []
        self._names = Names()
        self._durable_names = Names()
        self._unsynced_names: list[NameChange] = []
        self._found_in = ""  # what was looked for last

    def __repr__(self) -> str:
        unsynced = sum(len(inode.unsynced) for inode in self._names.files.values())
        return (
            f"<SimDisk: {len(self._names.files)} files, {unsynced} unsynced writes, "
            f"{len(self._unsynced_names)} unsynced names{', dead' if self.dead else ''}>"
        )

    # -- Disk -----------------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimFile:
        path = normal_path(path)
        self._check_alive()
        inode = self._names.files.get(path)
        if inode is None:
            if not create or parent_of(path) not in self._names.dirs:
                raise FileNotFoundError(errno.ENOENT, "no such file in the simulated disk", path)
            self._operation("create", path)
            self._check_space(1)
            inode = Inode()
            self._change_names(NameChange(path, inode))
        return SimFile(self, path, inode)

    def exists(self, path: str) -> bool:
        self._check_alive()
        path = normal_path(path)
        return path in self._names.files or path in self._names.dirs

    def listdir(self, path: str) -> list[str]:
        self._check_alive()
        path = normal_path(path)
        if path not in self._names.dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory in the simulated disk", path)
        everything = [*self._names.files, *(name for name in self._names.dirs if name != ROOT)]
        return sorted(posixpath.basename(name) for name in everything if parent_of(name) == path)

    def mkdir(self, path: str) -> None:
        path = normal_path(path)
        self._check_alive()
        if path in self._names.dirs:
            return
        self.mkdir(parent_of(path))
        self._operation("mkdir", path)
        self._change_names(NameChange(path, None, is_dir=True))

    def rename(self, old: str, new: str) -> None:
        old, new = normal_path(old), normal_path(new)
        inode = self._existing(old)
        if parent_of(new) not in self._names.dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory in the simulated disk", new)
        self._operation("rename", new)
        self._change_names(NameChange(new, inode, old=old))

    def unlink(self, path: str) -> None:
        path = normal_path(path)
        self._existing(path)
        self._operation("unlink", path)
        self._change_names(NameChange(path, None))

    def sync_dir(self, path: str) -> None:
        path = normal_path(path)
        self._check_alive()
        if path not in self._names.dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory in the simulated disk", path)
        with sync_failures():
            self._operation("sync_dir", path)
        kept: list[NameChange] = []
        for change in self._unsynced_names:
            if parent_of(change.path) == path:
                self._durable_names.apply(change)
            else:
                kept.append(change)
        self._unsynced_names = kept

    def free_bytes(self) -> int:
        self._check_alive()
        return 0 if self.full else max(0, self.capacity_bytes - self.used_bytes())

    @property
    def can_share(self) -> bool:
        return False

    def share(self, path: str) -> int:
        raise NotImplementedError("nobody may ask a disk that cannot share")

    def lock(self) -> None:
        self._check_alive()
        if self._locked:
            raise DirectoryInUseError("the simulated disk is in use by another process")
        self._locked = True

    def unlock(self) -> None:
        self._locked = False

    # -- faults ---------------------------------------------------------------------------------------------------------

    def fail(self, operation: str, path: str = "", error_number: int = errno.EIO) -> None:
        """The next `operation` (pread, pwrite, pwritev, sync, …) on a path that starts with `path` fails once."""
        self._failures.append((operation, path, error_number))

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Damages one byte, as a decaying medium does; also one behind an end that was cut off, and the cut not yet synced."""
        inode = self._names.files[normal_path(path)]
        inode.damaged = True
        if offset >= max(len(inode.content), len(inode.durable)):
            raise ValueError(f"{path} has no byte {offset}")
        for content in (inode.content, inode.durable):
            if offset < len(content):
                content[offset] ^= 1 << bit

    def flip_bit_back(self, path: str, offset: int, bit: int) -> None:
        """The medium had that one damage, and somebody repaired it."""
        self.flip_bit(path, offset, bit)
        self._names.files[normal_path(path)].damaged = False

    def cut_off(self, path: str, size_bytes: int) -> None:
        """The end of a file is gone, as after a mistake of a file system or of its operator."""
        inode = self._names.files[normal_path(path)]
        assert not inode.unsynced, f"{path} is being written"
        del inode.content[size_bytes:], inode.durable[size_bytes:]

    def take_away(self, path: str) -> bytes:
        """A file is gone for good, as after a mistake of its operator; returns what was in it."""
        inode = self._names.files.pop(normal_path(path))
        self._durable_names.files.pop(normal_path(path), None)
        return bytes(inode.content)

    def put_back(self, path: str, content: bytes) -> None:
        """Durable, and nobody saw how it came there."""
        inode = Inode(bytearray(content), bytearray(content))
        self._names.files[normal_path(path)] = self._durable_names.files[normal_path(path)] = inode

    def durable_paths(self, folder: str) -> list[str]:
        """Of files in there of which something is synced."""
        return [path for path, inode in self._names.files.items() if parent_of(path) == normal_path(folder) and inode.durable]

    def decay(self, rng: random.Random, folder: str) -> None:
        """Damages one bit of some file in there."""
        path = rng.choice(self.durable_paths(folder))
        self.flip_bit(path, rng.randrange(len(self._names.files[path].durable)), rng.randrange(8))

    def process_crash(self) -> SimDisk:
        """The process ended, the machine did not: all that was written is there."""
        self.dead = True
        return self._successor()

    def power_loss(self) -> SimDisk:
        """The machine ended: a random part of what was not synced is there."""
        self.dead = True
        stale = b"".join(bytes(inode.durable) for inode in self._names.files.values())
        survivors = Names(dict(self._durable_names.files), dict(self._durable_names.dirs))
        seen: list[str] = []
        for change in self._unsynced_names:
            if self.random.random() < 0.5:
                survivors.apply(change)
            else:
                seen.append(NAME_LOST)
        survivors.drop_orphans()
        for inode in distinct(survivors.files.values()):
            seen += lose_unsynced(inode, stale, self.random, self.sector_bytes)
        if self.on_loss is not None:
            for kind in seen:
                self.on_loss(kind)
        self._names = survivors
        self._durable_names = Names(dict(survivors.files), dict(survivors.dirs))
        self._unsynced_names = []
        return self._successor()

    def copy_after_power_loss(self, rng: random.Random) -> SimDisk:
        """What the next process would find if power were lost now; this disk goes on."""
        copy = SimDisk(rng, capacity_bytes=self.capacity_bytes, sector_bytes=self.sector_bytes)
        inodes = {
            id(inode): Inode(
                bytearray(inode.content), bytearray(inode.durable), list(inode.unsynced), inode.last_write, inode.damaged
            )
            for inode in [*self._names.files.values(), *self._durable_names.files.values()]
        }
        for mine, its in ((self._names, copy._names), (self._durable_names, copy._durable_names)):
            its.dirs = dict(mine.dirs)
            its.files = {path: inodes[id(inode)] for path, inode in mine.files.items()}
        copy._unsynced_names = [
            replace(change, inode=None if change.inode is None else inodes.get(id(change.inode), Inode()))
            for change in self._unsynced_names
        ]
        return copy.power_loss()

    def wiped(self) -> SimDisk:
        """A blank disk in the place of this one."""
        self.dead = True
        return SimDisk(self.random, capacity_bytes=self.capacity_bytes, sector_bytes=self.sector_bytes)

    # -- what the omniscient checker asks -------------------------------------------------------------------------------

    def durable_files(self) -> dict[str, bytearray]:
        """What is certain to survive power loss now: the worst case of what the disk may keep."""
        return {path: inode.durable for path, inode in self._durable_names.files.items()}

    def durable_content(self, path: str) -> bytearray:
        """Of the file that has this name now, which itself may not be durable."""
        inode = self._names.files.get(normal_path(path))
        return bytearray() if inode is None else inode.durable

    def damaged_files(self) -> list[str]:
        return [path for path, inode in self._durable_names.files.items() if inode.damaged]

    def is_durable(self, data: bytes) -> bool:
        """Whether some file holds `data` whole, come what may. Asked right after it was synced: the last writes first."""
        files = self._durable_names.files
        likely = files.get(self._found_in)
        if likely is not None and likely.durable.find(data, likely.last_write, likely.last_write + _A_WRITE_BYTES) >= 0:
            return True
        for path, inode in files.items():
            if inode.durable.find(data, inode.last_write, inode.last_write + _A_WRITE_BYTES) >= 0:
                self._found_in = path
                return True
        return any(data in inode.durable for inode in files.values())

    def used_bytes(self) -> int:
        return sum(len(inode.content) for inode in self._names.files.values())

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _successor(self) -> SimDisk:
        disk = SimDisk(self.random, capacity_bytes=self.capacity_bytes, sector_bytes=self.sector_bytes)
        disk.full, disk.log = self.full, self.log
        disk._names, disk._durable_names = self._names, self._durable_names
        disk._unsynced_names = self._unsynced_names
        return disk

    def _operation(self, operation: str, path: str, interrupted: Callable[[], None] | None = None) -> None:
        """Counts a change about to happen. May raise NodeCrashed or OSError instead of it; `interrupted` does a part of it then."""
        self._check_alive()
        if self.log is not None:
            self.log.append(f"{self.operations} {operation} {path}")
        try:
            if self.operations == self.crash_at:
                raise NodeCrashed(f"at disk operation {self.operations}: {operation} {path}")
            self.operations += 1
            if self.on_operation is not None:
                self.on_operation(operation, path)
            self._fail_if_asked(operation, path)
        except (NodeCrashed, OSError) as error:
            self.dead = isinstance(error, NodeCrashed)
            if interrupted is not None:
                interrupted()
            raise

    def _read(self, path: str, offset: int) -> None:
        self._check_alive()
        if self.on_read is not None:
            self.on_read(path, offset)
        self._fail_if_asked("pread", path)

    def _fail_if_asked(self, operation: str, path: str) -> None:
        for failure in self._failures:
            if failure[0] == operation and path.startswith(failure[1]):
                self._failures.remove(failure)
                raise OSError(failure[2], f"injected failure of {operation}", path)

    def _check_space(self, grown_bytes: int) -> None:
        if grown_bytes > 0 and (self.full or self.used_bytes() + grown_bytes > self.capacity_bytes):
            raise OSError(errno.ENOSPC, "no space left on the simulated disk")

    def _change_names(self, change: NameChange) -> None:
        self._names.apply(change)
        self._unsynced_names.append(change)

    def _existing(self, path: str) -> Inode:
        self._check_alive()
        if path not in self._names.files:
            raise FileNotFoundError(errno.ENOENT, "no such file in the simulated disk", path)
        return self._names.files[path]

    def _check_alive(self) -> None:
        if self.dead:
            raise NodeCrashed("this disk belongs to a process that ended")
