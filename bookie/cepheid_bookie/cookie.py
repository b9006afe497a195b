"""Check whose directories these are. A bookie that lost a disk must not start normally: it would deny acknowledged entries.

    VERSION file in journal and data directory, stamp in the index      cookie in metadata
    all stamped alike                                                   the same              → start
    all unstamped and empty (or a stamping cut short)                   none                  → new bookie: stamp
    anything unstamped, changed, or of another incarnation              present               → refuse: its data is gone
    stamped, with data                                                  none                  → refuse: other cluster, or removed
    not whole, and empty everywhere, with the operator's word           present               → rebirth, into limbo
    stamped, or stamped and emptied in part               none, and this incarnation was decommissioned → a new bookie: empty, stamp
    after a restore of metadata from a backup:
    all stamped alike                                                   none                  → adopted: newer than the backup
    all stamped alike                                                   another incarnation   → adopted, into limbo

Directories are stamped first, metadata last. After a crash, a new bookie is provably new and empty, and starts; a rebirth is
refused like a blank disk until metadata has the new incarnation with its watermark, and then starts in limbo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from cepheid_bookie.disk import Disk
from cepheid_bookie.entry_log import list_logs
from cepheid_bookie.errors import CookieError, FormatVersionError
from cepheid_bookie.journal_format import parse_segment_name
from cepheid_bookie.journal_mark import FILES as MARK_FILES

FORMAT_VERSION = 1
LIMBO_FORMAT_VERSION = 2  # with `limbo_below`: a release that does not know it must not start, it would deny what was lost
_FILE = "VERSION"
_LOST_FOR_GOOD = "bring back the directory; if it is lost for good,"
_ACCEPT = "start with --accept-empty-disk (what was lost is answered as unknown, never denied)"
_AFTER_DECOMMISSION = (
    "if the bookie was decommissioned by an older release and comes back, other bookies have its copies: give it empty directories "
    "(on Kubernetes, delete its volume claims)"
)
_ANOTHER_CLUSTER = (
    "check the metadata address and the data directory; if both are right, the metadata store lost its contents and a new cluster "
    "was founded in it: stop all brokers and bookies, and restore a backup with `cepheid metadata restore`"
)
_WITHOUT_INDEX = "bring back the directory; if it is lost for good, make it again with `cepheid bookie-shell rebuild-index`"


@dataclass(frozen=True, slots=True)
class BookieIdentity:
    """Which bookie of which cluster this is. `bookie_id` is its stable name in metadata; never reuse one for an empty disk.
    `cluster_id` is the instance id of the cluster; a directory stamped with another one is refused."""

    bookie_id: str
    cluster_id: str = ""


@dataclass(frozen=True, slots=True)
class Cookie:
    """The stamp of a bookie's directories. `incarnation` is random, so that an empty disk under a known bookie id is another one.

    `limbo_below` is 0 for a bookie that never lost anything; see `limbo.py`.
    """

    bookie_id: str
    cluster_id: str
    incarnation: str
    format_version: int = FORMAT_VERSION
    limbo_below: int = 0

    def encode(self) -> str:
        fields = asdict(self)
        if self.format_version < LIMBO_FORMAT_VERSION:
            del fields["limbo_below"]
        return json.dumps(fields, sort_keys=True) + "\n"

    @property
    def registered_as(self) -> str:
        """Incarnation as brokers see it. It changes with every loss, even if the disks keep theirs (an old copy of them)."""
        return f"{self.incarnation}.{self.limbo_below}" if self.limbo_below else self.incarnation

    def reborn(self, limbo_below: int) -> Cookie:
        """Return the cookie of the same bookie, whose disks may have lost entries of ledgers below `limbo_below`.

        The watermark rises with each loss, also when no ledger id was given out in between: auditors tell losses apart by it.
        """
        return replace(self, format_version=LIMBO_FORMAT_VERSION, limbo_below=max(limbo_below, self.limbo_below + 1))


class CookieRecords(Protocol):
    """A bookie's cookie in metadata. Methods raise if metadata cannot be read; None means that there is no such record."""

    async def load(self, bookie_id: str) -> Cookie | None: ...

    async def create(self, cookie: Cookie) -> None: ...

    async def replace(self, recorded: Cookie, cookie: Cookie) -> None:
        """Replace the record by compare-and-set. Raises if it no longer has `recorded`'s incarnation."""

    async def decommissioned(self, bookie_id: str) -> str | None:
        """Return the incarnation that was emptied and forgotten, if no other one has started since."""

    async def is_named(self, bookie_id: str) -> bool:
        """Return whether a ledger names this bookie, including deleted ones that can be restored, or a repair mark remembers it as
        one that may have the only copy of an entry. Raises if that is unknown."""

    async def is_restored(self) -> bool:
        """Return whether metadata was restored from a backup, maybe older than these disks, and no operator has confirmed that."""

    async def next_ledger_id(self) -> int:
        """Return the id from which on no ledger id was ever allocated, not even in a partly used block of ids."""


