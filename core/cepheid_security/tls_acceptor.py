"""A port with TLS: connections are counted before their handshake, and every failed handshake has a reason in the log.

    accept ──► admit? ──► handshake, in a task of its own ──► the protocol is made
                  └─► closed at once        └─► failed: logged once in a while, by address and reason

The servers of asyncio do not serve here: they know an address only after the handshake, and report no handshake that fails.
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

_ACCEPT_PAUSE_S = 0.5  # after an error of the system, such as too many open files
P = TypeVar("P", bound=Hashable)  # what a connection is given when it is admitted


class TlsAcceptor(Generic[P]):
    """`start` once, `aclose` once. It owns `listening`, which must not block. `context` gives the context of the next connection.

    `admit` gets the address of a new connection. It returns what `make` is called with after the handshake, or None: the connection
    is closed. `on_failed` gets it back when there is no handshake. `plain_hint` says where clients without TLS belong.
    `on_refused` gets the address and the reason of each handshake that was refused.
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
        """Handshakes that failed."""
        self.port = int(listening.getsockname()[1])

    def __repr__(self) -> str:
        return f"<TlsAcceptor port {self.port}, {self.failed} failed>"

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def stop_accepting(self) -> None:
        """Close the port. Connections that are open, and handshakes under way, go on. Idempotent."""
        if self._listening.fileno() < 0:
            return
        # Before the close: the number of this file may soon be that of another one.
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()

    def cancel(self, place: P) -> None:
        """End the handshake of the connection that was admitted with `place`, if it is not over."""
        if (task := self._under_way.get(place)) is not None:
            task.cancel()

    async def aclose(self) -> None:
        """Close the port, and the connections whose handshake is not over."""
        self.stop_accepting()
        await self._tasks.aclose()

    def _accept(self) -> None:
        """Not a task: one that is cancelled when it has just accepted would lose the connection, and leave it open."""
        try:
            accepted, address = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has gone away, or another process has accepted it
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
        """Also of a task that was cancelled before its first step."""
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
        except OSError as error:  # that of TLS, of the system, and the timeout
            self.failed += 1
            reason = failure_of(error, self._handshake_timeout_s, self._plain_hint())
            self._refusals.note(
                "tls.handshake_failed", (host, reason), level=logging.WARNING, peer=host, port=self.port, error=reason
            )
            if is_refusal(error):
                self._on_refused(host_port(host, port), reason)


class _Handshake(Generic[P]):
    """A connection that was accepted, and what has become of it."""

    def __init__(self, accepted: socket.socket, place: P) -> None:
        self.accepted = accepted
        self.place = place
        self.begun = False
        """The event loop owns the socket from then on, and closes it."""
        self.made = False
        """The protocol owns the place from then on."""


class _Arriving(asyncio.Protocol):
    """Makes the real protocol when the handshake is over: one that fails costs little memory."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
