"""Stored entries on a connection of their own, as they lie on a bookie's disk: what scans are given besides gRPC.

    client ──► nonce (16)
    bookie ──► proof (16): only who knows the token can say it, whoever else may listen there
    client ──► token (16) │ length (4) │ read request (codec)
    bookie ──► frames: kind (1) │ bytes of the body (4) │ first entry id (8) │ last entry id (8) │ body
    client ──► one byte for each place (PLACE) that it has read

    1 ANSWER   a read answer (codec): what is no whole block on disk, what is missing, a refusal; its ids say nothing
    2 BLOCKS   blocks of the entry log, laid end to end, with exactly these entries
    3 END      nothing follows: the answer is complete
    4 PLACE    where such blocks lie: offset (8), size (8) in the file whose descriptor came with this frame or an earlier one

gRPC moves a megabyte for 0.9 ms of both processors' time, most of it copies; this does for a third of that. Where the port is,
and its token, are asked over gRPC (`ScanPort`): who cannot reach it, or asks an older bookie, reads by gRPC. The token is of one
start of the bookie: behind the port of one that has ended may be another by now, which would deny what it never had, or
something that is no bookie, and says anything or nothing: it is told neither the token nor the request with its ticket.

The same is served on a Unix socket of the machine, whose name in Linux's abstract namespace follows from the token
(`local_scan_address`). There the bookie gives processes of its own user descriptors of its entry logs (PLACE), which can only read:
the bytes then cost the bookie nothing. A log that is deleted meanwhile stays what it is for who has its descriptor, and takes space
until that is closed: so no more than `PLACES_AHEAD` places are told that have not been read.

A block, little-endian, is a group as `encode_group_to` writes it behind four bytes "CPBK" and a CRC32C over the group.
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
_VERSION = 2  # 1 had a greeting in place of nonce and proof, and told all places at once


class FrameKind(IntEnum):
    ANSWER = 1
    BLOCKS = 2
    END = 3
    PLACE = 4


def encode_scan_port(port: int, token: bytes) -> bytes:
    """version (1), port (2), token (16)."""
    return _SCAN_PORT.pack(_VERSION, port, token)


def decode_scan_port(data: bytes) -> tuple[int, bytes]:
    """Port and token. Raises MalformedGroupError, for another version too."""
    if len(data) != _SCAN_PORT.size or data[0] != _VERSION:
        raise MalformedGroupError(f"no port of a scan: {data[:32].hex()}")
    _, port, token = _SCAN_PORT.unpack(data)
    return port, token


def local_scan_address(token: bytes) -> str:
    """Of a Unix socket. Everybody on the machine can list such names: this one does not give the token away."""
    return f"\0cepheid-scan-{hashlib.sha256(token).hexdigest()[:32]}"


def scan_proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, nonce, "sha256")[:SCAN_PROOF_BYTES]


def stored_groups(data: memoryview) -> Iterator[EntryGroup]:
    """The entries of blocks laid end to end, over the same memory. Raises MalformedGroupError.

    Their digests are not checked, nor the checksums of the blocks: each entry's digest covers all that matters."""
    offset = 0
    while offset < len(data):
        if bytes(data[offset : offset + len(BLOCK_MAGIC)]) != BLOCK_MAGIC:
            raise MalformedGroupError(f"no block begins here: {bytes(data[offset : offset + 8]).hex()}")
        group, offset = decode_group(data, offset + BLOCK_PREFIX_BYTES)
        yield group
