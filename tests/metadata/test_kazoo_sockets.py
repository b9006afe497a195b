"""The sockets of kazoo's thread: nothing is lost or reordered, and a wake-up is one byte however many requests wait."""

from __future__ import annotations

import select
import socket

import pytest

from cepheid_metadata.kazoo_sockets import BufferedStream, Wake


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_what_is_sent_waits_for_the_flush_and_what_arrived_is_read_piece_by_piece() -> None:
    ours, theirs = socket.socketpair()
    stream = BufferedStream(ours)
    stream.setblocking(False)
    with ours, theirs:
        assert [stream.send(b"abc"), stream.send(memoryview(b"de"))] == [3, 2]
        assert not is_readable(theirs.fileno())
        assert stream.flush(1.0)
        assert theirs.recv(100) == b"abcde"
        theirs.send(b"12345")
        assert (stream.recv(2), stream.pending()) == (b"12", 3)
        assert (stream.recv(100), stream.pending()) == (b"345", 0)
        with pytest.raises(BlockingIOError):
            stream.recv(1)
        theirs.close()
        assert stream.recv(1) == b""


def test_a_flush_to_a_peer_that_takes_nothing_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    stream = BufferedStream(ours)
    stream.setblocking(False)
    with ours, theirs:
        while not stream.is_full:
            stream.send(bytes(100_000))
        stream.send(bytes(4 << 20))
        assert not stream.flush(0.01)


def test_a_wake_is_set_for_as_many_takings_as_there_were_sendings() -> None:
    wake = Wake()
    for _ in range(1000):  # more than a socket pair holds: the sender never blocks
        wake.send(b"\0")
    for _ in range(1000):
        assert wake.is_set
        assert is_readable(wake.fileno())
        wake.recv(1)
    assert not wake.is_set
    assert not is_readable(wake.fileno())
    assert wake.recv(1) == b"\0"  # kazoo does so when its queue is empty: it must not block
    wake.send(b"\0")
    assert is_readable(wake.fileno())
    wake.close()
    with pytest.raises(OSError, match="closed"):
        wake.send(b"\0")
