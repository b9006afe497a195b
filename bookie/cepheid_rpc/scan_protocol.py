"""Stored entries on a connection of their own, as they are on a bookie's disk, for scans without gRPC.

    client ──► nonce (16)
    bookie ──► proof (16): only a process that knows the token can compute it, whatever else may listen there
    client ──► token (16) │ length (4) │ read request (codec)
    bookie ──► frames: kind (1) │ bytes of the body (4) │ first entry id (8) │ last entry id (8) │ body
    client ──► one byte for each place (PLACE) that it has read

    1 ANSWER   a read answer (codec): entries that are not a whole block on disk, missing ones, a refusal; its ids are not used
    2 BLOCKS   blocks of the entry log, laid end to end, with exactly these entries
    3 END      nothing follows: the answer is complete
    4 PLACE    the place of such blocks: offset (8), size (8) in the file whose descriptor came with this frame or an earlier one

Over gRPC a megabyte takes 0.9 ms of both processes' CPU time, most of it for copies; here it takes a third of that. The port and
its token are requested over gRPC (`ScanPort`): a client that cannot reach the port, or asks an older bookie, reads over gRPC. The
token is valid for one run of the bookie: after it has ended, its port may belong to another bookie, which would deny entries that
it never had, or to any other process. Such a process gets neither the token nor the request with its ticket.

The same is served on a Unix socket of the machine, whose name in Linux's abstract namespace is derived from the token
(`local_scan_address`). There the bookie gives processes of its own user read-only descriptors of its entry logs (PLACE): the bytes
then cost the bookie nothing. A log that is deleted meanwhile stays readable through its descriptor, and takes space until that is
closed: so at most `PLACES_AHEAD` places are sent that have not been read.

A block, little-endian, is a group as `encode_group_to` writes it, after four bytes "CPBK" and a CRC32C over the group.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from enum import IntEnum

from cepheid_rpc.entry_group import EntryGroup, MalformedGroupError, decode_group

BLOCK_MAGIC = b"CPBK"
BLOCK_PREFIX_BYTES = 8  # magic and CRC32C
SCAN_TOKEN_BYTES = 16
SCAN_NONCE_BYTES = 16
SCAN_PROOF_BYTES = 16
PLACES_AHEAD = 4
MAX_SCAN_REQUEST_BYTES = 1 << 17
REQUEST_LENGTH = struct.Struct("<I")
FRAME_HEAD = struct.Struct("<BIqq")
RUN_PLACE = struct.Struct("<QQ")
_SCAN_PORT = struct.Struct(f"<BH{SCAN_TOKEN_BYTES}s")
_VERSION = 2  # 1 had a greeting instead of nonce and proof, and sent all places at once


class FrameKind(IntEnum):
    ANSWER = 1
    BLOCKS = 2
    END = 3
    PLACE = 4


def encode_scan_port(port: int, token: bytes) -> bytes:
    """Encode: version (1), port (2), token (16)."""
    return _SCAN_PORT.pack(_VERSION, port, token)


def decode_scan_port(data: bytes) -> tuple[int, bytes]:
    """Decode port and token. Raises MalformedGroupError, for another version too."""
    if len(data) != _SCAN_PORT.size or data[0] != _VERSION:
        raise MalformedGroupError(f"not the port of a scan: {data[:32].hex()}")
    _, port, token = _SCAN_PORT.unpack(data)
    return port, token


def local_scan_address(token: bytes) -> str:
    """Return the name of the Unix socket. Every process of the machine can list such names: this one does not reveal the token."""
    return f"\0cepheid-scan-{hashlib.sha256(token).hexdigest()[:32]}"


def scan_proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, nonce, "sha256")[:SCAN_PROOF_BYTES]


def stored_groups(data: memoryview) -> Iterator[EntryGroup]:
    """Yield the entries of blocks laid end to end, over the same memory. Raises MalformedGroupError.

    Digests and the checksums of the blocks are not checked: each entry's digest covers everything that matters.
    """
    offset = 0
    while offset < len(data):
        if bytes(data[offset : offset + len(BLOCK_MAGIC)]) != BLOCK_MAGIC:
            raise MalformedGroupError(f"not the start of a block: {bytes(data[offset : offset + 8]).hex()}")
        group, offset = decode_group(data, offset + BLOCK_PREFIX_BYTES)
        yield group
