"""What a simulated disk holds: contents and names, each with what is durable of it, and what power loss does to the rest.

The rules are those of `sim_disk.py`, which is what a bookie sees.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

SECTOR_BYTES = 512
ROOT = "."


@dataclass(slots=True)
class Write:
    """`data` at `offset`; with `data` None the file was cut or grown (with zeros) to `offset`."""

    offset: int
    data: bytes | None


@dataclass(slots=True)
class Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[Write] = field(default_factory=list)
    last_write: int = 0  # where it began
    damaged: bool = False  # a bit of it is not as it was written


@dataclass(frozen=True, slots=True)
class NameChange:
    """`path` now names `inode` (None: a directory when `is_dir`, else nothing); with `old`, which lost the name."""

    path: str
    inode: Inode | None
    old: str = ""
    is_dir: bool = False


@dataclass(slots=True)
class Names:
    files: dict[str, Inode] = field(default_factory=dict)
    dirs: dict[str, None] = field(default_factory=lambda: {ROOT: None})

    def apply(self, change: NameChange) -> None:
        if change.is_dir:
            self.dirs[change.path] = None
        elif change.inode is None:
            self.files.pop(change.path, None)
        else:
            if change.old:
                self.files.pop(change.old, None)
            self.files[change.path] = change.inode

    def drop_orphans(self) -> None:
        """What lies in a directory that is not there is not there."""
        for path in sorted(self.dirs):
            if path != ROOT and parent_of(path) not in self.dirs:
                del self.dirs[path]
        for path in list(self.files):
            if parent_of(path) not in self.dirs:
                del self.files[path]


def normal_path(path: str) -> str:
    return posixpath.normpath(path)


def parent_of(path: str) -> str:
    return posixpath.dirname(path) or ROOT


def distinct(inodes: Iterable[Inode]) -> list[Inode]:
    return list({id(inode): inode for inode in inodes}.values())


def apply_write(content: bytearray, write: Write) -> None:
    if write.data is None:
        del content[write.offset :]
        content.extend(bytes(write.offset - len(content)))
        return
    if write.offset > len(content):
        content.extend(bytes(write.offset - len(content)))
    content[write.offset : write.offset + len(write.data)] = write.data


TORN, STALE = "write torn by a power loss", "stale bytes behind a power loss"


def lose_unsynced(inode: Inode, stale: bytes, rng: random.Random, sector_bytes: int = SECTOR_BYTES) -> list[str]:
    """Decides for each unsynced write what of it reached the medium, which is durable from now on. Names what happened."""
    durable, synced_size = inode.durable, len(inode.durable)
    written: list[tuple[int, int]] = []
    seen: list[str] = []
    for write in inode.unsynced:
        fate = rng.choice(("whole", "nothing", "sectors"))
        if fate == "nothing":
            continue
        if write.data is None:
            apply_write(durable, write)
            synced_size = min(synced_size, len(durable))
            continue
        sectors = _sectors(write.offset, len(write.data), sector_bytes)
        kept = [sector for sector in sectors if fate == "whole" or rng.random() < 0.5]
        for start, end in kept:
            apply_write(durable, Write(start, write.data[start - write.offset : end - write.offset]))
        written += kept
        if 0 < len(kept) < len(sectors):
            seen.append(TORN)
    if len(durable) > synced_size and stale:
        grown = _sectors(synced_size, len(durable) - synced_size, sector_bytes)
        if _expose_stale(durable, grown, written, stale, rng):
            seen.append(STALE)
    inode.content = bytearray(durable)
    inode.unsynced.clear()
    return seen


def _expose_stale(
    durable: bytearray, grown: list[tuple[int, int]], written: list[tuple[int, int]], stale: bytes, rng: random.Random
) -> bool:
    """The file grew but not all of its new sectors were written: some show what lay there before, in other files."""
    exposed = False
    for start, end in grown:
        if any(start < written_end and written_start < end for written_start, written_end in written):
            continue
        if rng.random() < 0.5:
            source = rng.randrange(len(stale))
            piece = stale[source : source + end - start]
            durable[start : start + len(piece)] = piece
            exposed = True
    return exposed


def _sectors(offset: int, size_bytes: int, sector_bytes: int) -> list[tuple[int, int]]:
    """The parts of [offset, offset + size_bytes) that lie in one sector each."""
    end = offset + size_bytes
    starts = [offset, *range((offset // sector_bytes + 1) * sector_bytes, end, sector_bytes)]
    return list(zip(starts, [*starts[1:], end], strict=True))