@dataclass(frozen=True, slots=True)
class Found:
    """The state of one place at a start."""

    cookie: Cookie | None
    has_data: bool


def decode_cookie(text: str, where: str) -> Cookie:
    unreadable = _refuse(f"the cookie in {where} cannot be read: {text[:80]!r}", "restore the file from a copy")
    try:
        fields = json.loads(text)
        version = fields["format_version"]
    except (ValueError, KeyError, TypeError):
        raise unreadable from None
    if version not in (FORMAT_VERSION, LIMBO_FORMAT_VERSION):
        message = f"{where} has storage format {version}, this version reads {FORMAT_VERSION} and {LIMBO_FORMAT_VERSION}"
        raise FormatVersionError(message, version=version)
    try:
        return Cookie(**fields)
    except TypeError:  # the name of a field is damaged
        raise unreadable from None


def load_cookie(disk: Disk, where: str) -> Cookie | None:
    if not disk.exists(_FILE):
        return None
    file = disk.open(_FILE)
    try:
        return decode_cookie(file.pread(4096, 0).decode("utf-8", "replace"), where)
    finally:
        file.close()


def stamped_cluster(directory: Path) -> str | None:
    """Return the id of the cluster that a bookie's directory belongs to, None if it is not stamped. Raises CookieError."""
    path = directory / _FILE
    return decode_cookie(path.read_text("utf-8", "replace"), str(directory)).cluster_id if path.exists() else None


def is_stamped(disk: Disk) -> bool:
    """Return whether a bookie has started on this disk before."""
    return disk.exists(_FILE)


def has_data_files(disk: Disk) -> bool:
    """Return whether this disk has entry logs or a log mark, as data directories do."""
    return any(map(disk.exists, MARK_FILES)) or (disk.exists("entrylog") and bool(list_logs(disk)))


def has_journal_files(disk: Disk) -> bool:
    """Return whether there are journal segments on this disk."""
    return disk.exists("journal") and any(parse_segment_name(name) is not None for name in disk.listdir("journal"))


def check_not_swapped(data: Disk, journal: Disk) -> None:
    """Refuse a data directory that is the journal directory of a bookie, and the other way round. Raises CookieError.

    Both have the same cookie. Without this check the bookie seems to have lost its index, or to be on empty disks.
    """
    if data is journal or not (is_stamped(data) and is_stamped(journal)):
        return
    is_journal, is_data = has_journal_files(data), has_data_files(journal)
    if (is_journal or is_data) and not has_data_files(data) and not has_journal_files(journal):
        found = [
            *(["the data directory holds a journal and no entry logs"] if is_journal else []),
            *(["the journal directory holds entry logs and no journal"] if is_data else []),
        ]
        raise _refuse(f"the two directories are swapped: {' and '.join(found)}", "exchange --data-dir and --journal-dir")


