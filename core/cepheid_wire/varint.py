"""Base-128 varints for the hand-written encoders: tables encode the common ones, up to three bytes, without a loop."""

from __future__ import annotations

_LAST = tuple(bytes((low,)) for low in range(128))
_MORE = tuple(bytes((low | 128,)) for low in range(128))
_MASK_64 = (1 << 64) - 1
_MASK_57 = _MASK_64 >> 7


def varint(value: int) -> bytes:
    """Return the varint of a 64-bit field. A negative number is encoded as its two's complement, as protobuf does for int32, int64
    and (because peers use -1 as "no id") uint64."""
    if 0 <= value < 0x80:
        return _LAST[value]
    if 0 <= value < 0x4000:
        return _MORE[value & 127] + _LAST[value >> 7]
    if 0 <= value < 0x20_0000:
        return _MORE[value & 127] + _MORE[value >> 7 & 127] + _LAST[value >> 14]
    rest = value & _MASK_64
    encoded = bytearray()
    while rest >= 0x80:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at` and the offset of its end. Raises IndexError if it has no end."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def varints_of_block(block: int) -> tuple[tuple[bytes, ...], bytes]:
    """Return the parts of the varints of the 128 numbers from `block * 128` on: the first byte of each, by the number's low 7 bits,
    and the bytes that follow it in all of them."""
    return (_MORE, varint(block & _MASK_57)) if block else (_LAST, b"")


def signed64(value: int) -> int:
    """Return an id as a signed number: uint64 fields hold -1 as 2^64 - 1 (MessageIdData, request ids)."""
    return value - (1 << 64) if value >> 63 else value
