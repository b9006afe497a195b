"""Sends runs of blocks to scans as stored in the entry log: their bytes, or the log itself.

    send    log ──a piece──► scan thread ──► connection, as much as it accepts
    share   log ──a read-only descriptor──► connection      (processes of this machine; see scan_server.py)

A piece is read and sent at once, so that it is still in the processor's cache; sendfile, page by page, takes half as long again on
Linux's loopback.

Rule: wait for a step that has begun, even if its caller is cancelled: only then may the connection be closed, as another one
would get its descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from cepheid_bookie.entry_log import EntryLogReader, log_path
from cepheid_bookie.entry_reader import StoredRun
from cepheid_bookie.errors import LogGoneError, LogUnreadableError
from cepheid_bookie.watched_worker import ReadWork
from cepheid_ports import Worker

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
"""Size of a piece of a run, read and sent at once. More only takes memory; what a connection does not accept is read again."""
_TLS_PIECE_BYTES = 256 << 10
"""Size of a piece with TLS: OpenSSL accepts a piece as a whole or needs the same bytes again, so more is read again."""


class RunSender:
    """Sends runs with the scans' threads (`worker`).

    `can_share`: `share` may be called. `shared_bytes`: bytes read of shared logs.
    """

    def __init__(self, logs: EntryLogReader, worker: Worker, *, can_share: bool) -> None:
        self._logs = logs
        self._worker = worker
        self.can_share = can_share
        self.shared_bytes = 0
        self.unreadable_runs = 0

    async def send(self, run: StoredRun, done_bytes: int, connection: socket.socket) -> int:
        """Send as much of the run after its first `done_bytes` as the connection accepts without blocking; return 0 if it is full.

        With TLS, repeat the call with the same `done_bytes` until the connection accepts more.
        Raises LogUnreadableError, also for a log that is too short; LogGoneError; OSError of the connection, or EMFILE.
        """
        return await self._to_its_end(lambda: self._send(run, done_bytes, connection))

    async def share(self, log_id: int, frame: bytes, connection: socket.socket) -> bool:
        """Send a frame with a descriptor of the log on a Unix socket; return False if the connection is full and nothing was sent.

        Raises LogUnreadableError; LogGoneError; OSError of the connection, or EMFILE.
        """
        return await self._to_its_end(lambda: self._share(log_id, frame, connection))

    async def _to_its_end(self, work: Callable[[], T]) -> T:
        working = asyncio.ensure_future(self._worker.run(ReadWork(work)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            while not working.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
            raise

    @contextmanager
    def _reading(self, log_id: int) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise LogGoneError(f"{log_path(log_id)} is deleted", file=log_path(log_id)) from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # does not concern the disk
            self.unreadable_runs += 1
            raise LogUnreadableError(f"{log_path(log_id)} cannot be read: {error}", file=log_path(log_id)) from error

    def _send(self, run: StoredRun, done_bytes: int, connection: socket.socket) -> int:
        at = done_bytes
        most_bytes = _TLS_PIECE_BYTES if isinstance(connection, ssl.SSLSocket) else _PIECE_BYTES
        while at < run.size_bytes:
            with self._reading(run.log_id):
                piece = self._logs.read_bytes(run.log_id, min(most_bytes, run.size_bytes - at), run.offset + at)
            try:
                size_bytes = connection.send(piece)
            except (BlockingIOError, ssl.SSLWantWriteError):
                break
            at += size_bytes
            if size_bytes < len(piece):
                break
        return at - done_bytes

    def _share(self, log_id: int, frame: bytes, connection: socket.socket) -> bool:
        with self._reading(log_id):
            descriptor = self._logs.share(log_id)
        try:
            sent = socket.send_fds(connection, [frame], [descriptor])
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        if sent < len(frame):
            raise OSError(f"{sent} of {len(frame)} bytes of a frame went out")  # a few bytes are sent as one, or not at all
        return True
