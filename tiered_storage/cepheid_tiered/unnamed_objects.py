"""Find objects in a topic's directory that its manifest does not name, and decide which of them a restore can use.

A broker writes the manifest after an upload. If it dies before that, only a listing shows the object, which may be the only copy
of its ledger: the bookies of the old cluster may be gone.

    listing of the directory ──► segments that the manifest does not name ──► footer of each ──► taken in, or a reason why not

Rules:
1. The footer decides: it has a checksum, and names topic, ledger, number of entries and the cluster that wrote it.
2. For a ledger that the manifest has without an object, or whose object is missing, an object is used if it has as many entries as
   the manifest says, or at least as many if the ledger was still open then.
3. A ledger newer than all in the manifest is added as well. An older one was removed by retention and is not.
4. Objects of another cluster are not used: two clusters may have shared a directory by mistake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cepheid_tiered.manifest import Manifest, ManifestLedger, ManifestObject, name_from, url_from
from cepheid_tiered.object_store import NewerSegmentError, StoredObject
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError

if TYPE_CHECKING:
    from cepheid_tiered.segment_reader import Footer

FooterOf = Callable[[str, int], Awaitable["Footer"]]
"""Return the footer of a segment by its URL and ledger id. Raises SegmentError."""


@dataclass(frozen=True, slots=True)
class FoundObjects:
    """Additions to a topic's manifest from the listing of its directory."""

    manifest: Manifest
    """The manifest with the additions."""
    taken_in: tuple[int, ...] = ()
    """Ledgers whose objects the manifest did not name."""
    not_taken: tuple[str, ...] = ()
    """Unused objects that it does not name, each with the reason."""


def ledger_id_of(name: str) -> int | None:
    """Return the ledger id in an object name `{20 digits}-{16 hex digits}.parquet`, or None for another name."""
    digits, _, rest = name.partition("-")
    mark, _, ending = rest.partition(".")
    is_ledger = len(digits) == 20 and digits.isascii() and digits.isdigit()
    is_mark = len(mark) == 16 and all(digit in "0123456789abcdef" for digit in mark)
    return int(digits) if is_ledger and is_mark and ending == "parquet" else None


async def find_unnamed(
    manifest: Manifest, url: str, objects: Iterable[StoredObject], missing: Sequence[str], footer_of: FooterOf
) -> FoundObjects:
    """Return the manifest with additions from its directory. Raises SegmentError if a footer cannot be read now.

    `objects`: all of the directory. `missing`: objects that the manifest names and that are not there.
    """
    rows = {ledger.ledger_id: ledger for ledger in manifest.ledgers}
    named = {ledger.object.name for ledger in manifest.offloaded if ledger.object is not None}
    newest = max(rows, default=-1)
    writers = {manifest.cluster_id}
    taken_in: list[int] = []
    not_taken: list[str] = []
    for found in sorted(objects, key=lambda one: one.url):
        name = name_from(url, found.url)
        ledger_id = ledger_id_of(name)
        if ledger_id is None or name in named:
            continue
        try:
            footer = await footer_of(found.url, ledger_id)
            if footer.metadata.cluster not in writers:
                writers |= await _writer_of_named(manifest, url, missing, footer_of)
        except (NoSuchSegmentError, DamagedSegmentError, NewerSegmentError) as error:
            not_taken.append(f"{name}: {error.args[0]}")
            continue
        row = rows.get(ledger_id)
        if reason := _why_not(manifest, row, footer, ledger_id > newest, missing, writers):
            not_taken.append(f"{name}: {reason}")
            continue
        metadata = footer.metadata
        ended_at_ms = row.ended_at_ms if row is not None and row.ended_at_ms else found.modified_ms
        stored = ManifestObject(name, footer.object_bytes, found.modified_ms, metadata.crc32c)
        messages = None if row is None or row.entries != metadata.entries else row.messages
        rows[ledger_id] = ManifestLedger(ledger_id, metadata.entries, metadata.entry_bytes, messages, ended_at_ms, stored)
        taken_in.append(ledger_id)
    ledgers = [rows[ledger_id] for ledger_id in sorted(rows)]
    return FoundObjects(replace(manifest, ledgers=ledgers) if taken_in else manifest, tuple(taken_in), tuple(not_taken))


def _why_not(
    manifest: Manifest, row: ManifestLedger | None, footer: Footer, is_newer: bool, missing: Sequence[str], writers: set[str]
) -> str:
    """Return why an object cannot be used, or ""."""
    metadata = footer.metadata
    if metadata.topic != manifest.topic:
        return f"it holds a ledger of {metadata.topic}"
    if metadata.cluster not in writers:
        return f"cluster {metadata.cluster or 'unknown'} wrote it, the manifest is that of {manifest.cluster_id}"
    if row is None:
        return "" if is_newer else "its ledger is older than those of the manifest, and was removed"
    if row.object is not None and row.object.name not in missing:
        return "the manifest names another copy of its ledger, which is there"
    was_open = not row.ended_at_ms
    if metadata.entries != row.entries and not (was_open and metadata.entries > row.entries):
        return f"it has {metadata.entries} entries, the manifest says {row.entries}"
    return ""


async def _writer_of_named(manifest: Manifest, url: str, missing: Sequence[str], footer_of: FooterOf) -> set[str]:
    """Return the cluster that wrote the newest object in the manifest: after a restore it is not the manifest's own cluster."""
    for ledger in reversed(manifest.offloaded):
        if ledger.object is not None and ledger.object.name not in missing:
            return {(await footer_of(url_from(url, ledger.object.name), ledger.ledger_id)).metadata.cluster}
    return set()
