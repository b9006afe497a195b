"""One range asked of one bookie: a stream of chunks, checked in a thread that stays ahead of whoever decodes.

    bookie ──TCP──► thread: decode, verify digests ──► `read_ahead_bytes` wait ──► `BookieRead.next_chunk(timeout)`
                       ▲ takes no more than that (soft by a chunk): TCP, or HTTP/2, then stops the bookie

Rule 1: a chunk that is given out is verified, and says something of every id from the last one's end to its own.
Rule 2: the time limit runs only while somebody waits: a slow decoder is no silent bookie. A silent bookie hangs nobody, nor does a
disk of this machine.
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
"""For the thread of a read that is closed. It takes moments, also on a busy machine, unless a disk does not answer."""


class BookieRead:
    """Made with the question; `close` in any case. Raises BookieUnavailableError, MalformedGroupError."""

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
        """Return the next part of the answer, verified, and in how many bytes it came; None at the end."""
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
        """The bookie stops reading for nobody. A thread that waits for a disk of this machine is left to it: rule 2."""
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
        except Exception as raised:  # whatever it is, it belongs to whoever waits, not to this thread
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
        """Return the answer with entries whose bytes are not what their writer sent among those that are missing."""
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
