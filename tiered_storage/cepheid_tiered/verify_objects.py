"""Read segments back and compare them with their records.

The expected contents come from chain records (`expected_of_chain`) or, if the cluster no longer exists, from manifests
(`expected_of_manifest`). Every byte of an object is read: each entry's digest is checked, and sums are compared with the record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cepheid_tiered.manifest import Manifest, url_from
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError, SegmentError, SegmentStore

if TYPE_CHECKING:
    from cepheid_metadata import Chain


class Condition(Enum):
    VALID = "valid"
    BAD = "bad"
    """The object is certainly missing, damaged, or different from its record."""
    NOT_KNOWN = "not known"
    """The object could not be read."""


@dataclass(frozen=True, slots=True)
class ExpectedSegment:
    topic: str
    ledger_id: int
    url: str
    entries: int
    size_bytes: int
    """Payload bytes of the ledger."""
    object_bytes: int
    crc32c: int | None = None
    on_bookies: bool = False
    """Whether bookies still have the ledger, so that a bad object loses nothing."""


@dataclass(frozen=True, slots=True)
class VerifiedSegment:
    expected: ExpectedSegment
    condition: Condition
    reason: str = ""


def expected_of_chain(topic: str, chain: Chain) -> list[ExpectedSegment]:
    """Return all complete segments of a chain, oldest ledger first."""
    found: list[ExpectedSegment] = []
    for ledger in chain.ledgers:
        copy = chain.offload_of(ledger.ledger_id)
        if copy is not None:
            found.append(
                ExpectedSegment(
                    topic,
                    ledger.ledger_id,
                    copy.url,
                    ledger.entries or 0,
                    ledger.size_bytes,
                    copy.object_bytes,
                    on_bookies=copy.on_bookies,
                )
            )
    return found


def expected_of_manifest(manifest: Manifest, url: str) -> list[ExpectedSegment]:
    """Return all segments of a manifest. Raises DamagedManifestError."""
    found: list[ExpectedSegment] = []
    for ledger in manifest.offloaded:
        assert ledger.object is not None
        found.append(
            ExpectedSegment(
                manifest.topic,
                ledger.ledger_id,
                url_from(url, ledger.object.name),
                ledger.entries,
                ledger.size_bytes,
                ledger.object.size_bytes,
                ledger.object.crc32c,
            )
        )
    return found


async def verify_segments(segments: SegmentStore, expected: Iterable[ExpectedSegment]) -> AsyncIterator[VerifiedSegment]:
    """Yield the condition of each segment in turn. Does not raise for a segment that cannot be read."""
    for one in expected:
        yield await verify_segment(segments, one)


async def verify_segment(segments: SegmentStore, expected: ExpectedSegment) -> VerifiedSegment:
    try:
        found = await segments.verify(expected.url, expected.ledger_id)
    except (NoSuchSegmentError, DamagedSegmentError) as error:
        return VerifiedSegment(expected, Condition.BAD, str(error.args[0]))
    except SegmentError as error:
        return VerifiedSegment(expected, Condition.NOT_KNOWN, str(error.args[0]))
    pairs = [
        ("entries", found.entries, expected.entries),
        ("payload bytes", found.entry_bytes, expected.size_bytes),
        ("bytes", found.object_bytes, expected.object_bytes or found.object_bytes),
        ("as its checksum", found.crc32c, found.crc32c if expected.crc32c is None else expected.crc32c),
    ]
    for what, has, recorded in pairs:
        if has != recorded:
            return VerifiedSegment(expected, Condition.BAD, f"{expected.url} has {has} {what}, recorded are {recorded}")
    return VerifiedSegment(expected, Condition.VALID)
