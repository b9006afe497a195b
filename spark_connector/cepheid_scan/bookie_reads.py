"""One range asked of one bookie: a gRPC stream of chunks, checked in a thread that stays ahead of whoever decodes.

    bookie ──HTTP/2──► thread: decode, verify digests ──► `read_ahead_bytes` wait ──► `BookieRead.next_chunk(timeout)`
                          ▲ takes no more than that (soft by a chunk): HTTP/2 then stops the bookie

Rule 1: a chunk that is given out is verified, and says something of every id from the last one's end to its own.
Rule 2: the time limit runs only while somebody waits: a slow decoder is no silent bookie, and a silent bookie hangs nobody.
Rule 3: one channel per bookie and process. Spark forks its workers before anything here is imported; a fork later gets its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cepheid_rpc import (
    READ,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    MalformedGroupError,
    MissingEntries,
    ReadRequest,
    Status,
    channel_options,
    decode_read_answer,
    encode_read_request,
    method_path,
)

CONNECT_TIMEOUT_MS = 2_000
"""Longer than a broker gives: what is far away, or busy with other scans, may take its time to shake hands."""

_channels: dict[str, Any] = {}  # by address
_channels_lock = threading.Lock()
_channels_pid = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Groups and ranges that the bookie has not, together without a gap from the chunk before to `next_entry_id`.

    `damaged`: entries whose bytes are not what their writer sent, here or on the way; they are in `missing` too."""

    groups: tuple[EntryGroup, ...]
    missing: tuple[MissingEntries, ...]
    next_entry_id: int
    size_bytes: int
    retry_after_s: float = 0.0


class BookieRead:
    """Made with the question; `close` in any case. Raises BookieUnavailableError, MalformedGroupError."""

    def __init__(self, bookie: str, address: str, request: ReadRequest, *, read_ahead_bytes: int, verify: bool) -> None:
        self.bookie = bookie
        self.address = address
        self._request = request
        self._verify = verify
        self._read_ahead_bytes = read_ahead_bytes
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._call = _method(address)(encode_read_request(request))
        self._thread = threading.Thread(target=self._fetch, name=f"scan-{bookie}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<BookieRead of {self._request.ledger_id} at {self.bookie} ({self.address}), {len(self._chunks)} chunks wait>"

    def next_chunk(self, timeout_s: float) -> Chunk | None:
        """None at the end of the answer."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._chunks and not self._ended:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise BookieUnavailableError(f"no answer within {timeout_s:g} s", bookie=self.bookie, address=self.address)
            if self._chunks:
                chunk = self._chunks.popleft()
                self._waiting_bytes -= chunk.size_bytes
                self._changed.notify()
                return chunk
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        """The bookie stops reading for nobody."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._call.cancel()
        self._thread.join()

    def _fetch(self) -> None:
        error: BaseException | None = None
        try:
            for data in self._call:
                chunk = self._checked(data)
                if not self._give(chunk):
                    return
        except Exception as raised:  # whatever it is, it belongs to whoever waits, not to this thread
            error = raised if isinstance(raised, (MalformedGroupError, BookieUnavailableError)) else self._unavailable(raised)
        finally:
            with self._changed:
                self._error, self._ended = error, True
                self._changed.notify()

    def _give(self, chunk: Chunk) -> bool:
        with self._changed:
            while self._waiting_bytes >= self._read_ahead_bytes and not self._closed:
                self._changed.wait()
            self._chunks.append(chunk)
            self._waiting_bytes += chunk.size_bytes
            self._changed.notify()
            return not self._closed

    def _checked(self, data: bytes) -> Chunk:
        answer = decode_read_answer(data)
        groups: list[EntryGroup] = []
        missing = list(answer.missing)
        for group in answer.groups:
            if group.ledger_id != self._request.ledger_id:
                raise MalformedGroupError(f"asked for ledger {self._request.ledger_id}, {self.bookie} answered {group!r}")
            if not self._verify:
                groups.append(group)
                continue
            for part, is_valid in verified_parts(group):
                if is_valid:
                    groups.append(part)
                else:
                    missing.append(MissingEntries(part.first_entry_id, part.last_entry_id, Status.BAD_DIGEST))
        return Chunk(tuple(groups), tuple(missing), answer.next_entry_id, len(data), answer.retry_after_ms / 1000)

    def _unavailable(self, error: Exception) -> BookieUnavailableError:
        code, details = getattr(error, "code", None), getattr(error, "details", None)  # of a grpc.RpcError that is a call
        reason = f"{code().name}: {details()}" if callable(code) and callable(details) else repr(error)
        return BookieUnavailableError(reason, bookie=self.bookie, address=self.address)


def verified_parts(group: EntryGroup) -> Iterator[tuple[EntryGroup, bool]]:
    """The group and whether it is valid; in pieces when it is not, so that a damaged entry spoils no other."""
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        if len(group) == 1:
            yield group, False
            return
        middle = group.first_entry_id + len(group) // 2
        yield from verified_parts(group.slice(group.first_entry_id, middle - 1))
        yield from verified_parts(group.slice(middle, group.last_entry_id))
    else:
        yield group, True


def _method(address: str) -> Any:
    """The read method of a bookie, on the channel that this process has to it."""
    import grpc

    global _channels_pid
    with _channels_lock:
        if _channels_pid != os.getpid():
            _channels.clear()  # of the process that forked this one: not to be touched, not even closed
            _channels_pid = os.getpid()
        if (channel := _channels.get(address)) is None:
            channel = _channels[address] = grpc.insecure_channel(address, options=_options())
    methods: Any = channel  # the stubs demand serializers, which bytes do not need
    return methods.unary_stream(method_path(READ))


def _options() -> list[tuple[str, Any]]:
    changed = {**dict(channel_options()), "grpc.min_reconnect_backoff_ms": CONNECT_TIMEOUT_MS}  # the time limit of connecting, too
    return list(changed.items())


def close_channels() -> None:
    """Ends the connections of this process, for whoever leaves no socket behind (tests, a command's end)."""
    with _channels_lock:
        for channel in _channels.values():
            channel.close()
        _channels.clear()
