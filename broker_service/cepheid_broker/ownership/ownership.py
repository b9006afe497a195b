"""Which broker serves a topic: the interface that the rest of a broker uses.

    lookup ──► locate ──► Here | There(addresses)             open, change ──► require ──► NotOwnerError(There) unless it is here

Ownership is for order and speed. When two brokers believe that they own a topic, fencing prevents loss and duplication
(cepheid_managed_ledger/README.md): the broker that opened the topic last wins, and the other's appends fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from cepheid_broker.errors import BrokerError, NotAllowedError, ServiceNotReadyError
from cepheid_broker.ownership.bundles import Bundle
from cepheid_wire import PERSISTENT, NamespaceName, TopicName

# An error with these words lets C++ clients keep the connection, and all else on it, when a lookup has to wait (protocol.md §7.2).
KEEPS_CONNECTION = "Failed to acquire ownership of the topic for now"


@dataclass(frozen=True, slots=True)
class Here:
    """The location of a topic or bundle that this broker serves."""


@dataclass(frozen=True, slots=True)
class There:
    """Another broker, and its addresses by scheme: {"pulsar": "host:port", "http": "host:port"}, with "pulsar+ssl" and "https" if
    those ports are open. `chosen`: the bundle has no owner yet, and that broker should acquire it when a client asks."""

    broker_id: str
    addresses: Mapping[str, str] = field(hash=False)
    chosen: bool = False

    @property
    def client_address(self) -> str:
        """Address that clients connect to: without TLS where that is offered, else with TLS."""
        return self.addresses.get("pulsar") or self.addresses["pulsar+ssl"]

    def admin_url(self, *, over_tls: bool) -> str | None:
        """Return the URL of the broker's admin API, with TLS if asked for and possible; None if it has no admin API."""
        for scheme in ("https", "http") if over_tls else ("http", "https"):
            if (address := self.addresses.get(scheme)) is not None:
                return f"{scheme}://{address}"
        return None


Location = Here | There


@dataclass(frozen=True, slots=True)
class OwnershipFigures:
    """Counts of brokers, bundles and lookups as one broker sees them. Totals are since it started."""

    brokers: int
    bundles_owned: int
    bundles_acquired: int
    bundles_lost: int
    """Bundles lost without a release: their session ended, or another broker took them."""
    bundles_released: int
    """Bundles released in good order."""
    topics_moved: int
    """Topics handed over to other brokers while open, with their clients."""
    hand_overs_failed: int
    sessions_lost: int
    lookups_waiting: int
    """Lookups that wait now because the bundle's owner is dead, is releasing it or is not registered yet."""
    lookups_waited: int
    """Lookups that had to wait."""
    peers_heard: int
    """Other brokers that answer this one's PINGs now."""
    peers_challenged: int
    peers_gone: int
    """Challenges that other brokers did not answer."""


class NotOwnerError(ServiceNotReadyError):
    """Another broker serves the topic. Clients look it up again."""

    hint = "look the topic up again; admin calls are sent on to its owner"

    def __init__(self, message: str, there: There, **facts: object) -> None:
        super().__init__(message, **facts)
        self.there = there


class BundleSplitError(ServiceNotReadyError):
    """The bundle was split, and its topics are now in other bundles of the namespace."""

    hint = "ask again: the topic is looked for in the bundle that has it now"


class SplitRefusedError(BrokerError):
    """The bundle cannot be split at that point, or not in this cluster yet."""

    hint = "`GET /admin/v2/namespaces/T/N/bundles` shows the bundles"


class DestinationRefusedError(BrokerError):
    """The named broker cannot take the bundle. The bundle stays with its owner."""

    hint = "`cepheid brokers list` shows which brokers run and which are being drained"


def bundle_not_ready(bundle: Bundle, why: str) -> ServiceNotReadyError:
    return ServiceNotReadyError(f"bundle {bundle}: {why} ({KEEPS_CONNECTION})", bundle=str(bundle))


def health_topic(broker: str) -> TopicName:
    """Return the topic that a broker publishes to in its health check. It belongs to that broker and is hidden from lists."""
    return TopicName(PERSISTENT, NamespaceName("pulsar", "system"), f"__health-{broker}")


