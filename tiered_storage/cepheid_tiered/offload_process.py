"""A child process that decodes, compresses and uploads segments, so that publishing does not share its interpreter lock.

    broker                                               python -m cepheid_tiered.offload_process
      ProcessSegments.write ──► socket of this call ──►  Segments.write ──► object store
                            ◄── summary or error    ◄──
      control socket ─────────► a socket for each call;  its end is the end of the process

    call     │length│JSON│ then, for a write, │length│groups│ … │0│           answer   │length│JSON│
    after the answer to a successful write:     │length│taken│

Rule 1: entries that the child has not read yet stay in the broker's source: a socket holds little, and no queue follows it.
Rule 2: when the child ends, its calls fail with a retriable error, and the next call starts a new child. When the broker ends in
any way, the child aborts its uploads and ends.
Rule 3: a write belongs to the caller only once the caller has confirmed the answer. If its socket closes before that, the child
aborts the upload and deletes the object: the caller has given up or died, and may have deleted the object before it was complete.
Rule 4: a child that hangs is killed. While calls are in progress, each of its threads must answer pings.
Rule 5: credentials reach the child through the environment that it inherits, never on its command line.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import os
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from typing import Any

from cepheid_decode import SchemaVersion
from cepheid_ports import TaskOwner, ThreadWorker, share_one_arena
from cepheid_rpc import Buffer, EntryGroup, decode_group, encode_group_to
from cepheid_tiered.object_store import (
    BadStoreUrlError,
    NewerSegmentError,
    StoreRefusedError,
    StoreUnavailableError,
    UnusableNameError,
)
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.segment import (
    DamagedSegmentError,
    NoSuchSegmentError,
    SegmentError,
    SegmentNotWrittenError,
    SegmentReader,
    SegmentSummary,
)
from cepheid_tiered.segments import Schemas, Segments, SegmentSettings, close_source
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAX_HEAD_BYTES = 64 << 20  # of JSON, which holds the schemas
_SOCKET_BYTES = 1 << 20
_AHEAD_BYTES = 2 << 20
"""The child reads up to twice as much ahead while it compresses a row group."""
_TAKEN = b"taken"
_END_S = 10.0
_DROP_S = 30.0
"""Time limit for the child to abort and delete an upload that its caller has given up."""
_ERRORS: dict[str, type[SegmentError]] = {
    kind.__name__: kind
    for kind in (
        SegmentError,
        SegmentNotWrittenError,
        NoSuchSegmentError,
        DamagedSegmentError,
        NewerSegmentError,
        BadStoreUrlError,
        UnusableNameError,
        StoreRefusedError,
        StoreUnavailableError,
    )
}


class OffloadProcessEndedError(SegmentNotWrittenError):
    """The process that writes segments ended during a call."""

    hint = (
        "the next attempt starts a new one; if it happens again see the system's log for a process that was killed for its memory"
    )


@dataclass(frozen=True, slots=True)
class OffloadProcessSettings:
    nice: int = 10
    """How far the child's priority is below the broker's."""
    memory_bytes: int = 2 << 30
    """Limit of the child's memory: beyond it a write fails. Writing takes about 150 MB."""
    calls_at_once: int = 2
    """Writes and verifications at the same time; others wait. Each takes about 50 MB."""
    answer_s: float = 300.0
    """Time in which the child must answer a ping before it is killed. Long, because its priority is low, and on a busy machine one
    row group may keep one of its threads busy for a minute."""


