"""The tail of a SEND or MESSAGE frame, and the CRC32C before it.

    offset 0    2   0x0e01          these two may be absent: then it begins with metadataSize. A size never looks like
           2    4   CRC32C          0x0e01, because it would be more than 200 MB
           6    4   metadataSize = M    ┐
           10   M   MessageMetadata     │ covered by the CRC
           10+M     payload             ┘
A tail is stored and delivered unchanged, as the producer sent it, so its checksum stays valid from end to end. A checksum is added
only to a tail without one: Go's client treats a message without checksum as damaged (protocol.md §1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from cepheid_wire.errors import BadTailError, ChecksumMismatchError

CHECKSUM_MARKER = 0x0E01
CHECKSUM_BYTES = 6  # marker and CRC


def _load_crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Import the library and compute. The import takes 15 ms, which commands that exchange no messages save."""
    global _crc32c
    from crc32c import crc32c

    _crc32c = crc32c
    return _crc32c(data, crc)


_crc32c: Callable[..., int] = _load_crc32c
_marker_and_crc = Struct(">HI")
_marker_and_crc_at = _marker_and_crc.unpack_from


def has_checksum(tail: bytes | memoryview) -> bool:
    return len(tail) >= CHECKSUM_BYTES and tail[0] == 0x0E and tail[1] == 0x01


def crc32c_of(*parts: bytes | memoryview) -> int:
    """Return the CRC32C of the concatenated parts."""
    crc = 0
    for part in parts:
        crc = _crc32c(part, crc)
    return crc


def verify_tail(tail: bytes | memoryview) -> bool:
    """Whether the tail has a checksum. Raises ChecksumMismatchError if it is wrong."""
    if len(tail) < CHECKSUM_BYTES:
        return False
    marker, expected = _marker_and_crc_at(tail)
    if marker != CHECKSUM_MARKER:
        return False
    computed = _crc32c(memoryview(tail)[CHECKSUM_BYTES:])
    if computed != expected:
        raise ChecksumMismatchError(
            f"metadata and payload of {len(tail) - CHECKSUM_BYTES} bytes have crc32c {computed:#010x}, "
            f"the frame says {expected:#010x}",
            tail_bytes=len(tail),
            crc=computed,
            expected=expected,
        )
    return True


def add_checksum(tail: bytes | memoryview) -> bytes:
    """Return the tail with its checksum added. Raises BadTailError if it already has one."""
    if has_checksum(tail):
        raise BadTailError("the tail has a checksum already", tail_bytes=len(tail))
    return b"".join((_marker_and_crc.pack(CHECKSUM_MARKER, _crc32c(tail)), tail))
