"""Runs of blocks, given as descriptors of their log: to whom, and what becomes of a descriptor that nobody takes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, RealDisk
from cepheid_bookie.entry_log import EntryLogReader, log_path
from cepheid_bookie.errors import LogGoneError, LogUnreadableError
from cepheid_bookie.run_sender import RunSender
from cepheid_bookie.scan_server import ScanServer, _may_read_logs
from cepheid_bookie.scans import accept_every_ticket
from cepheid_ports import Ports
from cepheid_rpc import Status, local_scan_address
from tests.bookie.bookie_support import Machine, small_settings

FRAME = b"f" * 37


def log_on(directory: Path) -> RealDisk:
    disk = RealDisk(directory)
    disk.mkdir("entrylog")
    file = disk.open(log_path(1), create=True)
    file.pwrite(b"block", 0)
    file.close()
    return disk


async def test_a_log_goes_with_its_frame_and_can_only_be_read(tmp_path: Path) -> None:
    worker = Ports().new_worker("scan", 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        sender = RunSender(EntryLogReader(log_on(tmp_path), open_logs=2), worker, can_share=True)
        assert await sender.share(1, FRAME, here)
        frame, (descriptor,), _, _ = socket.recv_fds(there, 100, 1)
        try:
            assert (frame, os.pread(descriptor, 100, 0)) == (FRAME, b"block")
            with pytest.raises(OSError):
                os.pwrite(descriptor, b"x", 0)
        finally:
            os.close(descriptor)
    await worker.aclose()


@pytest.mark.parametrize(
    ("failure", "raised", "told", "unreadable"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file"), LogGoneError, "is deleted", 0),
        (OSError(errno.EMFILE, "too many open files"), OSError, "too many open files", 0),
        (OSError(errno.EIO, "input/output error"), LogUnreadableError, "cannot be read: .*input/output", 1),
    ],
)
async def test_what_says_nothing_of_the_disk_is_not_held_against_it(
    failure: OSError, raised: type[Exception], told: str, unreadable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise failure

    worker = Ports().new_worker("scan", 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        sender = RunSender(EntryLogReader(log_on(tmp_path), open_logs=2), worker, can_share=True)
        monkeypatch.setattr(RealDisk, "share", fail)
        with pytest.raises(raised, match=told):
            await sender.share(1, FRAME, here)
        assert sender.unreadable_runs == unreadable
    await worker.aclose()


async def test_a_connection_that_is_full_takes_nothing_and_no_descriptor_is_lost(tmp_path: Path) -> None:
    worker = Ports().new_worker("scan", 1)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        here.setblocking(False)
        sender = RunSender(EntryLogReader(log_on(tmp_path), open_logs=2), worker, can_share=True)
        while True:
            try:
                here.send(bytes(1 << 16))
            except BlockingIOError:
                break
        before = os.listdir("/proc/self/fd")
        assert not await sender.share(1, FRAME, here)
        assert os.listdir("/proc/self/fd") == before
        there.setblocking(False)
        with suppress(BlockingIOError):
            while there.recv(1 << 20):
                pass
        assert await sender.share(1, FRAME, here)
        assert there.recv(100) == FRAME
    await worker.aclose()


class Peer:
    """A connection, as far as its other end's user goes."""

    def __init__(self, user: int) -> None:
        self._user = user

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return b"".join(number.to_bytes(4, "little") for number in (4711, self._user, 0))[:size]


@pytest.mark.parametrize(
    ("bookie", "peer", "may"), [(1000, 1000, True), (1000, 0, True), (1000, 1001, False), (0, 1000, False), (65534, 65534, False)]
)
def test_a_log_is_for_the_bookies_own_user_and_root(bookie: int, peer: int, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of "nobody" there may be several users in one system: each number that a container has no name for looks like it."""
    monkeypatch.setattr(os, "geteuid", lambda: bookie)
    assert _may_read_logs(Peer(peer)) is may  # type: ignore[arg-type]


async def assert_nobody_listens_on_machine(bookie: Bookie) -> None:
    server = ScanServer(bookie, "127.0.0.1", 0, Ports())
    await server.start()
    with socket.socket(socket.AF_UNIX) as nobody, pytest.raises(ConnectionRefusedError):
        nobody.connect(local_scan_address(server.token))
    await server.aclose()


@pytest.mark.parametrize("why_not", ["the setting", "the disk"])
async def test_where_logs_are_not_shared_there_is_no_such_socket(why_not: str, tmp_path: Path) -> None:
    on_disk = why_not == "the setting"
    settings = small_settings(share_logs=not on_disk)
    disk = RealDisk(tmp_path) if on_disk else None
    async with Machine(settings=settings, disk=disk).bookie() as bookie:  # type: ignore[arg-type]
        await assert_nobody_listens_on_machine(bookie)


async def test_no_log_is_given_away_where_tickets_are_judged(tmp_path: Path) -> None:
    """It has the entries of other ledgers, too."""
    async with Machine(settings=small_settings(), disk=RealDisk(tmp_path)).bookie() as bookie:  # type: ignore[arg-type]
        bookie.authorize_reads(accept_every_ticket)
        assert bookie.runs.can_share
        late = ScanServer(bookie, "127.0.0.1", 0, Ports())
        await late.start()
        bookie.authorize_reads(lambda *_: Status.OK)
        with socket.socket(socket.AF_UNIX) as reader:
            reader.setblocking(False)
            await asyncio.get_running_loop().sock_connect(reader, local_scan_address(late.token))
            assert await asyncio.get_running_loop().sock_recv(reader, 1) == b""
        await late.aclose()
        await assert_nobody_listens_on_machine(bookie)
