from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import BadFrameError, Frame, FrameSplitter, FrameTooLargeError

LIMIT = 1_000_000
SEND = bytes.fromhex("0806320408001000")
FLOW = bytes.fromhex("080b5a05080010e807")


def frame(command: bytes, tail: bytes = b"") -> bytes:
    return struct.pack(">II", 4 + len(command) + len(tail), len(command)) + command + tail


def plain(frames: list[Frame]) -> list[tuple[int, bytes, bytes]]:
    return [(f.type, f.command, bytes(f.tail)) for f in frames]


def feed_all(splitter: FrameSplitter, chunks: list[bytes]) -> tuple[list[tuple[int, bytes, bytes]], BadFrameError | None]:
    """What a connection does: takes the frames of each chunk, and on an error those in front of it."""
    frames: list[Frame] = []
    for chunk in chunks:
        try:
            frames += splitter.feed(chunk)
        except BadFrameError as error:
            return plain(frames + error.frames_before), error
    return plain(frames), None


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


streams = st.lists(
    st.tuples(st.sampled_from([SEND, FLOW]), st.binary(max_size=30) | st.integers(0, 9000).map(bytes)), min_size=1, max_size=6
)


@given(streams, st.lists(st.integers(1, 60_000), max_size=40))
def test_frames_do_not_depend_on_how_the_stream_is_cut(items: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame(command, tail) for command, tail in items)
    splitter = FrameSplitter(LIMIT)
    frames, error = feed_all(splitter, cut(stream, cuts))
    assert error is None
    assert frames == [(command[1], command, tail) for command, tail in items]
    assert (splitter.kept_bytes, splitter.received_bytes) == (0, len(stream))


def test_one_byte_at_a_time() -> None:
    stream = frame(SEND, b"hello") + frame(FLOW) + frame(SEND, bytes(5000))
    frames, error = feed_all(FrameSplitter(LIMIT), [stream[i : i + 1] for i in range(len(stream))])
    assert error is None
    assert frames == [(6, SEND, b"hello"), (11, FLOW, b""), (6, SEND, bytes(5000))]


def test_a_tail_is_a_view_of_the_chunk_and_not_a_copy() -> None:
    chunk = frame(SEND, b"one") + frame(SEND, b"two")
    first, second = FrameSplitter(LIMIT).feed(chunk)
    assert first.tail.obj is chunk
    assert second.tail.obj is chunk


class CountingSplitter(FrameSplitter):
    cut_bytes = 0

    def _cut(self, chunk: bytes, start: int, frames: list[Frame], stream_end: int | None = None) -> None:
        self.cut_bytes += len(chunk) - start
        super()._cut(chunk, start, frames, stream_end)


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1, 100, 5000])
def test_a_frame_in_many_pieces_is_looked_at_twice_at_most(piece_bytes: int) -> None:
    stream = frame(SEND, bytes(200_000)) * 2
    splitter = CountingSplitter(LIMIT)
    frames, _ = feed_all(splitter, [stream[i : i + piece_bytes] for i in range(0, len(stream), piece_bytes)])
    assert len(frames) == 2
    # Once for the header, once for the whole. Joining what is there again for each piece would be quadratic.
    assert splitter.cut_bytes < 2 * len(stream)


def test_small_pieces_are_gathered_in_one_buffer() -> None:
    splitter = FrameSplitter(LIMIT)
    for byte in frame(SEND, bytes(100_000))[:50_000]:
        splitter.feed(bytes([byte]))
    assert splitter.kept_bytes == 50_000
    assert len(splitter._pieces) == 1


BAD_HEADERS = [
    (0, 0, BadFrameError),
    (4, 0, BadFrameError),  # no command
    (5, 1, BadFrameError),  # no room for a type
    (10, 7, BadFrameError),  # the command is larger than its frame
    (100, 2**32 - 1, BadFrameError),  # -1
    (3, 8, BadFrameError),
    (LIMIT + 1, 10, FrameTooLargeError),
    (2**31, 10, FrameTooLargeError),
    (2**32 - 1, 2**32 - 1, FrameTooLargeError),
]


