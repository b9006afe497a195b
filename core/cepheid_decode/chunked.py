"""Messages that a producer sent in several entries: chunks of one uuid, in order but interleaved with other messages.

    entries    a0  b0  a1  m  b1  a2         a (of 3) is complete at the entry a2: the task that reads a2 returns it as a row

A chunk that was sent again is ignored; a message whose earlier chunks are not found is a bad record at its last chunk; a message
whose last chunk is elsewhere is not returned here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_decode.decode_payloads import MAX_CHUNKED_BYTES

_REMEMBERED = 1000  # complete messages of which a repeated chunk is recognized


@dataclass(frozen=True, slots=True)
class Chunk:
    uuid: bytes
    chunk_id: int
    num_chunks: int
    total_bytes: int
    payload: bytes
    sealed: str = ""  # why it is still encrypted

    @property
    def is_last(self) -> bool:
        return self.chunk_id == self.num_chunks - 1


@dataclass(slots=True)
class _Started:
    num_chunks: int
    is_sealed: bool
    parts: list[bytes] = field(default_factory=list)
    size_bytes: int = 0


class ChunkAssembler:
    """Holds at most `limit_bytes` of incomplete messages; the one that was started first is dropped first."""

    def __init__(self, limit_bytes: int = MAX_CHUNKED_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._started: dict[bytes, _Started] = {}
        self._complete: dict[bytes, None] = {}

    def misses_start_of(self, chunk: Chunk) -> bool:
        """Whether the chunks before this one are unknown here."""
        return chunk.chunk_id > 0 and chunk.uuid not in self._started and chunk.uuid not in self._complete

    def add(self, chunk: Chunk) -> bytes | str | None:
        """Return the whole payload if this chunk completes it; why not, if it should and does not; otherwise None."""
        if chunk.chunk_id == 0 and chunk.num_chunks > 1:
            self._drop(chunk.uuid)
            self._started[chunk.uuid] = _Started(chunk.num_chunks, bool(chunk.sealed))
        started = self._started.get(chunk.uuid)
        if started is None:
            return self._last_of_unknown(chunk)
        if chunk.chunk_id < len(started.parts):  # sent again after a reconnect
            return None
        refusal = self._refusal(started, chunk)
        if refusal is not None:
            self._drop(chunk.uuid)
            return refusal if chunk.is_last else None
        started.parts.append(chunk.payload)
        started.size_bytes += len(chunk.payload)
        self.held_bytes += len(chunk.payload)
        if chunk.is_last:
            return self._take(chunk, started)
        while self.held_bytes > self._limit_bytes:
            self._drop(next(iter(self._started)))
        return None

    def take_over(self, earlier: ChunkAssembler) -> None:
        """Add messages that were found in entries before all that were added here."""
        self._complete = {**earlier._complete, **self._complete}
        for uuid, started in earlier._started.items():
            if uuid not in self._started and uuid not in self._complete:
                self._started[uuid] = started
                self.held_bytes += started.size_bytes

    def _last_of_unknown(self, chunk: Chunk) -> str | None:
        if not chunk.is_last or chunk.uuid in self._complete:
            return None
        return f"the chunks before the last of {chunk.num_chunks} were not found"

    def _refusal(self, started: _Started, chunk: Chunk) -> str | None:
        if chunk.chunk_id > len(started.parts) or chunk.num_chunks != started.num_chunks:
            return (
                f"chunk {len(started.parts)} of {started.num_chunks} is missing before chunk {chunk.chunk_id} of {chunk.num_chunks}"
            )
        if started.is_sealed != bool(chunk.sealed):
            return "some of its chunks cannot be decrypted"
        announced = self._limit_bytes if chunk.sealed else chunk.total_bytes  # encryption makes chunks larger than announced
        if started.size_bytes + len(chunk.payload) > min(announced, self._limit_bytes):
            limit = f"{chunk.total_bytes} bytes are announced, the limit is {self._limit_bytes}"
            return f"its first {chunk.chunk_id + 1} chunks have {started.size_bytes + len(chunk.payload)} bytes: {limit}"
        return None

    def _take(self, chunk: Chunk, started: _Started) -> bytes | str:
        self._drop(chunk.uuid)
        self._complete[chunk.uuid] = None
        if len(self._complete) > _REMEMBERED:
            del self._complete[next(iter(self._complete))]
        if started.size_bytes != chunk.total_bytes and not started.is_sealed:
            return f"its {chunk.num_chunks} chunks have {started.size_bytes} bytes, {chunk.total_bytes} are announced"
        return b"".join(started.parts)

    def _drop(self, uuid: bytes) -> None:
        started = self._started.pop(uuid, None)
        if started is not None:
            self.held_bytes -= started.size_bytes
