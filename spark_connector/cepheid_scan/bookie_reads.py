"""The read of one range from one bookie: a stream of chunks, checked in a thread that stays ahead of the decoder.

    bookie ──TCP──► thread: decode, verify digests ──► up to `read_ahead_bytes` ──► `BookieRead.next_chunk(timeout)`
                       ▲ takes no more than that (soft by a chunk): TCP or HTTP/2 then stops the bookie

Rule 1: a returned chunk is verified, and covers every id from the end of the previous one to its own.
Rule 2: the time limit runs only while a caller waits: a slow decoder does not make a bookie look silent. Neither a silent bookie
nor a local disk blocks the caller for longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from cepheid_rpc import (
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    MalformedGroupError,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
)
from cepheid_scan.bookie_answers import BookieAnswers
from cepheid_security import ClientTls

_END_S = 5.0
"""Time to wait for the thread of a closed read. It takes moments even on a busy machine, unless a disk does not answer."""


class BookieRead:
    """A read, started on construction; call `close` in any case. Raises BookieUnavailableError, MalformedGroupError."""

    def __init__(
        self,
        bookie: str,
        address: str,
        request: ReadRequest,
        *,
        read_ahead_bytes: int,
        verify: bool,
        tls: ClientTls | None = None,
    ) -> None:
        self.bookie = bookie
        self.address = address
        self._request = request
        self._verify = verify
        self._read_ahead_bytes = read_ahead_bytes
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._chunks: deque[tuple[ReadAnswer, int]] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._answers = BookieAnswers(bookie, address, request, tls)
        self._thread = threading.Thread(target=self._fetch, name=f"scan-{bookie}", daemon=True)
        self._thread.start()

    def next_chunk(self, timeout_s: float) -> tuple[ReadAnswer, int] | None:
        """Return the next verified part of the answer and the bytes received for it; None at the end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._chunks and not self._ended:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise BookieUnavailableError(f"no answer within {timeout_s:g} s", bookie=self.bookie, address=self.address)
            if self._chunks:
                chunk = self._chunks.popleft()
                self._waiting_bytes -= chunk[1]
                self._changed.notify()
                return chunk
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        """Close the read, so that the bookie stops reading. A thread that waits for a local disk is left alone: rule 2."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._answers.cancel()
        self._thread.join(_END_S)

    def _fetch(self) -> None:
        error: BaseException | None = None
        try:
            for answer, size_bytes in self._answers:
                if not self._give(self._checked(answer), size_bytes):
                    return
        except Exception as raised:  # any error belongs to the waiting caller, not to this thread
            error = raised if isinstance(raised, (MalformedGroupError, BookieUnavailableError)) else self._unavailable(raised)
        finally:
            with self._changed:
                self._error, self._ended = error, True
                self._changed.notify()

    def _give(self, answer: ReadAnswer, size_bytes: int) -> bool:
        with self._changed:
            while self._waiting_bytes >= self._read_ahead_bytes and not self._closed:
                self._changed.wait()
            self._chunks.append((answer, size_bytes))
            self._waiting_bytes += size_bytes
            self._changed.notify()
            return not self._closed

    def _checked(self, answer: ReadAnswer) -> ReadAnswer:
        """Return the answer with entries that do not match their digest moved to the missing ones."""
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
        return replace(answer, groups=tuple(groups), missing=tuple(missing))

    def _unavailable(self, error: Exception) -> BookieUnavailableError:
        code, details = getattr(error, "code", None), getattr(error, "details", None)  # for a grpc.RpcError that is a call
        reason = f"{code().name}: {details()}" if callable(code) and callable(details) else repr(error)
        return BookieUnavailableError(reason, bookie=self.bookie, address=self.address)


def verified_parts(group: EntryGroup) -> Iterator[tuple[EntryGroup, bool]]:
    """Yield the group and whether it is valid; in pieces if not, so that a damaged entry affects no other."""
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
