"""A TLS port that counts connections before their handshake and logs the reason of every failed handshake.

    accept ──► admit? ──► handshake, in a task of its own ──► the protocol is created
                  └─► closed at once        └─► failed: logged once in a while, by address and reason

asyncio's own servers are not used: they know an address only after the handshake, and report no failed handshakes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cepheid_ports import RefusalLog, TaskOwner, host_port
from cepheid_security.handshakes import failure_of, is_refusal

log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.5  # after an operating system error, such as too many open files
P = TypeVar("P", bound=Hashable)  # the place that an admitted connection gets


class TlsAcceptor(Generic[P]):
    """A TLS port. Call `start` and `aclose` once. It owns the non-blocking socket `listening`. `context` returns the context of
    the next connection.

    `admit` gets the address of a new connection. It returns a place, with which `make` is called after the handshake, or None to
    close the connection. `on_failed` gets the place of a failed handshake. `plain_hint` says where clients without TLS should
    connect. `on_refused` gets the address and the reason of each refused handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: Callable[[], ssl.SSLContext],
        *,
        handshake_timeout_s: float,
        admit: Callable[[str], P | None],
        make: Callable[[P], asyncio.Protocol],
        on_failed: Callable[[P], None],
        refusals: RefusalLog,
        plain_hint: Callable[[], str],
        on_refused: Callable[[str, str], None] = lambda _peer, _reason: None,
        on_broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._listening = listening
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._admit = admit
        self._make = make
        self._on_failed = on_failed
        self._refusals = refusals
        self._plain_hint = plain_hint
        self._on_refused = on_refused
        self._tasks = TaskOwner("tls-port", on_broken)
        self._under_way: dict[P, asyncio.Task[None]] = {}
        self.failed = 0
        """Number of failed handshakes."""
        self.port = int(listening.getsockname()[1])

    def __repr__(self) -> str:
        return f"<TlsAcceptor port {self.port}, {self.failed} failed>"

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def stop_accepting(self) -> None:
        """Close the port. Open connections and handshakes continue. Idempotent."""
        if self._listening.fileno() < 0:
            return
        # Before the close: another file may get this descriptor's number right after it.
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()

    def cancel(self, place: P) -> None:
        """Cancel the handshake of the connection with this place, if it is not over."""
        if (task := self._under_way.get(place)) is not None:
            task.cancel()

    async def aclose(self) -> None:
        """Close the port and the connections whose handshake is not over."""
        self.stop_accepting()
        await self._tasks.aclose()

    def _accept(self) -> None:
        """Accept a connection. A callback, since a task cancelled right after accepting would leave the connection open."""
        try:
            accepted, address = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client disconnected, or another process accepted the connection
        except OSError as error:
            log.warning("connection.not_accepted", extra={"port": self.port, "error": str(error)})
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        accepted.setblocking(False)
        host = str(address[0])
        place = self._admit(host)
        if place is None:
            accepted.close()
            return
        handshake = _Handshake(accepted, place)
        task = self._tasks.start(self._shake_hands(handshake, host, int(address[1])), name="handshake")
        self._under_way[place] = task
        task.add_done_callback(lambda _: self._on_ended(handshake))

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:  # else it was closed meanwhile
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _on_ended(self, handshake: _Handshake[P]) -> None:
        """Clean up after a handshake, including one whose task was cancelled before its first step."""
        self._under_way.pop(handshake.place, None)
        if not handshake.begun:
            handshake.accepted.close()
        if not handshake.made:
            self._on_failed(handshake.place)

    async def _shake_hands(self, handshake: _Handshake[P], host: str, port: int) -> None:
        def make() -> asyncio.Protocol:
            handshake.made = True
            return self._make(handshake.place)

        arriving = _Arriving(make)
        context = self._context()
        handshake.begun = True
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: arriving, handshake.accepted, ssl=context, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # errors of TLS and of the operating system, and the timeout
            self.failed += 1
            reason = failure_of(error, self._handshake_timeout_s, self._plain_hint())
            self._refusals.note(
                "tls.handshake_failed", (host, reason), level=logging.WARNING, peer=host, port=self.port, error=reason
            )
            if is_refusal(error):
                self._on_refused(host_port(host, port), reason)


class _Handshake(Generic[P]):
    """An accepted connection and the progress of its handshake."""

    def __init__(self, accepted: socket.socket, place: P) -> None:
        self.accepted = accepted
        self.place = place
        self.begun = False
        """Whether the event loop owns the socket, and closes it."""
        self.made = False
        """Whether the protocol owns the place."""


class _Arriving(asyncio.Protocol):
    """Creates the real protocol after the handshake, so that a failed one costs little memory."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
