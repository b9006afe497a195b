"""The answer of a bookie to one read request, part by part: blocks on a separate connection, otherwise gRPC messages.

    known port? ──no──► ask by gRPC ──► none ────────────────────────────┐
        │ yes             ▲ refused, or no longer that bookie: ask again   ▼
        ▼                 │                                            gRPC stream
    connect, proof, request ──► frames (scan_connection.py)

Rule 1: the answer is complete or the iteration raises: the end of the connection never looks like the end of the answer.
Rule 2: `cancel` ends every wait, from any thread, except for a local disk that does not answer.
Rule 3: the peer must prove that it is the bookie. After a later failure without gRPC (an unreadable log, a damaged
block) gRPC is used for a while: there the bookie checks each block, and reports what it lacks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from cepheid_rpc import (
    BookieUnavailableError,
    EntryGroup,
    FrameKind,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    decode_read_answer,
    encode_read_request,
    stored_groups,
)
from cepheid_scan.bookie_channels import ScanDoor, known_door, learn_door, read_method, scan_port_call
from cepheid_scan.scan_connection import ScanConnection, dial_on_machine, dial_port
from cepheid_security import ClientTls

log = logging.getLogger(__name__)

_BLOCKS = (FrameKind.BLOCKS, FrameKind.PLACE)


class CancelledAnswersError(Exception):
    """The answers were cancelled by their reader."""


class _DamagedRunError(Exception):
    """Blocks are malformed from some entry on."""


class BookieAnswers:
    """Iterates over the answers with their sizes in bytes, once, in one thread.

    Raises BookieUnavailableError, MalformedGroupError, CancelledAnswersError, and gRPC's errors. `tls`: the certificate for
    addresses with TLS; None: from the environment.
    """

    def __init__(self, bookie: str, address: str, request: ReadRequest, tls: ClientTls | None = None) -> None:
        self._tls = tls
        self._bookie = bookie
        self._address = address
        self._request = request
        self._lock = threading.Lock()
        self._cancelled = False
        self._end: Callable[[], object] | None = None  # ends the current wait

    def __iter__(self) -> Iterator[tuple[ReadAnswer, int]]:
        connection = self._reach()
        if connection is None:
            call = read_method(self._address, self._tls)(encode_read_request(self._request))
            self._wait_for(call.cancel)
            for data in call:
                yield decode_read_answer(data), len(data)
            return
        with connection:
            try:
                yield from self._frames(connection)
            except (OSError, _DamagedRunError, MalformedGroupError) as error:
                if not self._cancelled:
                    learn_door(self._address, None)  # over gRPC the bookie reports block by block what it has
                raise error if isinstance(error, MalformedGroupError) else self._unavailable(str(error)) from error

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

    # Without gRPC

    def _reach(self) -> ScanConnection | None:
        """Return a connection to the bookie that has the request. None: only gRPC is left."""
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

        call = scan_port_call(self._address, self._tls)
        self._wait_for(call.cancel)
        try:
            return learn_door(self._address, call.result())
        except MalformedGroupError as error:  # it uses another version of the protocol
            log.info("scan.port_not_understood: bookie %s: %s", self._bookie, error, extra={"bookie": self._bookie})
            return learn_door(self._address, None)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older bookie, or one that serves everything over gRPC
                return learn_door(self._address, None)
            raise

    def _dial(self, door: ScanDoor) -> ScanConnection | None:
        """Return a connection; None: nothing listens there, or another program."""
        on_machine = None if door.secured else self._ask_at(dial_on_machine, door)  # with TLS no entry log is passed on
        return on_machine or self._ask_at(lambda door: dial_port(door, self._tls), door)

    def _ask_at(self, dial: Callable[[ScanDoor], ScanConnection | None], door: ScanDoor) -> ScanConnection | None:
        if (connection := dial(door)) is None:
            return None
        with ExitStack() as opened:
            opened.enter_context(connection)
            self._wait_for(connection.end)
            try:
                if not connection.ask(door.token, encode_read_request(self._request)):
                    return None
            except OSError:
                return None
            opened.pop_all()
        return connection

    def _frames(self, connection: ScanConnection) -> Iterator[tuple[ReadAnswer, int]]:
        while True:
            kind, size_bytes, first, last = connection.head()
            if kind == FrameKind.END:
                return
            if kind not in _BLOCKS and kind != FrameKind.ANSWER:
                raise MalformedGroupError(f"a frame of kind {kind}, which this process does not know")
            body = connection.body(kind, size_bytes)
            if kind not in _BLOCKS:
                yield decode_read_answer(body), len(body)
                continue
            answer = stored_answer(body, self._request.ledger_id, first, last)
            if answer.groups:
                yield answer, len(body)
            if answer.next_entry_id <= last:
                raise _DamagedRunError(f"the stored block of entry {answer.next_entry_id} is damaged")


def stored_answer(blocks: memoryview, ledger_id: int, first: int, last: int) -> ReadAnswer:
    """Return the entries from `first` to `last`, or to the first malformed block."""
    groups: list[EntryGroup] = []
    entry_id = first
    with suppress(MalformedGroupError):
        for group in stored_groups(blocks):
            if group.ledger_id != ledger_id or group.first_entry_id != entry_id or group.last_entry_id > last:
                break
            groups.append(group)
            entry_id = group.last_entry_id + 1
    return ReadAnswer(tuple(groups), (), entry_id)
