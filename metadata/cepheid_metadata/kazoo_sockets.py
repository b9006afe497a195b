"""The two sockets of kazoo's thread, with few system calls: its stream to the server, and the one by which the loop wakes it.

Each system call of that thread releases the interpreter, and while the loop is busy the thread gets it back only after a switch
interval (0.5 ms). kazoo makes nine of them for a request and its answer. With these sockets a burst of requests is one `send`, its
answers are one `recv`, and there are no other calls while there is work to do.
"""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

_RECEIVED_BYTES = 1 << 16
_UNSENT_BYTES = 1 << 18


class BufferedStream:
    """A TCP connection: sent data waits for `flush`, and received data is read at once. Used by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = b""
        self._at = 0
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def pending(self) -> int:
        """Return the bytes that `recv` returns without a system call. kazoo calls this for TLS sockets, and selects only at 0."""
        return len(self._received) - self._at

    def recv(self, size_bytes: int) -> bytes:
        """Return at most this many bytes; empty: the connection has ended. Raises BlockingIOError, OSError."""
        if self._at == len(self._received):
            self._received, self._at = self._socket.recv(_RECEIVED_BYTES), 0
        chunk = self._received[self._at : self._at + size_bytes]
        self._at += len(chunk)
        return chunk

    def send(self, data: Any) -> int:
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(self._unsent[-1])
        return len(self._unsent[-1])

    @property
    def is_full(self) -> bool:
        """Whether so much data waits that it must be flushed before more is sent."""
        return self._unsent_bytes >= _UNSENT_BYTES

    def flush(self, timeout_s: float | None) -> bool:
        """Send what waits. False: the server accepted nothing for that long. Raises OSError."""
        rest = memoryview(b"".join(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1_000):
                    return False
        return True

    def close(self) -> None:
        self._socket.close()


class Wake:
    """Both ends of kazoo's socket pair with a byte for each waiting request, as a count and one byte for all."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()
        self._count = 0

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def is_set(self) -> bool:
        return self._count > 0

    def send(self, data: bytes) -> int:
        """Add one to the count, from any thread. Raises OSError once it is closed."""
        with self._lock:
            if self._writer.fileno() < 0:
                raise OSError("the connection to ZooKeeper is closed")
            if self._count == 0:
                self._writer.send(b"\0")
            self._count += 1
        return len(data)

    def recv(self, size_bytes: int) -> bytes:
        """Take one off the count."""
        with self._lock:
            if self._count:
                self._count -= 1
                if self._count == 0:
                    self._reader.recv(size_bytes)
        return b"\0"

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