class BundleUser(Protocol):
    """The part of a broker that serves the topics of its bundles."""

    def drop_unowned(self) -> None:
        """Drop the open topics of lost bundles at once. Nothing of them is acknowledged any more."""

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        """Close the bundle's topics in good order, including those being opened. Log failures: another broker opens them again."""

    async def hand_over(self, bundle: Bundle, heir: Any, reason: str) -> bool:
        """Close the bundle's open topics, have the `Heir` open them, and redirect their clients. Return False if some were not
        moved: unload what is left here. Raises what `Heir` raises."""

    async def take_in(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Open topics that another broker has closed, and return those that are open."""


class Ownership(Protocol):
    """The bundles of one broker, and the owners of all others."""

    user: BundleUser
    peers: Any
    """`PeerCalls` for handing bundles over; None if bundles are released without notifying the next owner."""

    @property
    def is_shared(self) -> bool:
        """Whether the cluster may have other brokers."""

    @property
    def brokers(self) -> Mapping[str, Mapping[str, str]]:
        """Addresses of all registered brokers by id; empty if brokers do not register."""

    @property
    def leaving(self) -> Collection[str]:
        """Ids of the registered brokers that take no bundles because they are draining."""

    @property
    def broker_id(self) -> str:
        """Id of this broker; empty if brokers do not register."""

    def owns(self, topic: TopicName) -> bool:
        """Return whether this broker serves the topic now, from what it knows and without I/O. Ask before opening a topic."""

    def keeps(self, topic: TopicName) -> bool:
        """Return whether no other broker has the topic yet: it is served here or being released. For work that ends with it."""

    async def locate(self, topic: TopicName, *, authoritative: bool = False) -> Location:
        """Return the broker that serves the topic. A bundle without an owner is acquired if this broker is the choice for it, or if
        `authoritative`: another broker chose this one. Raises ServiceNotReadyError (ask again), NamespaceNotFoundError."""

    async def would_own(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Return those topics that this broker serves, or would acquire if a client asked for them. Acquires nothing. Raises
        ServiceNotReadyError, NamespaceNotFoundError."""

    async def require(self, topic: TopicName) -> None:
        """Return once this broker serves the topic. Raises NotOwnerError, and what `locate` raises."""

    def owned_bundles(self) -> list[Bundle] | None:
        """Return the bundles of this broker; None means all bundles of the cluster."""

    async def locate_bundle(self, bundle: Bundle, *, authoritative: bool = False) -> Location:
        """Return the broker that serves the bundle, as `locate` does for a topic."""

    async def owner_of(self, bundle: Bundle) -> Location | None:
        """Return the current owner of the bundle, or None. Acquires nothing. Raises ServiceNotReadyError."""

    async def release(self, bundle: Bundle, *, to: str = "", reason: str = "its bundle is unloaded") -> None:
        """Close the bundle's topics in good order and hand it to the broker `to`, or to any other. Continues if the caller is
        cancelled. Raises ServiceNotReadyError, DestinationRefusedError: the bundle is still served here."""

    async def split(self, bundle: Bundle, starts: Sequence[int], *, reason: str = "an operator split it") -> list[Bundle]:
        """Cut a bundle of this broker at the hashes `starts`, while its topics stay open; return the parts. Raises
        SplitRefusedError, ServiceNotReadyError, NamespaceNotFoundError."""

    async def on_hand_over(self, call: Any) -> list[TopicName]:
        """Carry out a step of another broker's hand-over to this one; `call` is a `HandOverCall`. Return the requested topics that
        are now open here. Raises ServiceNotReadyError if this broker cannot take the bundle now."""

    @property
    def draining(self) -> bool:
        """Whether this broker gives its bundles away and takes none."""

    @property
    def bundles_held(self) -> int:
        """Number of bundles here, including those being released; 0 in a cluster of one broker."""

    def drain(self, *, force: bool = False) -> None:
        """Begin to give all bundles away; with `force` even if no other broker can take them. Raises NotAllowedError."""

    def undrain(self) -> None:
        """Take bundles again. Bundles that were given away stay with their new owners."""

    def statistics(self) -> OwnershipFigures | None:
        """Return counts of bundles and lookups; None in a cluster of one broker."""

    async def release_all(self, limit_s: float = 0.0) -> None:
        """Stop taking bundles, and hand over those owned within `limit_s`, because the broker stops. Close the rest in good order:
        the next broker that a client asks takes them."""

    async def aclose(self) -> None: ...


class SoleOwnership:
    """`Ownership` in a cluster of one broker, which serves every topic."""

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
