"""The child process that writes: the same segments, and what happens when it, its parent or the source ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cepheid_decode import SchemaVersion
from cepheid_ports import ThreadWorker
from cepheid_rpc import EntryGroup
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.offload_process import OffloadProcessEndedError, OffloadProcessSettings, ProcessSegments
from cepheid_tiered.segments import Segments
from cepheid_wire import TopicName
from tests.decode.decode_reference import single
from tests.support import wait_until
from tests.tiered.s3_server import CREDENTIALS, credentials, s3_server
from tests.tiered.segment_samples import LEDGER_ID, TOPIC, avro, groups_of, read_range, source, stored, write

GROUPS = groups_of([single(random.Random(index).randbytes(30_000)) for index in range(400)], 20)


@asynccontextmanager
async def process_segments(
    schemas: Sequence[SchemaVersion] = (), settings: OffloadProcessSettings | None = None
) -> AsyncIterator[ProcessSegments]:
    worker = ThreadWorker("segments")

    async def known(_topic: TopicName) -> Sequence[SchemaVersion]:
        return schemas

    local = Segments(ObjectStores(worker), worker, known)
    segments = ProcessSegments(local, known, settings, cluster="c-1")
    try:
        yield segments
    finally:
        await segments.aclose()
        await local.aclose()
        await worker.aclose()


def file_size(url: str) -> int:
    return os.path.getsize(url.removeprefix("file://"))


def status_of(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


async def test_the_child_writes_and_verifies_what_this_process_reads(tmp_path: Path) -> None:
    async with process_segments([avro(("id", "long"))]) as segments:
        url, summary = await write(segments, GROUPS, f"file://{tmp_path}")
        assert summary.object_bytes == file_size(url)
        assert await segments.verify(url, LEDGER_ID) == summary
        reader = await segments.open(url, LEDGER_ID, 400)
        assert stored(await read_range(reader, 0, 399)) == stored(GROUPS)
        assert segments.child_pid is not None
        assert os.getpriority(os.PRIO_PROCESS, segments.child_pid) >= 10
        with pytest.raises(DamagedSegmentError, match="holds ledger 12, not 13"):
            await segments.verify(url, 13)
        await segments.delete(url)
        with pytest.raises(NoSuchSegmentError):
            await segments.verify(url, LEDGER_ID)


async def test_several_calls_at_a_time(tmp_path: Path) -> None:
    async with process_segments() as segments:
        written = await asyncio.gather(*(write(segments, GROUPS[:5], f"file://{tmp_path}") for _ in range(5)))
        assert len({url for url, _ in written}) == 5
        assert len({summary.crc32c for _, summary in written}) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_the_child_does_not_import_pandas(tmp_path: Path) -> None:
    async with process_segments() as segments:
        url, _ = await write(segments, GROUPS[:5], f"file://{tmp_path}")
        await segments.verify(url, LEDGER_ID)
        libraries = await asyncio.to_thread(Path(f"/proc/{segments.child_pid}/maps").read_text)
        assert "/pyarrow/" in libraries
        assert "/pandas/" not in libraries


async def test_a_child_killed_during_a_write_fails_it_and_the_next_write_has_a_new_one(tmp_path: Path) -> None:
    async with process_segments() as segments:
        first, _ = await write(segments, GROUPS[:1], f"file://{tmp_path}")  # makes the folder
        await segments.delete(first)

        async def killing() -> AsyncIterator[Sequence[EntryGroup]]:
            yield GROUPS[:10]
            assert segments.child_pid is not None
            os.kill(segments.child_pid, signal.SIGKILL)
            yield GROUPS[10:]

        url = segments.url_of(f"file://{tmp_path}", TOPIC, LEDGER_ID)
        with pytest.raises(OffloadProcessEndedError, match="ended \\(signal 9\\)") as caught:
            await segments.write(url, TOPIC, LEDGER_ID, killing())
        assert caught.value.retriable
        with pytest.raises(NoSuchSegmentError):
            await segments.open(url, LEDGER_ID, 400)
        await segments.delete(url)
        assert await asyncio.to_thread(lambda: [path for path in tmp_path.rglob("*") if path.is_file()]) == []
        _, summary = await write(segments, GROUPS, f"file://{tmp_path}")
        assert summary.entries == 400


@pytest.mark.parametrize("how", ["the source fails", "the call is cancelled"])
async def test_a_write_that_is_given_up_leaves_nothing(how: str, tmp_path: Path) -> None:
    sent = asyncio.Event()

    async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
        yield GROUPS
        sent.set()
        if how == "the source fails":
            raise LookupError("away")
        await asyncio.sleep(3600)

    async with process_segments() as segments:
        url = segments.url_of(f"file://{tmp_path}", TOPIC, LEDGER_ID)
        writing = asyncio.ensure_future(segments.write(url, TOPIC, LEDGER_ID, groups()))
        await sent.wait()
        if how == "the call is cancelled":
            writing.cancel()
        with pytest.raises((LookupError, asyncio.CancelledError)):
            await writing
        await wait_until(lambda: not [path for path in tmp_path.rglob("*") if path.is_file()], what="removal of the part")


async def test_an_object_that_is_complete_when_its_caller_has_gone_is_deleted(tmp_path: Path) -> None:
    """The child has read everything, and stores it, while the caller gives up: nobody would ever name the object."""
    sent = asyncio.Event()

    async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
        yield GROUPS
        await asyncio.sleep(0.5)  # the child has taken them by now
        assert segments.child_pid is not None
        os.kill(segments.child_pid, signal.SIGSTOP)  # it sees the end of the entries and that of its caller together
        sent.set()

    async with process_segments() as segments:
        for name in ("first", "other"):
            (tmp_path / name).mkdir()
        await write(segments, GROUPS[:1], f"file://{tmp_path}/first")
        url = segments.url_of(f"file://{tmp_path}/other", TOPIC, LEDGER_ID)
        writing = asyncio.ensure_future(segments.write(url, TOPIC, LEDGER_ID, groups()))
        await sent.wait()
        await asyncio.sleep(0.1)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert segments.child_pid is not None
        os.kill(segments.child_pid, signal.SIGCONT)
        assert (await write(segments, GROUPS[:1], f"file://{tmp_path}/first"))[1].entries == 20
        below = tmp_path / "other"
        await wait_until(lambda: not [path for path in below.rglob("*") if path.is_file()], what="deletion of the object")
        await asyncio.sleep(0.2)
        assert not [path for path in below.rglob("*") if path.is_file()]


async def test_a_child_that_hangs_is_killed_and_the_next_call_has_a_new_one(tmp_path: Path) -> None:
    async with process_segments() as segments:
        await write(segments, GROUPS[:1], f"file://{tmp_path}")  # it has loaded its libraries, which may take seconds
        patience, segments._settings = segments._settings, OffloadProcessSettings(answer_s=0.2)
        hanging = segments.child_pid
        assert hanging is not None
        assert segments._child is not None
        segments._child.is_watched = False
        os.kill(hanging, signal.SIGSTOP)
        url = segments.url_of(f"file://{tmp_path}", TOPIC, LEDGER_ID)
        with pytest.raises(OffloadProcessEndedError, match="signal 9"):
            await segments.write(url, TOPIC, LEDGER_ID, source(GROUPS))
        segments._settings = patience
        _, summary = await write(segments, GROUPS, f"file://{tmp_path}")
        assert summary.entries == 400
        assert segments.child_pid != hanging


async def test_the_source_is_held_back_by_the_child(tmp_path: Path) -> None:
    """A stopped child takes what fits into its socket, and no more."""
    taken = 0

    async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
        nonlocal taken
        for group in GROUPS:
            taken += group.size_bytes
            yield [group]

    async with process_segments() as segments:
        await write(segments, GROUPS[:1], f"file://{tmp_path}")
        assert segments.child_pid is not None
        os.kill(segments.child_pid, signal.SIGSTOP)
        url = segments.url_of(f"file://{tmp_path}", TOPIC, LEDGER_ID)
        writing = asyncio.ensure_future(segments.write(url, TOPIC, LEDGER_ID, groups()))
        await wait_until(lambda: taken > 0)
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert taken < 4_000_000
        os.kill(segments.child_pid, signal.SIGCONT)
        assert (await writing).entries == 400
        assert taken == len(stored(GROUPS))


async def test_memory_of_the_child_does_not_grow_with_the_ledger(tmp_path: Path) -> None:
    group = GROUPS[:5]

    async def many(times: int) -> AsyncIterator[Sequence[EntryGroup]]:
        from cepheid_rpc import encode_group

        tails = [bytes(payload) for each in group for payload in each.payloads()]
        for index in range(times):
            yield [encode_group(LEDGER_ID, index * len(tails), -1, 0, tails)]

    async with process_segments() as segments:
        peaks = []
        for times in (20, 100):
            url = segments.url_of(f"file://{tmp_path}", TOPIC, LEDGER_ID)
            await segments.write(url, TOPIC, LEDGER_ID, many(times))
            assert segments.child_pid is not None
            peaks.append(status_of(segments.child_pid, "VmHWM"))
        assert peaks[1] < peaks[0] + 100_000, f"{peaks} KB after 60 and 300 MB"
        assert peaks[1] < 450_000, f"{peaks[1]} KB"


PARENT = """
import asyncio, sys
from tests.tiered.test_offload_process import *

async def main(folder):
    async with process_segments() as segments:
        await write(segments, GROUPS[:1], f"file://{folder}")
        print(segments.child_pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(sys.argv[1]))
"""


async def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert parent.stdout is not None
    child_pid = int(await asyncio.to_thread(parent.stdout.readline))
    parent.kill()
    parent.communicate()

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{child_pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await wait_until(has_ended, what="the end of the child")


@pytest.mark.slow
async def test_credentials_reach_the_child_but_not_its_command_line() -> None:
    with credentials(), s3_server() as server:
        async with process_segments() as segments:
            url, summary = await write(segments, GROUPS, server.url("archive"))
            assert await segments.verify(url, LEDGER_ID) == summary
            command = await asyncio.to_thread(Path(f"/proc/{segments.child_pid}/cmdline").read_text)
            assert not [value for value in CREDENTIALS.values() if value in command]
            missing = segments.url_of(server.url("x", bucket="no-such-bucket"), TOPIC, LEDGER_ID)
            with pytest.raises(Exception, match="there is no bucket no-such-bucket"):
                await segments.write(missing, TOPIC, LEDGER_ID, source(GROUPS))
