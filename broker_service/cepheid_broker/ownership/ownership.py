"""Which broker serves a topic: what the rest of a broker asks, whoever decides.

    lookup ──► locate ──► Here | There(addresses)             open, change ──► require ──► NotOwnerError(There) unless it is here

Ownership is for order and speed. That nothing is lost or doubled when two brokers think they own a topic rests on fencing
(cepheid_managed_ledger/README.md): the one that opened it last wins, and the other one's appends fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from cepheid_broker.errors import BrokerError, NotAllowedError, ServiceNotReadyError
from cepheid_broker.ownership.bundles import Bundle
from cepheid_wire import PERSISTENT, NamespaceName, TopicName

# With these words C++ clients keep the connection, and everything else on it, when a lookup has to wait (protocol.md §7.2).
KEEPS_CONNECTION = "Failed to acquire ownership of the topic for now"


@dataclass(frozen=True, slots=True)
class Here:
    """This broker serves it."""


@dataclass(frozen=True, slots=True)
class There:
    """`addresses` by scheme: {"pulsar": "host:port", "http": "host:port"}, and "pulsar+ssl" and "https" where those ports are open.
    `chosen`: nobody owns it yet, and that broker is to take it when it is asked."""

    broker_id: str
    addresses: Mapping[str, str] = field(hash=False)
    chosen: bool = False

    @property
    def client_address(self) -> str:
        """Where clients connect to it, with or without TLS."""
        return self.addresses.get("pulsar") or self.addresses["pulsar+ssl"]

    def admin_url(self, *, over_tls: bool) -> str | None:
        """Of its admin API, with TLS if asked for and possible; None: it has none."""
        for scheme in ("https", "http") if over_tls else ("http", "https"):
            if (address := self.addresses.get(scheme)) is not None:
                return f"{scheme}://{address}"
        return None


Location = Here | There


@dataclass(frozen=True, slots=True)
class OwnershipFigures:
    brokers: int
    bundles_owned: int
    bundles_acquired: int
    bundles_lost: int
    """Not released: to a session that ended, or to another broker."""
    bundles_released: int
    """Given up in good order."""
    topics_moved: int
    """Handed over to other brokers open, with their clients."""
    hand_overs_failed: int
    sessions_lost: int
    lookups_waiting: int
    """Now, for a bundle whose owner is dead, gives it up or is not registered yet."""
    lookups_waited: int
    """Those that had to wait, so far."""
    peers_heard: int
    """Other brokers that answer this one's PINGs."""
    peers_challenged: int
    peers_gone: int
    """Challenges that were not answered."""


class NotOwnerError(ServiceNotReadyError):
    """Another broker serves it; clients look it up again."""

    hint = "look the topic up again; admin calls are sent on to its owner"

    def __init__(self, message: str, there: There, **facts: object) -> None:
        super().__init__(message, **facts)
        self.there = there


class BundleSplitError(ServiceNotReadyError):
    """The bundle was split: its topics are in other bundles of the namespace now."""

    hint = "ask again: the topic is looked for in the bundle that has it now"


class SplitRefusedError(BrokerError):
    """The bundle cannot be split there, or not in this cluster yet."""

    hint = "`GET /admin/v2/namespaces/T/N/bundles` shows the bundles"


class DestinationRefusedError(BrokerError):
    """The broker that a bundle was to be handed to cannot have it. The bundle stays where it is."""

    hint = "`cepheid brokers list` shows which brokers run and which are being drained"


def bundle_not_ready(bundle: Bundle, why: str) -> ServiceNotReadyError:
    return ServiceNotReadyError(f"bundle {bundle}: {why} ({KEEPS_CONNECTION})", bundle=str(bundle))


def health_topic(broker: str) -> TopicName:
    """What a broker publishes to when it is asked whether it is well: its own, and hidden from lists."""
    return TopicName(PERSISTENT, NamespaceName("pulsar", "system"), f"__health-{broker}")