def save_cookie(disk: Disk, cookie: Cookie) -> None:
    file = disk.open(_FILE + ".new", create=True)
    try:
        file.truncate(0)
        file.pwrite(cookie.encode().encode(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(_FILE + ".new", _FILE)
    disk.sync_dir("")


def decide(mine: Cookie, places: Mapping[str, Found], recorded: Cookie | None, *, asked: bool) -> tuple[Cookie, bool]:
    """Return the cookie to start with, and whether to stamp it. Raises CookieError with the exact reason.

    `mine` has the configured ids and a new incarnation. `asked` is False if there is no metadata to compare with.
    """
    for where, found in places.items():
        if found.cookie is not None:
            _check_owner(mine, found.cookie, where)
    stamped = {where: found.cookie for where, found in places.items() if found.cookie is not None}
    bare = [where for where in places if where not in stamped]
    if len({cookie.incarnation for cookie in stamped.values()}) > 1:
        listing = ", ".join(f"{where}: {cookie.incarnation}" for where, cookie in stamped.items())
        raise _refuse(f"the directories are of different incarnations ({listing})", "put back the directories that belong together")
    known = next(iter(stamped.values()), None)
    with_data = [where for where, found in places.items() if found.has_data]
    if recorded is not None:
        _check_owner(mine, recorded, "metadata")
        if bare:
            raise _refuse(
                f"metadata knows bookie {mine.bookie_id} (incarnation {recorded.incarnation}), "
                f"but {', '.join(bare)} is not stamped: its data is gone",
                _WITHOUT_INDEX if all(map(_is_index, bare)) else _without_directory(with_data),
            )
        assert known is not None
        known = replace(known, limbo_below=max(known.limbo_below, recorded.limbo_below))
        if known.incarnation != recorded.incarnation:
            raise _refuse(
                f"metadata knows incarnation {recorded.incarnation} of bookie {mine.bookie_id}, "
                f"the directories are of {known.incarnation}",
                "bring back the right directories, or start on empty ones under a new bookie id",
            )
        return known, False
    if known is not None and not bare and not (asked and with_data):
        return known, asked
    if with_data:
        reason = (
            f"metadata has no cookie of bookie {mine.bookie_id}, but there is data in {', '.join(with_data)}"
            if asked
            else f"{', '.join(bare)} of bookie {mine.bookie_id} is not stamped, but there is data in {', '.join(with_data)}"
        )
        way_out = "check that this is the right cluster and that no directory was lost; never delete a cookie to make it start"
        raise _refuse(reason, f"{_AFTER_DECOMMISSION}; otherwise {way_out}" if asked and not bare else way_out)
    return (known or mine), True


def _without_directory(with_data: list[str]) -> str:
    """Return what to do if a directory is lost but these places have data."""
    if not with_data:
        return f"{_LOST_FOR_GOOD} {_ACCEPT}, or under a new bookie id"
    return f"{_LOST_FOR_GOOD} move the contents of {_directories(with_data)} away as well and {_ACCEPT}"


def _directories(places: list[str]) -> str:
    """Return the names of these places. The index lies in the data directory, which stands for both if both are there."""
    return " and ".join([where for where in places if not _is_index(where)] or places)


def _is_index(where: str) -> bool:
    return where.startswith("the block index")


def is_reborn(mine: Cookie, places: Mapping[str, Found], recorded: Cookie) -> bool:
    """Return whether an operator's statement that the disks are lost applies: they are empty. Raises CookieError if data is left.
    A complete bookie needs no rebirth."""
    for where, found in places.items():
        if found.cookie is not None:
            _check_owner(mine, found.cookie, where)
    _check_owner(mine, recorded, "metadata")
    if all(found.cookie is not None and found.cookie.incarnation == recorded.incarnation for found in places.values()):
        return False
    if with_data := [where for where, found in places.items() if found.has_data]:
        raise _refuse(
            f"bookie {mine.bookie_id} is not whole, but there is data in {', '.join(with_data)}",
            f"{_LOST_FOR_GOOD} move the contents of {_directories(with_data)} away and start again with --accept-empty-disk",
        )
    return True


def adoptable(mine: Cookie, places: Mapping[str, Found], recorded: Cookie | None) -> Cookie | None:
    """Return the cookie of complete directories that restored metadata does not know; None if known or incomplete.

    Raises CookieError when they are of another bookie or cluster.
    """
    cookies = [found.cookie for found in places.values()]
    first, *others = cookies
    if first is None or any(other is None or other.incarnation != first.incarnation for other in others):
        return None
    for where, found in places.items():
        if found.cookie is not None:
            _check_owner(mine, found.cookie, where)
    return first if recorded is None or recorded.incarnation != first.incarnation else None


def is_left_over(mine: Cookie, places: Mapping[str, Found], decommissioned: str) -> bool:
    """Return whether all data in these directories is of the incarnation that was decommissioned.

    If a start was interrupted while emptying them, some places have no data, and may or may not be stamped.
    Raises CookieError when they are of another bookie or cluster.
    """
    for where, found in places.items():
        if found.cookie is not None:
            _check_owner(mine, found.cookie, where)
    stamped = [found.cookie is not None and found.cookie.incarnation == decommissioned for found in places.values()]
    return any(stamped) and all(old or not found.has_data for old, found in zip(stamped, places.values(), strict=True))


def _check_owner(mine: Cookie, found: Cookie, where: str) -> None:
    if found.bookie_id != mine.bookie_id:
        raise _refuse(
            f"{where} belongs to bookie {found.bookie_id}, not to {mine.bookie_id}", "start it under its own id, or elsewhere"
        )
    if found.cluster_id != mine.cluster_id:
        raise _refuse(
            f"{where} belongs to cluster {found.cluster_id!r}, this is cluster {mine.cluster_id!r}",
            _ANOTHER_CLUSTER,
        )


def _refuse(reason: str, what_to_do: str) -> CookieError:
    return CookieError(f"{reason}; {what_to_do}")