@pytest.mark.parametrize(("total_bytes", "command_bytes", "kind"), BAD_HEADERS)
@pytest.mark.parametrize("cuts", [[], [19, 20, 25], list(range(200))])
def test_a_bad_header_is_refused_at_its_offset(
    total_bytes: int, command_bytes: int, kind: type[BadFrameError], cuts: list[int]
) -> None:
    good = frame(SEND, b"abc")
    stream = good + struct.pack(">II", total_bytes, command_bytes)
    splitter = FrameSplitter(LIMIT)
    frames, error = feed_all(splitter, cut(stream, cuts))
    assert frames == [(6, SEND, b"abc")]
    assert type(error) is kind
    assert error.facts == {"offset": len(good), "total_bytes": total_bytes, "command_bytes": command_bytes}
    assert splitter.kept_bytes == 0
    with pytest.raises(kind) as again:
        splitter.feed(good)
    assert again.value is error
    assert error.frames_before == []


def test_a_frame_of_exactly_the_limit_passes() -> None:
    stream = frame(SEND, bytes(LIMIT - 4 - len(SEND)))
    assert len(stream) == LIMIT + 4
    assert len(FrameSplitter(LIMIT).feed(stream)) == 1
    with pytest.raises(FrameTooLargeError):
        FrameSplitter(LIMIT - 1).feed(stream)


def test_a_large_frame_is_refused_before_it_has_come() -> None:
    with pytest.raises(FrameTooLargeError, match=f"{LIMIT + 1} bytes, the limit is {LIMIT}"):
        FrameSplitter(LIMIT).feed(struct.pack(">II", LIMIT + 1, 10))


@pytest.mark.parametrize(
    ("first_bytes", "named"),
    [(b"GET /admin HTTP/1.1\r\n", "HTTP"), (bytes.fromhex("16030100c8010000c40303"), "TLS")],
)
def test_a_foreign_protocol_is_named(first_bytes: bytes, named: str) -> None:
    with pytest.raises(BadFrameError, match=named):
        FrameSplitter(LIMIT).feed(first_bytes)


def test_a_type_that_does_not_come_first_is_found() -> None:
    command = bytes.fromhex("320408001000 0806".replace(" ", ""))
    (only,) = FrameSplitter(LIMIT).feed(frame(command))
    assert only.type == 6


def test_an_unknown_type_is_passed_on() -> None:
    (only,) = FrameSplitter(LIMIT).feed(frame(bytes.fromhex("0863")))
    assert only.type == 99


@pytest.mark.parametrize("command", ["ffff", "1a00", "0aff01", "08ffffffffffffffffffff01"])
def test_a_command_without_a_type_is_refused(command: str) -> None:
    frames, error = feed_all(FrameSplitter(LIMIT), [frame(FLOW) + frame(bytes.fromhex(command))])
    assert frames == [(11, FLOW, b"")]
    assert error is not None
    assert error.facts["offset"] == len(frame(FLOW))


@given(st.binary(max_size=200), st.lists(st.integers(1, 200), max_size=10))
def test_random_bytes_give_frames_or_a_bad_frame_error_whatever_the_cuts(noise: bytes, cuts: list[int]) -> None:
    stream = frame(SEND, b"x") + noise
    whole_frames, whole_error = feed_all(FrameSplitter(300), [stream])
    frames, error = feed_all(FrameSplitter(300), cut(stream, cuts))
    assert frames == whole_frames
    assert (error and (str(error), error.facts)) == (whole_error and (str(whole_error), whole_error.facts))


@given(st.data())
def test_mutated_streams_keep_the_frames_in_front_of_the_damage(data: st.DataObject) -> None:
    frames = [frame(SEND, b"a" * n) for n in range(5)]
    stream = bytearray(b"".join(frames))
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= data.draw(st.integers(1, 255))
    intact = 0
    while sum(map(len, frames[: intact + 1])) <= position:
        intact += 1
    seen, _ = feed_all(FrameSplitter(LIMIT), [bytes(stream)])
    assert seen[:intact] == [(6, SEND, b"a" * n) for n in range(intact)]