class BundleUser(Protocol):
    """Whoever serves what is owned."""

    def drop_unowned(self) -> None:
        """Bundles were lost: what is open of them ends at once, nothing of it is acknowledged any more."""

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        """In good order, and what is being opened too. What fails is logged: the records are opened anew elsewhere."""

    async def hand_over(self, bundle: Bundle, heir: Any, reason: str) -> bool:
        """Close the bundle's open topics, have the `Heir` open them, and send their clients there. False: some are not there; what
        is left here is to be unloaded. Raises what `Heir` raises."""

    async def take_in(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Open topics that another broker has closed, and return those that are open."""


class Ownership(Protocol):
    """Of one broker."""

    user: BundleUser
    peers: Any
    """`PeerCalls`, to hand bundles over with; None: they are given up without a word to the next owner."""

    @property
    def is_shared(self) -> bool:
        """There may be other brokers."""

    @property
    def brokers(self) -> Mapping[str, Mapping[str, str]]:
        """All that are registered: addresses by id. Empty where there is no registration."""

    @property
    def leaving(self) -> Collection[str]:
        """Ids of the registered brokers that take no bundles: they are being drained."""

    @property
    def broker_id(self) -> str:
        """Of this broker; empty where there is no registration."""

    def owns(self, topic: TopicName) -> bool:
        """This broker serves it now. At once, and from what is known: for whoever is about to open it."""

    def keeps(self, topic: TopicName) -> bool:
        """No other broker has it: it is served here, or on its way out. For what has to end before it goes."""

    async def locate(self, topic: TopicName, *, authoritative: bool = False) -> Location:
        """Who serves it; what nobody owns is taken if it is this broker's to take, or `authoritative`: another broker chose this
        one. Raises ServiceNotReadyError (ask again), NamespaceNotFoundError."""

    async def would_own(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Those of these topics that this broker serves, or would be given if a client asked for them. Nothing is taken. Raises
        ServiceNotReadyError, NamespaceNotFoundError."""

    async def require(self, topic: TopicName) -> None:
        """It is served here when this returns. Raises NotOwnerError and as `locate`."""

    def owned_bundles(self) -> list[Bundle] | None:
        """None: all that there are."""

    async def locate_bundle(self, bundle: Bundle, *, authoritative: bool = False) -> Location:
        """As `locate`."""

    async def owner_of(self, bundle: Bundle) -> Location | None:
        """Who has it now; nothing is taken. None: nobody. Raises ServiceNotReadyError."""

    async def release(self, bundle: Bundle, *, to: str = "", reason: str = "its bundle is unloaded") -> None:
        """Its topics are closed in good order, and it goes to the broker `to`; without one to another, if there is. It goes on when
        the caller gives up. Raises ServiceNotReadyError, DestinationRefusedError: it is served on here."""

    async def split(self, bundle: Bundle, starts: Sequence[int], *, reason: str = "an operator split it") -> list[Bundle]:
        """Cut a bundle of this broker at the hashes `starts`, while its topics stay open; return the parts. Raises
        SplitRefusedError, ServiceNotReadyError, NamespaceNotFoundError."""

    async def on_hand_over(self, call: Any) -> list[TopicName]:
        """Another broker hands a bundle over to this one: `call` is a `HandOverCall`. Returns the topics that it asked for and that
        are open here now. Raises ServiceNotReadyError: not now."""

    @property
    def draining(self) -> bool:
        """Bundles are given away, and none is taken."""

    @property
    def bundles_held(self) -> int:
        """How many it has, on their way out as well; 0 where there is nothing to own."""

    def drain(self, *, force: bool = False) -> None:
        """Begin to give all bundles away; `force`: although no other broker can take them. Raises NotAllowedError."""

    def undrain(self) -> None:
        """Take bundles again. What was given away stays where it is."""

    def statistics(self) -> OwnershipFigures | None:
        """None where there is nothing to own."""

    async def release_all(self, limit_s: float = 0.0) -> None:
        """The broker stops: nothing is taken any more, and what is owned is handed over, within `limit_s`. What is left then is
        closed in good order, and goes to whoever is asked for it next."""

    async def aclose(self) -> None: ...


class SoleOwnership:
    """There is one broker."""

    is_shared = False
    broker_id = ""
    brokers: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    leaving: Collection[str] = ()
    user: BundleUser
    peers: Any = None
    draining = False
    bundles_held = 0

    def __repr__(self) -> str:
        return "<SoleOwnership>"

    def owns(self, topic: TopicName) -> bool:
        return True

    def keeps(self, topic: TopicName) -> bool:
        return True

    async def locate(self, topic: TopicName, *, authoritative: bool = False) -> Location:
        return Here()

    async def would_own(self, topics: Sequence[TopicName]) -> list[TopicName]:
        return list(topics)

    async def require(self, topic: TopicName) -> None:
        return

    def owned_bundles(self) -> list[Bundle] | None:
        return None

    async def locate_bundle(self, bundle: Bundle, *, authoritative: bool = False) -> Location:
        return Here()

    async def owner_of(self, bundle: Bundle) -> Location | None:
        return Here()

    async def release(self, bundle: Bundle, *, to: str = "", reason: str = "its bundle is unloaded") -> None:
        await self.user.unload_bundle(bundle, reason)

    async def split(self, bundle: Bundle, starts: Sequence[int], *, reason: str = "an operator split it") -> list[Bundle]:
        raise SplitRefusedError(f"bundle {bundle}: the only broker of a cluster has all bundles, and splits none")

    async def on_hand_over(self, call: Any) -> list[TopicName]:
        raise ServiceNotReadyError("this broker is the only one of its cluster: it takes no bundles from others")

    def drain(self, *, force: bool = False) -> None:
        raise NotAllowedError("this broker is the only one of its cluster: no other broker can take its topics")

    def undrain(self) -> None:
        return

    def statistics(self) -> OwnershipFigures | None:
        return None

    async def release_all(self, limit_s: float = 0.0) -> None:
        return

    async def aclose(self) -> None:
        return
