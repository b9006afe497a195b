"""A connection to a bookie's scan port (cepheid_rpc/scan_protocol.py): its frames, as buffers for the decoder.

    local Unix socket? ──no──► port ──► nonce: proof? ──► token, request ──► head, body, head, body …
                                                                                                 └─ PLACE: bytes from the log itself

Rule 1: every buffer is padded as the decoder needs it, which uses it without a copy.
Rule 2: an end before the last frame raises, as does a log that ends before a run.
Rule 3: a peer that cannot prove that it is the bookie gets neither the token nor the request.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import ssl
import sys
from contextlib import suppress
from typing import Self

import numpy as np

from cepheid_decode.decode_fields import PADDING_BYTES
from cepheid_rpc import (
    FRAME_HEAD,
    REQUEST_LENGTH,
    RUN_PLACE,
    SCAN_NONCE_BYTES,
    SCAN_PROOF_BYTES,
    FrameKind,
    MalformedGroupError,
    local_scan_address,
    scan_proof,
)
from cepheid_scan.bookie_channels import CONNECT_TIMEOUT_S, ScanDoor, tls_context
from cepheid_security import ClientTls

log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 32 << 20  # a chunk has 8 MiB, plus the largest entry
_PIECE_BYTES = 1 << 20  # of a log, read at once; then `end` is checked
_LAST_OFFSET = (1 << 63) - 1
_NO_LOG = -1
_READ = b"\1"
_ON_MACHINE = sys.platform == "linux"


class ScanConnection:
    """A connection.

    Every method raises OSError, and MalformedGroupError for malformed frames. `end` may be called from any thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._gives_logs = connection.family == socket.AF_UNIX
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL  # TLS gives what one record has
        self._log = _NO_LOG
        self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._take_log(_NO_LOG)

    def end(self) -> None:
        """End all waits, except for a disk that does not answer."""
        self._is_ended = True
        with suppress(OSError):
            # Not SSLSocket's own, which has the reading thread go on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def ask(self, token: bytes, request: bytes) -> bool:
        """Send the request. Return False, without sending it, if the peer is not the bookie or does not answer soon enough."""
        if not self.is_bookie(token):
            return False
        self._socket.sendall(token + REQUEST_LENGTH.pack(len(request)) + request)
        self._socket.settimeout(None)  # the waiting caller has its own limit
        return True

    def is_bookie(self, token: bytes) -> bool:
        """Return whether the peer knows the token, which is not sent before."""
        nonce, proof = os.urandom(SCAN_NONCE_BYTES), bytearray(SCAN_PROOF_BYTES)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.sendall(nonce)
        self._receive_into(memoryview(proof))
        return hmac.compare_digest(proof, scan_proof(token, nonce))

    def head(self) -> tuple[int, int, int, int]:
        """Return the head of the next frame: kind, bytes of its body, first and last entry id."""
        data = b""
        while len(data) < FRAME_HEAD.size:
            left = FRAME_HEAD.size - len(data)
            if self._gives_logs:
                more, descriptors, flags, _ = socket.recv_fds(self._socket, left, 1, socket.MSG_CMSG_CLOEXEC)
                for descriptor in descriptors:
                    self._take_log(descriptor)
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "this process cannot open more files, so not the entry log (ulimit -n)")
            else:
                more = self._socket.recv(left, self._flags)
            if not more:
                raise _ended()
            data += more
        kind, size_bytes, first, last = FRAME_HEAD.unpack(data)
        return kind, size_bytes, first, last

    def body(self, kind: int, size_bytes: int) -> memoryview:
        """Return the content of the frame; for a place, the blocks at that location."""
        if kind != FrameKind.PLACE:
            body = _buffer(size_bytes)
            self._receive_into(body)
            return body
        if size_bytes != RUN_PLACE.size:
            raise MalformedGroupError(f"a place in {size_bytes} bytes")
        place = bytearray(size_bytes)
        self._receive_into(memoryview(place))
        offset, size_bytes = RUN_PLACE.unpack(place)
        blocks = _buffer(size_bytes)
        if offset > _LAST_OFFSET - size_bytes:
            raise MalformedGroupError(f"a place at {offset}")
        self._read_log(blocks, offset)
        with suppress(OSError):  # a closed peer may have sent everything already
            self._socket.sendall(_READ)
        return blocks

    def _receive_into(self, view: memoryview) -> None:
        while view:
            size_bytes = self._socket.recv_into(view, len(view), self._flags)
            if size_bytes == 0:
                raise _ended()
            view = view[size_bytes:]

    def _read_log(self, view: memoryview, offset: int) -> None:
        if self._log == _NO_LOG:
            raise MalformedGroupError("a place without a log")
        while view:
            if self._is_ended:
                raise _ended()
            size_bytes = os.preadv(self._log, [view[:_PIECE_BYTES]], offset)
            if size_bytes == 0:
                raise OSError(f"the entry log ends at {offset}, {len(view)} bytes before the blocks do")
            view, offset = view[size_bytes:], offset + size_bytes

    def _take_log(self, descriptor: int) -> None:
        if self._log != _NO_LOG:
            os.close(self._log)
        self._log = descriptor


def dial_on_machine(door: ScanDoor) -> ScanConnection | None:
    """Return a connection; None: the bookie is on another machine, or has no such socket."""
    if not _ON_MACHINE:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(local_scan_address(door.token))
    except OSError:
        connection.close()
        return None
    return ScanConnection(connection)


def dial_port(door: ScanDoor, tls: ClientTls | None = None) -> ScanConnection | None:
    """Return a connection; None: it cannot be reached, or its certificate is not the bookie's.

    Raises SecurityConfigurationError.
    """
    try:
        connection = socket.create_connection((door.host, door.port), timeout=CONNECT_TIMEOUT_S)
    except OSError:
        return None
    if not door.secured:
        return ScanConnection(connection)
    try:
        return ScanConnection(tls_context(tls).wrap_socket(connection, server_hostname=door.host))
    except (OSError, ValueError) as error:
        log.info("scan.port_tls_failed: %s:%d: %s", door.host, door.port, error, extra={"host": door.host, "port": door.port})
        connection.close()
        return None


def is_served(connection: ScanConnection | None, door: ScanDoor) -> bool:
    """Return whether the bookie answers there. Closes the connection if not."""
    if connection is None:
        return False
    with connection:
        try:
            return connection.is_bookie(door.token)
        except OSError:
            return False


def _buffer(size_bytes: int) -> memoryview:
    if size_bytes > _MAX_FRAME_BYTES:
        raise MalformedGroupError(f"a frame of {size_bytes} bytes, the limit is {_MAX_FRAME_BYTES}")
    buffer = np.empty(size_bytes + PADDING_BYTES, np.uint8)
    buffer[size_bytes:] = 0
    return memoryview(buffer.data)[:size_bytes]


def _ended() -> ConnectionError:
    return ConnectionError("the connection ended before the answer")