class ProcessSegments:
    """A `SegmentStore` whose `write` and `verify` run in a child process. `local` does everything else in this process."""

    def __init__(
        self, local: Segments, schemas: Schemas, settings: OffloadProcessSettings | None = None, cluster: str = ""
    ) -> None:
        self._local = local
        self._schemas = schemas
        self._settings = settings or OffloadProcessSettings()
        self._cluster = cluster
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._watches = TaskOwner("offload-process")
        self._closed = False

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, or None."""
        return self._child.pid if self._child is not None and self._child.is_alive else None

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        return self._local.url_of(store_url, topic, ledger_id)

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentReader:
        return await self._local.open(url, ledger_id, entries, fresh=fresh)

    async def delete(self, url: str) -> None:
        await self._local.delete(url)

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        schemas = [_schema_to_json(schema) for schema in await self._schemas(topic)]
        head = {"call": "write", "url": url, "topic": str(topic), "ledger_id": ledger_id, "schemas": schemas}
        return await self._call(url, {**head, "cluster": self._cluster}, groups)

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        return await self._call(url, {"call": "verify", "url": url, "ledger_id": ledger_id}, None)

    async def aclose(self) -> None:
        """End the child. The store for reading is closed by its owner."""
        self._closed = True
        await self._watches.aclose()
        if self._child is not None:
            await self._child.aclose()

    async def _call(self, url: str, head: dict[str, Any], groups: AsyncIterator[Sequence[EntryGroup]] | None) -> SegmentSummary:
        child = await self._running_child()
        reader, writer = await child.connect()
        child.calls += 1
        if not child.is_watched:
            child.is_watched = True
            self._watches.start(self._watch(child), name=f"watch {child.pid}")
        answer = asyncio.ensure_future(_read_frame(reader))
        try:
            try:
                await _send(writer, [json.dumps(head).encode()])
                if groups is not None:
                    async for some in groups:
                        if answer.done():
                            break
                        parts: list[Buffer] = []
                        for group in some:
                            encode_group_to(parts, group)
                        await _send(writer, parts)
                    if not answer.done():
                        await _send(writer, [])
                found = json.loads(bytes(await answer))
                if groups is not None and "summary" in found:
                    await _send(writer, [_TAKEN])  # rule 3
            except (ConnectionError, asyncio.IncompleteReadError):
                status = await child.ended()
                raise OffloadProcessEndedError(f"the process that writes {url} ended ({status})", url=url) from None
            writer.close()  # after what was sent has left
        finally:
            child.calls -= 1
            answer.cancel()
            if not writer.is_closing():
                writer.transport.abort()  # makes the child abort unfinished work
            await close_source(groups)
        return _summary(found)

    async def _watch(self, child: _Child) -> None:
        """Ping the child while calls are in progress, and kill it if it does not answer (rule 4)."""
        limit_s = self._settings.answer_s
        while True:
            await asyncio.sleep(limit_s / 2)
            if not child.calls or not child.is_alive:
                break
            try:
                async with asyncio.timeout(limit_s):
                    await self._ping(child)
            except TimeoutError:
                hint = (
                    "its calls fail and are tried again with a new process; see whether the disk or mount of a file:// store hangs"
                )
                log.error("offload.process_hangs", extra={"pid": child.pid, "silent_s": limit_s, "hint": hint})
                child.kill()
            except (SegmentError, ConnectionError, asyncio.IncompleteReadError):
                break  # the child has ended, and its calls fail by themselves
        child.is_watched = False

    async def _ping(self, child: _Child) -> None:
        reader, writer = await child.connect()
        try:
            await _send(writer, [json.dumps({"call": "ping"}).encode()])
            await _read_frame(reader)
        finally:
            writer.transport.abort()

    async def _running_child(self) -> _Child:
        async with self._starting:
            if self._closed:
                raise SegmentError("this process stops offloading")
            if self._child is None or not self._child.is_alive:
                if self._child is not None:
                    await self._child.aclose()
                self._child = await _Child.start(self._settings)
            return self._child


class _Child:
    """A running child, and the control socket by which calls reach it."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._control.setblocking(False)  # a child that hangs must not stop this process
        self.calls = 0
        """Writes and verifications in progress."""
        self.is_watched = False

    @classmethod
    async def start(cls, settings: OffloadProcessSettings) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cepheid_tiered.offload_process",
                f"--control-fd={theirs.fileno()}",
                f"--nice={settings.nice}",
                f"--memory-bytes={settings.memory_bytes}",
                f"--calls={settings.calls_at_once}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C should reach only the broker, which then ends the child
                env={
                    "ARROW_DEFAULT_MEMORY_POOL": "jemalloc",  # it gives back what a row group took; the default keeps 15 MB more
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        log.info("offload.process_started", extra={"pid": process.pid})
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise OffloadProcessEndedError(f"the process that writes segments ended ({await self.ended()})") from None
        reader, writer = await asyncio.open_connection(sock=ours, limit=_SOCKET_BYTES)
        writer.transport.set_write_buffer_limits(high=_SOCKET_BYTES)
        return reader, writer

    async def ended(self) -> str:
        """Return how the child ended, for an error. Kill a child that closed a socket but runs on, since its state is unknown."""
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            await self.aclose()
        code = self._process.returncode or 0
        return f"signal {-code}" if code < 0 else f"status {code}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def aclose(self) -> None:
        self._control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()


# The child.


class _Server:
    def __init__(self, control: socket.socket, calls_at_once: int) -> None:
        self._control = control
        self._worker = ThreadWorker("segments")
        self._files = ThreadWorker("segment-files")
        self._objects = ObjectStores(self._files)
        self._room = asyncio.Semaphore(calls_at_once)
        self._calls = TaskOwner("segment-calls")
        self._parent_ended = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        loop.add_reader(self._control, self._take_call)
        await self._parent_ended.wait()
        loop.remove_reader(self._control)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S):
                await self._calls.aclose()

    def _take_call(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._parent_ended.set()
        for fd in fds:
            self._calls.start(self._serve_call(socket.socket(fileno=fd)), name=str(fd))

    async def _serve_call(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=_AHEAD_BYTES)
        unclaimed: str | None = None
        try:
            head = json.loads(bytes(await _read_frame(reader, _MAX_HEAD_BYTES)))
            if head["call"] == "ping":
                answer = await self._pong()
            else:
                async with self._room:
                    unclaimed = head["url"] if head["call"] == "write" else None
                    answer = await self._answer_while_wanted(head, reader)
            await _send(writer, [json.dumps(answer).encode()])
            if unclaimed is not None and "summary" in answer:
                await _read_frame(reader, len(_TAKEN))
            unclaimed = None
            # Read what the parent sends until it closes: closing with unread bytes could lose the answer.
            while await reader.read(_SOCKET_BYTES):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the parent gave up
        finally:
            writer.transport.abort()
            if unclaimed is not None:
                await self._drop(unclaimed)

    async def _pong(self) -> dict[str, Any]:
        """Answer a ping once every thread has run."""
        for worker in (self._worker, self._files):
            await worker.run(lambda: None)
        return {}

    async def _drop(self, url: str) -> None:
        """Delete the object of a write that its caller gave up (rule 3)."""
        try:
            async with asyncio.timeout(_DROP_S):
                await self._objects.delete(url)
        except (SegmentError, TimeoutError) as error:
            log.warning("segments.left_behind: %s: %s", url, error)

    async def _answer_while_wanted(self, head: dict[str, Any], reader: asyncio.StreamReader) -> dict[str, Any]:
        """Return the answer to a call. If the parent gives up, stop the work and raise ConnectionError."""
        has_all = asyncio.Event()  # of what the parent sends before the answer

        async def until_it_gives_up() -> None:
            await has_all.wait()
            await reader.read(1)

        answering = asyncio.ensure_future(self._answer(head, reader, has_all))
        given_up = asyncio.ensure_future(until_it_gives_up())
        try:
            await asyncio.wait([answering, given_up], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionError("the caller gave up")
            return answering.result()
        finally:
            for task in (answering, given_up):
                task.cancel()
            await asyncio.wait([answering, given_up])

    async def _answer(self, head: dict[str, Any], reader: asyncio.StreamReader, has_all: asyncio.Event) -> dict[str, Any]:
        schemas = tuple(_schema_from_json(schema) for schema in head.get("schemas", ()))

        async def known(_topic: TopicName) -> Sequence[SchemaVersion]:
            return schemas

        segments = Segments(self._objects, self._worker, known, SegmentSettings(cluster=head.get("cluster", "")))
        try:
            summary = await self._run(segments, head, reader, has_all)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise
        except SegmentError as error:
            known_kind = next(kind for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
            return {"error": known_kind.__name__, "message": str(error.args[0])}
        except Exception as error:
            log.exception("offload.call_failed")
            return {"error": SegmentNotWrittenError.__name__, "message": f"{head['url']} could not be written: {error!r}"}
        return {"summary": asdict(summary)}

    async def _run(
        self, segments: Segments, head: dict[str, Any], reader: asyncio.StreamReader, has_all: asyncio.Event
    ) -> SegmentSummary:
        url, ledger_id = head["url"], head["ledger_id"]
        if head["call"] == "write":
            return await segments.write(url, TopicName.parse(head["topic"]), ledger_id, _groups(reader, has_all))
        has_all.set()
        return await segments.verify(url, ledger_id)


async def _groups(reader: asyncio.StreamReader, has_all: asyncio.Event) -> AsyncIterator[Sequence[EntryGroup]]:
    """Yield the groups that the parent sends, and set `has_all` after the last one."""
    while len(view := memoryview(await _read_frame(reader))):
        groups, at = [], 0
        while at < len(view):
            group, at = decode_group(view, at)
            groups.append(group)
        yield groups
    has_all.set()


async def _serve(control_fd: int, calls_at_once: int) -> None:
    server = _Server(socket.socket(fileno=control_fd), calls_at_once)
    await server.serve()


class _NoPandas(MetaPathFinder):
    """Hides pandas from pyarrow, which imports it where it is installed. Writing does not need it, and it takes 37 MB."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the process that writes segments does not use pandas", name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write segments for a broker, which starts this process.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--calls", type=int, default=2)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    os.nice(arguments.nice)
    if arguments.memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = arguments.memory_bytes if most == resource.RLIM_INFINITY else min(arguments.memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    share_one_arena()
    sys.meta_path.insert(0, _NoPandas())
    asyncio.run(_serve(arguments.control_fd, arguments.calls))
    os._exit(0)  # without waiting for threads of libraries: the parent has ended


# Shared by both sides.


async def _read_frame(reader: asyncio.StreamReader, limit_bytes: int = (1 << 32) - 1) -> bytes:
    """Read one frame. Raises IncompleteReadError if the peer ends."""
    (size_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size_bytes > limit_bytes:
        raise ConnectionError(f"a frame of {size_bytes} bytes, {limit_bytes} are taken at most")
    return await reader.readexactly(size_bytes) if size_bytes else b""


async def _send(writer: asyncio.StreamWriter, parts: Sequence[Buffer]) -> None:
    writer.write(_LENGTH.pack(sum(memoryview(part).nbytes for part in parts)))
    for part in parts:
        writer.write(part)
        await writer.drain()


def _summary(answer: dict[str, Any]) -> SegmentSummary:
    if "summary" in answer:
        return SegmentSummary(**answer["summary"])
    raise _ERRORS.get(answer["error"], SegmentError)(answer["message"])


def _schema_to_json(schema: SchemaVersion) -> dict[str, Any]:
    return {
        "version": schema.version.hex(),
        "kind": schema.kind,
        "definition": base64.b64encode(schema.definition).decode(),
        "properties": dict(schema.properties),
    }


def _schema_from_json(fields: dict[str, Any]) -> SchemaVersion:
    definition = base64.b64decode(fields["definition"])
    return SchemaVersion(bytes.fromhex(fields["version"]), fields["kind"], definition, fields["properties"])


if __name__ == "__main__":
    main()
