"""Splits the byte stream of a connection into frames, without I/O and without copying payloads.

    chunk ──feed()──► [Frame, Frame, ...]                         tails are memoryviews of the chunk
                └──► an incomplete frame, kept until it is complete    joined once, however many chunks it spans

A frame (integers big-endian; protocol.md §1):
    offset 0    4    totalSize: bytes after this field
           4    4    commandSize = N
           8    N    BaseCommand
           8+N  ...  tail: only SEND and MESSAGE have one; checksum, metadata, payload (checksum.py has its table)

Rules
 1. A size is checked as soon as the first 8 bytes have arrived, so a peer cannot make this process keep more than the limit.
 2. Small pieces are collected in one growing buffer: a peer that sends byte by byte does not cause an object for each byte.
 3. After an error, the rest of the stream cannot be split: every later `feed` raises the same error.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, ClassVar, NamedTuple

from google.protobuf.message import DecodeError

from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.errors import WireError

HEADER_BYTES = 8
MIN_COMMAND_BYTES = 2  # the tag and the value of BaseCommand.type, which is required
SMALL_PIECE_BYTES = 4096

_NO_TAIL = memoryview(b"")
_sizes_at = Struct(">II").unpack_from
_new_tuple = tuple.__new__  # takes half the time of calling a NamedTuple, and a frame is created for every entry


class Frame(NamedTuple):
    """One complete frame. `tail` keeps the received chunk in memory as long as it is referenced."""

    type: int  # number in BaseCommand.Type; may be a number that is not in CommandType
    command: bytes
    tail: memoryview  # empty if the frame has only a command


class BadFrameError(WireError):
    """The stream cannot be split into frames from this point on, so the connection must be closed.

    `frames_before` holds the complete frames of the same chunk that precede the error. They are valid and must be processed:
    otherwise the result would depend on how the network split the stream into chunks.
    """

    hint: ClassVar[str] = "check that the peer speaks the Pulsar binary protocol on this port, and TLS only on the TLS port"

    def __init__(self, message: str, frames_before: list[Frame], **facts: Any) -> None:
        super().__init__(message, **facts)
        self.frames_before = frames_before


class FrameTooLargeError(BadFrameError):
    """A frame declares a size above the limit of the connection. None of its bytes were kept."""

    hint: ClassVar[str] = "a client must observe the max_message_size of CONNECTED; a larger limit is a broker setting"


class FrameSplitter:
    """The receiving side of one connection. `max_frame_bytes` limits totalSize, which is the frame without its first 4 bytes."""

    def __init__(self, max_frame_bytes: int) -> None:
        assert max_frame_bytes >= HEADER_BYTES
        self.max_frame_bytes = max_frame_bytes
        self.received_bytes = 0
        self._pieces: list[bytes | bytearray | memoryview] = []  # start of an incomplete frame
        self._pieces_bytes = 0
        self._needed_bytes = HEADER_BYTES  # of that frame: the size of the header; when the header is known, the size of the frame
        self._error: BadFrameError | None = None

    def __repr__(self) -> str:
        state = "broken" if self._error else f"{self._pieces_bytes} of {self._needed_bytes} bytes of a frame"
        return f"<FrameSplitter {state}, {self.received_bytes} received>"

    @property
    def kept_bytes(self) -> int:
        """Number of bytes of the frame that is not yet complete."""
        return self._pieces_bytes

    def feed(self, chunk: bytes) -> list[Frame]:
        """Return the frames that end in `chunk`, in order.

        Raises FrameTooLargeError or BadFrameError; the valid frames before the error are in its `frames_before`.
        """
        if self._error is not None:
            self._error.frames_before = []  # they were passed on when it was raised first
            raise self._error
        frames: list[Frame] = []
        self.received_bytes += len(chunk)
        start = self._finish_kept_frame(chunk, frames) if self._pieces else 0
        if not self._pieces:
            self._cut(chunk, start, frames)
        return frames

    def _finish_kept_frame(self, chunk: bytes, frames: list[Frame]) -> int:
        """Complete the kept frame if it ends in `chunk`; return the number of bytes of `chunk` that belong to it."""
        taken = 0
        while self._pieces:
            missing = self._needed_bytes - self._pieces_bytes
            piece = memoryview(chunk)[taken : taken + missing]
            taken += len(piece)
            self._keep(piece)
            if len(piece) < missing:
                break
            kept = b"".join(self._pieces)
            self._pieces.clear()
            self._pieces_bytes = 0
            # `kept` is either the header, which is kept again with the size of the frame, or the whole frame.
            self._cut(kept, 0, frames, stream_end=self.received_bytes - len(chunk) + taken)
        return taken

    def _cut(self, chunk: bytes, start: int, frames: list[Frame], stream_end: int | None = None) -> None:
        """Append the frames of `chunk` from `start` on, and keep the rest."""
        size, limit, view = len(chunk), self.max_frame_bytes, memoryview(chunk)
        while size - start >= HEADER_BYTES:
            total_bytes, command_bytes = _sizes_at(chunk, start)
            if not MIN_COMMAND_BYTES <= command_bytes <= total_bytes - 4 <= limit - 4:
                raise self._fail(chunk, start, frames, stream_end)
            end = start + 4 + total_bytes
            if end > size:
                self._needed_bytes = 4 + total_bytes
                break
            tail_start = start + HEADER_BYTES + command_bytes
            command = chunk[start + HEADER_BYTES : tail_start]
            # Every known client writes BaseCommand.type first, in one byte: tag 0x08, a number below 128.
            command_type = command[1] if command[0] == 8 and command[1] < 128 else _type_of(command)
            if command_type < 0:
                raise self._fail(chunk, start, frames, stream_end)
            tail = view[tail_start:end] if tail_start < end else _NO_TAIL
            frames.append(_new_tuple(Frame, (command_type, command, tail)))
            start = end
        else:
            self._needed_bytes = HEADER_BYTES
        if start < size:
            self._keep(view[start:])

    def _keep(self, piece: memoryview) -> None:
        self._pieces_bytes += len(piece)
        pieces = self._pieces
        if len(piece) >= SMALL_PIECE_BYTES:
            pieces.append(piece)
        elif pieces and isinstance(pieces[-1], bytearray):
            pieces[-1] += piece  # rule 2
        else:
            pieces.append(bytearray(piece))

    def _fail(self, chunk: bytes, start: int, frames: list[Frame], stream_end: int | None) -> BadFrameError:
        offset = (self.received_bytes if stream_end is None else stream_end) - len(chunk) + start
        total_bytes, command_bytes = _sizes_at(chunk, start)
        facts = {"offset": offset, "total_bytes": total_bytes, "command_bytes": command_bytes}
        where = f"frame at byte {offset} of the connection"
        if offset == 0 and (protocol := _foreign_protocol(chunk)):
            self._error = BadFrameError(f"{where}: the peer speaks {protocol}", frames, **facts)
        elif total_bytes > self.max_frame_bytes:
            self._error = FrameTooLargeError(f"{where}: {total_bytes} bytes, the limit is {self.max_frame_bytes}", frames, **facts)
        elif not MIN_COMMAND_BYTES <= command_bytes <= total_bytes - 4:
            self._error = BadFrameError(
                f"{where}: a command of {command_bytes} bytes cannot be in a frame of {total_bytes}", frames, **facts
            )
        else:
            self._error = BadFrameError(f"{where}: its command has no known type", frames, **facts)
        self._pieces.clear()
        self._pieces_bytes = 0
        return self._error


def _type_of(command: bytes) -> int:
    """Return the type of a command that does not start with it, which protobuf allows; -1 if it has no type."""
    try:
        parsed = pb.BaseCommand.FromString(command)
    except DecodeError:
        return -1
    return int(parsed.type) if parsed.HasField("type") else -1


def _foreign_protocol(first_bytes: bytes) -> str:
    """Return the name of a protocol that is often sent to the wrong port, or an empty string."""
    if first_bytes[:2] == b"\x16\x03":
        return "TLS (this port is for plain connections)"
    if first_bytes[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"PRI "):
        return "HTTP (the admin API has another port)"
    return ""
