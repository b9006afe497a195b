"""Runs of blocks to those who scan, as they lie in the entry log: their bytes, or the log itself.

    send    log ──a piece──► scan thread ──► connection, as much as it takes
    share   log ──a descriptor that only reads──► connection      (processes of this machine; see scan_server.py)

A piece is read and sent at once, so that it is still in the processor's cache; sendfile, page by page, takes half as much again on
Linux's loopback.

Rule: what was begun is waited for, also when its caller is cancelled: only then may the connection be closed, as another one
would get its number.
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
"""Of a run, read and sent in one go. More is in memory for no gain; what a connection does not take is read again."""
_TLS_PIECE_BYTES = 256 << 10
"""The same with TLS: OpenSSL takes all of a piece or asks for the same bytes again, so more is read again."""


class RunSender:
    """`worker`: the scans' threads. `can_share`: whether `share` may be called. `shared_bytes`: of what was shared, those read."""

    def __init__(self, logs: EntryLogReader, worker: Worker, *, can_share: bool) -> None:
        self._logs = logs
        self._worker = worker
        self.can_share = can_share
        self.shared_bytes = 0
        self.unreadable_runs = 0

    async def send(self, run: StoredRun, done_bytes: int, connection: socket.socket) -> int:
        """As much of the run behind its first `done_bytes` as the connection takes, which does not block: 0 when it is full.

        With TLS the same `done_bytes` are to be given again then, until it takes more.

        Raises LogUnreadableError, for a log that is too short as well; LogGoneError; OSError of the connection, or EMFILE."""
        return await self._to_its_end(lambda: self._send(run, done_bytes, connection))

    async def share(self, log_id: int, frame: bytes, connection: socket.socket) -> bool:
        """Sends a frame with a descriptor of the log, on a Unix socket; False: the connection is full, and nothing was sent.

        Raises LogUnreadableError; LogGoneError; OSError of the connection, or EMFILE."""
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
                raise  # says nothing of the disk
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
            raise OSError(f"{sent} of {len(frame)} bytes of a frame went out")  # a few bytes go as one, or not at all
        return True
