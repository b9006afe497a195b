"""What a bookie answers to one read request, part by part: blocks on a connection of their own, or else gRPC messages.

    known where? ──no──► ask by gRPC ──► none ────────────────────────────┐
        │ yes             ▲ refused, or no longer that bookie: ask anew   ▼
        ▼                 │                                            gRPC stream
    connect, token, request ──► frames ──► a buffer each, padded as the decoder wants it, so that nothing is copied again

Rule 1: the answer is complete, or the iteration raises: an end of the connection never looks like the end of the answer.
Rule 2: `cancel` ends whatever is waited for, from any thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from cepheid_rpc import (
    FRAME_HEAD,
    REQUEST_LENGTH,
    BookieUnavailableError,
    EntryGroup,
    FrameKind,
    MalformedGroupError,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
    decode_read_answer,
    encode_read_request,
    stored_groups,
)
from cepheid_scan.bookie_channels import CONNECT_TIMEOUT_S, ScanDoor, known_door, learn_door, read_method, scan_port_call
from cepheid_scan.decode_fields import PADDING_BYTES

log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 32 << 20  # a chunk has 8 MiB, and then the largest entry


class CancelledAnswersError(Exception):
    """Nobody wants them any more."""


class BookieAnswers:
    """Iterated once, in one thread: answers, and how many bytes each came in. Raises BookieUnavailableError, MalformedGroupError,
    CancelledAnswersError, and what gRPC raises."""

    def __init__(self, bookie: str, address: str, request: ReadRequest) -> None:
        self._bookie = bookie
        self._address = address
        self._request = request
        self._lock = threading.Lock()
        self._cancelled = False
        self._end: Callable[[], object] | None = None  # of what is waited for

    def __iter__(self) -> Iterator[tuple[ReadAnswer, int]]:
        reached = self._reach()
        if reached is None:
            call = read_method(self._address)(encode_read_request(self._request))
            self._wait_for(call.cancel)
            for data in call:
                yield decode_read_answer(data), len(data)
            return
        connection, head = reached
        try:
            yield from self._frames(connection, head)
        except OSError as error:
            raise self._unavailable(str(error)) from error
        finally:
            connection.close()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled, end = True, self._end
        if end is not None:
            end()

    def _wait_for(self, end: Callable[[], object]) -> None:
        with self._lock:
            self._end, cancelled = end, self._cancelled
        if cancelled:
            end()
            raise CancelledAnswersError

    def _unavailable(self, reason: str) -> BookieUnavailableError:
        return BookieUnavailableError(reason, bookie=self._bookie, address=self._address)

    # Past gRPC

    def _reach(self) -> tuple[socket.socket, bytes] | None:
        """A connection that has the request, and the head of its first frame. None: only gRPC is left."""
        is_known, door = known_door(self._address)
        if door is not None:
            reached = self._dial(door)
            if reached is not None:
                return reached
        if door is None and is_known:
            return None
        asked = self._ask()
        if asked is None:
            return None
        reached = self._dial(asked)
        if reached is None:
            place = f"{asked.host}:{asked.port}"
            facts = {"bookie": self._bookie, "host": asked.host, "port": asked.port}
            log.warning("scan.port_unreachable: %s of bookie %s", place, self._bookie, extra=facts)
            learn_door(self._address, None)
        return reached

    def _ask(self) -> ScanDoor | None:
        import grpc

        call = scan_port_call(self._address)
        self._wait_for(call.cancel)
        try:
            return learn_door(self._address, call.result())
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older bookie, or one that serves all by gRPC
                return learn_door(self._address, None)
            raise

    def _dial(self, door: ScanDoor) -> tuple[socket.socket, bytes] | None:
        """None: nobody is there, or somebody else."""
        connection = None
        try:
            connection = socket.create_connection((door.host, door.port), timeout=CONNECT_TIMEOUT_S)
            connection.settimeout(None)  # whoever waits for chunks has a limit
            self._wait_for(lambda: _shut(connection))
            request = encode_read_request(self._request)
            connection.sendall(door.token + REQUEST_LENGTH.pack(len(request)) + request)
            return connection, _receive(connection, FRAME_HEAD.size)
        except OSError:
            if connection is not None:
                connection.close()
            return None
        except CancelledAnswersError:
            if connection is not None:
                connection.close()
            raise

    def _frames(self, connection: socket.socket, head: bytes) -> Iterator[tuple[ReadAnswer, int]]:
        while True:
            kind, size_bytes, first, last = FRAME_HEAD.unpack(head)
            if kind == FrameKind.END:
                return
            if size_bytes > _MAX_FRAME_BYTES:
                raise MalformedGroupError(f"a frame of {size_bytes} bytes, {_MAX_FRAME_BYTES} are taken")
            buffer = np.empty(size_bytes + PADDING_BYTES, np.uint8)
            buffer[size_bytes:] = 0
            body = memoryview(buffer.data)[:size_bytes]
            _receive_into(connection, body)
            if kind == FrameKind.BLOCKS:
                yield stored_answer(body, self._request.ledger_id, first, last), size_bytes
            elif kind == FrameKind.ANSWER:
                yield decode_read_answer(body), size_bytes
            else:
                raise MalformedGroupError(f"a frame of kind {kind}, which this process does not know")
            head = _receive(connection, FRAME_HEAD.size)


def stored_answer(blocks: memoryview, ledger_id: int, first: int, last: int) -> ReadAnswer:
    """The entries `first..last`; those from where the blocks are not what they should be are missing as damaged."""
    groups: list[EntryGroup] = []
    entry_id = first
    with suppress(MalformedGroupError):
        for group in stored_groups(blocks):
            if group.ledger_id != ledger_id or group.first_entry_id != entry_id or group.last_entry_id > last:
                break
            groups.append(group)
            entry_id = group.last_entry_id + 1
    missing = (MissingEntries(entry_id, last, Status.BAD_DIGEST),) if entry_id <= last else ()
    return ReadAnswer(tuple(groups), missing, last + 1)


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills it. Raises ConnectionError at an end before that, OSError."""
    while view:
        size_bytes = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if size_bytes == 0:
            raise ConnectionError("the connection ended before the answer")
        view = view[size_bytes:]


def _shut(connection: Any) -> None:
    """Whoever waits for it goes on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
