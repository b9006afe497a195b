"""One end of a connection of the simulated network, and the two streams of bytes between its ends.

    write ──► buffer of the process ──room?──► Stream: in flight, in order ──► unread, in the receiver's kernel ──► data_received
                 └ full: pause_writing             └ held by partitions            └ the receiver does not read: no room

Rules (those of TCP and of asyncio's transports):
1. Inside a stream nothing is lost, doubled or overtaken. What breaks a connection breaks it for good.
2. Bytes in flight and unread fill a window; what does not fit waits in the sender's process, which hears pause_writing.
3. What is in the kernel goes on without its process: bytes of one that crashed arrive, bytes for one that is paused wait.
4. An end that hears nothing is told nothing: a half-open connection is found out by timeouts and keepalives alone.
5. Bytes for an end that is gone are answered with a reset, if its machine is up.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tests.simulation.world.node import Node

if TYPE_CHECKING:
    from tests.simulation.world.sim_sockets import Sockets

_SPACING_S = 1e-9
_HIGH_BYTES = 64 << 10  # asyncio's own


class Mark(enum.Enum):
    """What is in flight beside bytes."""

    OPEN = "the server's machine took the connection"
    END = "nothing more comes"
    RESET = "the connection is broken"


Segment = list[bytes] | Mark


class Stream:
    """One direction of a connection."""

    def __init__(self, sockets: Sockets, sender: SimTransport, receiver: SimTransport, server: str) -> None:
        self.sender = sender
        self.receiver = receiver
        self.silent = False  # nothing that is sent from now on arrives
        self.unread_bytes = 0  # in flight, and in the receiver's kernel
        self._sockets = sockets
        self._server = server
        self._reset = f"connection reset {'after' if sender.machine == server else 'before'} the server acted"
        self._in_flight: deque[Segment] = deque()
        self._ended = False
        self._last_sent_s = self._last_arrival_s = 0.0

    @property
    def room_bytes(self) -> int:
        return self._sockets.window_bytes - self.unread_bytes

    def send(self, data: bytes) -> None:
        """No more than there is room for."""
        if self._ended:
            return
        self.unread_bytes += len(data)
        if self.silent:
            return
        if self._in_flight and self._last_sent_s == self._sockets.loop.time():
            last = self._in_flight[-1]  # what is written in one moment travels together
            if isinstance(last, list):
                last.append(data)
                return
        if self._breaks():
            return
        self._launch([data])

    def mark(self, mark: Mark) -> None:
        """The last thing that is sent, but for OPEN, which is the first."""
        if not self._ended:
            self._ended = mark is not Mark.OPEN
            if not self.silent:
                self._launch(mark)

    def free(self, size_bytes: int) -> None:
        self.unread_bytes -= size_bytes
        self.sender.on_room()

    def _breaks(self) -> bool:
        plan, back = self._sockets.network.plan, self.receiver.out
        if plan.strikes("connection half-open", plan.faults.loss):
            self.silent = True
            if plan.random.random() < 0.5:
                back.silent = True
            return True
        if plan.strikes(self._reset, plan.faults.reset):
            self.mark(Mark.RESET)
            back.mark(Mark.RESET)
            return True
        return False

    def _launch(self, segment: Segment) -> None:
        loop = self._sockets.loop
        now = self._last_sent_s = loop.time()
        delay_s = self._sockets.network.delay_s(self._server)
        when = self._last_arrival_s = max(now + delay_s, self._last_arrival_s + _SPACING_S)
        self._in_flight.append(segment)
        loop.call_at(when, self._arrive, context=self._sockets.context)

    def _arrive(self) -> None:
        self._sockets.network.pass_wire(self.sender.machine, self.receiver.machine, "bytes", self._pass)

    def _pass(self) -> None:
        """Each segment once: those that a partition held come out in their order."""
        self.receiver.on_segment(self._in_flight.popleft())


class SimTransport(asyncio.Transport):
    """`gone`: its process has closed it, was told of its end, or crashed."""

    out: Stream
    protocol: Any  # set when its process hears of the connection

    def __init__(
        self,
        sockets: Sockets,
        name: tuple[str, int],
        peer_name: tuple[str, int],
        context: contextvars.Context,
        node: Node | None,
        on_open: Callable[[SimTransport], None],
    ) -> None:
        super().__init__({"sockname": name, "peername": peer_name})
        self.machine = name[0]
        self.node = node
        self.opened = self.gone = False
        self._sockets = sockets
        self._context = context
        self._on_open = on_open
        self._closing = self._ending = False
        self._reading = False  # from `open` on
        self._asleep = False  # its process is busy elsewhere, as it seems
        self._read_due = self._drain_due = self._left_unread = False
        self._unread: deque[Segment] = deque()
        self._buffer: deque[bytes] = deque()
        self._buffer_bytes = 0
        self._high_bytes, self._low_bytes = _HIGH_BYTES, _HIGH_BYTES // 4
        self._writing_paused = False
        sockets.register(self)

    def __repr__(self) -> str:
        end = ", gone" if self.gone else ", closing" if self._closing else ""
        return f"<SimTransport {self.get_extra_info('sockname')} to {self.get_extra_info('peername')}{end}>"

    # What protocols call

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol  # type: ignore[no-any-return]

    def is_closing(self) -> bool:
        """Also when the world has ended: what is collected then would complain that it was not closed."""
        return self._closing or self._sockets.loop.is_closed()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._read_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = _HIGH_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def get_write_buffer_size(self) -> int:
        return self._buffer_bytes

    def can_write_eof(self) -> bool:
        return False

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: Any) -> None:
        if self._closing or self.gone:
            return
        if self._unread and self._unread[-1] is Mark.RESET:  # who does not read hears of it by writing
            self._end(_reset_error())
            return
        data = bytes(data)  # a copy, of what is not bytes: the caller may use its buffer again
        room_bytes = 0 if self._buffer else self.out.room_bytes
        if len(data) <= room_bytes:
            self.out.send(data)
            return
        if room_bytes > 0:
            self.out.send(data[:room_bytes])
            data = data[room_bytes:]
        self._buffer.append(data)
        self._buffer_bytes += len(data)
        if self._buffer_bytes > self._high_bytes and not self._writing_paused:
            self._writing_paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        """What was written is sent; nothing more is read."""
        if not self._closing:
            self._closing = True
            self._leave_unread()
            if not self._buffer:
                self._end(None)

    def abort(self) -> None:
        self._end(None)

    # What the network does

    def open(self, protocol: asyncio.BaseProtocol) -> None:
        """A step of its process: it hears of the connection, and reads."""
        self.opened = True
        self.protocol = protocol
        protocol.connection_made(self)
        if not self._closing:
            self.resume_reading()

    def on_segment(self, segment: Segment) -> None:
        """A step of the network: the machine has it, its process hears of it when it gets to it."""
        if self.gone:
            if segment not in (Mark.END, Mark.RESET) and self.machine not in self._sockets.dark:
                self.out.mark(Mark.RESET)  # rule 5
        elif segment is Mark.OPEN:
            self._sockets.loop.call_soon(self._on_open, self, context=self._context)
        elif self._closing:
            self._left_unread |= isinstance(segment, list)
            if segment is Mark.RESET:
                self._end(_reset_error())
        else:
            self._unread.append(segment)
            self._read_soon()

    def on_room(self) -> None:
        if self._buffer and not self._drain_due:
            self._drain_due = True
            self._sockets.loop.call_soon(self._drain, context=self._context)

    def vanish(self) -> None:
        """Its machine is gone, and says nothing to the other end."""
        self.gone = self._closing = True
        self._sockets.forget(self)

    def break_off(self) -> None:
        """Its process is gone: the kernel closes what it left open, and what was sent before arrives before."""
        self._leave_unread()
        if hasattr(self, "out"):  # else its request for a connection has not arrived, and nobody is at the other end
            self.out.mark(Mark.RESET if self._left_unread else Mark.END)
        self.vanish()

    def reset(self) -> None:
        """By something between the two ends."""
        if self.opened:
            self.out.receiver.out.mark(Mark.RESET)
            self.out.mark(Mark.RESET)

    def sleep(self, duration_s: float) -> None:
        """Its process reads nothing for so long."""
        self._asleep = True
        self._sockets.loop.call_later(duration_s, self._wake, context=self._context)

    # Steps of its process

    def _wake(self) -> None:
        self._asleep = False
        self._read_soon()

    def _read_soon(self) -> None:
        if self._unread and self._reading and not (self._read_due or self._asleep or self._closing):
            self._read_due = True
            self._sockets.loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._read_due = False
        if not self._unread or not self._reading or self._closing:
            return
        plan = self._sockets.network.plan
        if plan.strikes("slow receiver", plan.faults.slow_receiver):
            self.sleep(plan.between(plan.faults.slow_receiver_s))
            return
        chunks: list[bytes] = []
        while self._unread and isinstance(self._unread[0], list):
            chunks += self._unread.popleft()
        if chunks:
            data = b"".join(chunks) if len(chunks) > 1 else chunks[0]
            if plan.strikes("bytes in pieces", plan.faults.pieces) and len(data) > 1:
                cut = plan.random.randrange(1, len(data))
                self._unread.appendleft([data[cut:]])
                data = data[:cut]
                self.sleep(plan.between(plan.faults.delay_s))
            self._incoming.free(len(data))
            self.protocol.data_received(data)
            self._read_soon()
        elif self._unread.popleft() is Mark.RESET:
            self._end(_reset_error())
        elif not self.protocol.eof_received():
            self.close()

    @property
    def _incoming(self) -> Stream:
        return self.out.receiver.out

    def _drain(self) -> None:
        self._drain_due = False
        if self.gone:
            return
        room_bytes = self.out.room_bytes
        while self._buffer and room_bytes > 0:
            data = self._buffer.popleft()
            if len(data) > room_bytes:
                self._buffer.appendleft(data[room_bytes:])
                data = data[:room_bytes]
            self._buffer_bytes -= len(data)
            room_bytes -= len(data)
            self.out.send(data)
        if self._writing_paused and self._buffer_bytes <= self._low_bytes:
            self._writing_paused = False
            self.protocol.resume_writing()
        if self._closing and not self._buffer:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Once: its process hears of it in its next step."""
        if self.gone or self._ending:
            return
        self._closing = self._ending = True
        self._buffer.clear()
        self._buffer_bytes = 0
        self._leave_unread()
        self._sockets.loop.call_soon(self._tell_end, error, context=self._context)

    def _leave_unread(self) -> None:
        """A kernel that throws bytes away resets the connection, instead of ending it."""
        self._left_unread |= any(isinstance(segment, list) for segment in self._unread)
        self._unread.clear()

    def _tell_end(self, error: Exception | None) -> None:
        self.gone = True
        self._sockets.forget(self)
        self.out.mark(Mark.RESET if self._left_unread else Mark.END)
        self.protocol.connection_lost(error)


def _reset_error() -> ConnectionResetError:
    return ConnectionResetError("the connection was reset by the peer")
