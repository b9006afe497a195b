"""Brokers that ask whose a topic is before they open it: real `BundleOwnership`s over simulated sessions.

    locate ──► Here ──► open, serve ──► fails, or the bundle is lost: dropped at once ──► locate …
           └──► There: not now                  └── now and then: released, to whoever is asked next

In a world without it brokers fight over topics instead: fencing alone must keep what is stored.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundles import Bundle, bundle_of, division_of
from cepheid_broker.ownership.ownership import Here
from cepheid_managed_ledger import ManagedLedger, ManagedLedgerFailedError, State
from cepheid_metadata import BundleHistory, BundleOwner, MemoryStore, NamespaceRecord, SessionState, keys, namespace_records
from cepheid_wire import TopicName
from tests.simulation.checks.history import History
from tests.simulation.workloads.ledgers import EXPECTED
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_store import SimTree

_BUNDLES = 4
_NOTICED_S = 1.5
"""How long after the end of its record a broker that runs and is connected may believe that it owns a bundle."""


_LOOK_S = 0.5
"""Between the look at the registration of a gone broker and the write that takes its bundle: it may come back in that time."""


class OpenTopics:
    """Of one process: implements `BundleUser` for managed ledgers."""

    def __init__(self) -> None:
        self.ownership: BundleOwnership | None = None
        self._open: dict[TopicName, ManagedLedger] = {}
        self._opened: dict[TopicName, ManagedLedger] = {}  # the last one, closed or not

    def add(self, topic: TopicName, managed_ledger: ManagedLedger) -> None:
        self._open[topic] = self._opened[topic] = managed_ledger

    def serves(self, bundle: Bundle) -> list[ManagedLedger]:
        """What takes appends."""
        return [ledger for topic, ledger in self._opened.items() if bundle.holds(topic) and ledger.state is State.OPEN]

    def drop_unowned(self) -> None:
        assert self.ownership is not None
        for topic, managed_ledger in list(self._open.items()):
            if not self.ownership.owns(topic):
                del self._open[topic]
                managed_ledger.fail(ManagedLedgerFailedError(f"{topic} is not ours any more", topic=str(topic)))

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        for topic, managed_ledger in list(self._open.items()):
            if bundle.holds(topic):
                self._open.pop(topic, None)
                await managed_ledger.aclose()


class ServedTopics:
    """Of one process that serves clients: what its managed ledgers say, whatever its `Topics` believe."""

    def __init__(self, broker: SimBroker, ownership: BundleOwnership) -> None:
        self.ownership = ownership
        self._managed_ledgers = broker.managed_ledgers

    def serves(self, bundle: Bundle) -> list[ManagedLedger]:
        return [
            ledger for topic, ledger in self._managed_ledgers.opened.items() if bundle.holds(topic) and ledger.state is State.OPEN
        ]


class OwnershipWorkload:
    def __init__(self, rng: random.Random, history: History, tree: SimTree) -> None:
        self._random = rng
        self._history = history
        self._tree = tree
        self._open: dict[str, OpenTopics] = {}  # by process
        self._served: dict[str, ServedTopics] = {}  # likewise, where clients are served
        history.on_release = self._check_released
        self._doubtful_since_s: dict[str, float] = {}

    async def found(self, topic: TopicName) -> None:
        """Its namespace."""
        noun = (topic.namespace.tenant, topic.namespace.local_name)
        await namespace_records(MemoryStore(self._tree)).create(noun, NamespaceRecord(bundles=_BUNDLES))

    async def run(self, broker: SimBroker) -> None:
        """A broker's ownership, for the life of its process."""
        opened = OpenTopics()
        ownership = opened.ownership = BundleOwnership(broker.store, broker.ports, timeout_s=5.0)
        ownership.user = opened
        while True:
            try:
                await ownership.start(broker.name, {"pulsar": broker.name})
                break
            except EXPECTED as error:
                self._history.note(f"{broker.process} cannot register: {error!r}")
                await asyncio.sleep(0.3)
        self._open[broker.process] = opened

    def on_served(self, broker: SimBroker) -> None:
        """It begins to serve clients."""
        ownership = broker.broker.ownership
        if isinstance(ownership, BundleOwnership):
            self._served[broker.process] = ServedTopics(broker, ownership)

    async def is_here(self, broker: SimBroker, topic: TopicName) -> bool:
        """Whether this broker is to serve it now. What nobody owns may be taken by this."""
        opened = self._open.get(broker.process)
        if opened is None or opened.ownership is None:
            return False
        self._history.did("look up")
        try:
            location = await opened.ownership.locate(topic, authoritative=self._random.random() < 0.1)
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot locate {topic}: {error}")
            return False
        return isinstance(location, Here) and opened.ownership.owns(topic)

    def on_open(self, broker: SimBroker, topic: TopicName, managed_ledger: ManagedLedger) -> None:
        """It may have been lost while it was being opened."""
        opened = self._open[broker.process]
        opened.add(topic, managed_ledger)
        opened.drop_unowned()

    async def give_up(self, broker: SimBroker, topic: TopicName) -> None:
        """In good order."""
        opened = self._open[broker.process]
        assert opened.ownership is not None
        self._history.did("release")
        try:
            await opened.ownership.release(await opened.ownership.bundle_of(topic))
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot release {topic}: {error}")

    def _check_released(self, key: str, process: str) -> None:
        """O1: a broker deletes its record. What it serves of the bundle was closed before: the next owner may begin at once.

        Not so where the bundle is split: its parts are the same broker's, and what is open stays open.
        """
        opened = self._served.get(process) or self._open.get(process)
        if opened is None or opened.ownership is None or self._was_split(key):
            return
        for bundle in opened.ownership.owned_bundles():
            if keys.bundle_key(*bundle.noun) == key:
                serves = opened.serves(bundle)
                self._history.check("O1", not serves, lambda serves=serves: f"{process} gives {key} away and serves {serves}")

    def _namespace_of(self, topic: TopicName) -> NamespaceRecord:
        key = keys.namespace_key(topic.namespace.tenant, topic.namespace.local_name)
        return NamespaceRecord.decode(self._tree.nodes[key].value, key)

    def _was_split(self, key: str) -> bool:
        """Whether the history of the bundle says so, which is written in the same step, before the record is deleted."""
        history_key = key.replace(keys.BUNDLES_KEY, keys.BUNDLE_HISTORIES_KEY, 1)
        node = self._tree.nodes.get(history_key)
        return node is not None and BundleHistory.decode(node.value, history_key).split_at is not None

    def owners(self, brokers: list[SimBroker], topic: TopicName) -> list[str]:
        """Who believes to own it, among those that run."""
        return [broker.process for broker in brokers if broker.node.alive and self._believes(broker, topic)]

    def _believes(self, broker: SimBroker, topic: TopicName) -> bool:
        opened = self._open.get(broker.process)
        return opened is not None and opened.ownership is not None and opened.ownership.owns(topic)

    def watch(self, brokers: list[SimBroker], topic: TopicName) -> None:
        """O1, now and again: who serves has the record, or hears of its loss at once."""
        division = division_of(self._namespace_of(topic))
        node = self._tree.nodes.get(keys.bundle_key(*bundle_of(topic, division).noun))
        record = None if node is None else BundleOwner.decode(node.value, "owner")
        now_s = self._history.now_s
        for broker in brokers:
            if not broker.node.alive or broker.node.paused or not self._believes(broker, topic):
                self._doubtful_since_s.pop(broker.process, None)
                continue
            suspended = broker.store.session_state is SessionState.SUSPENDED  # it goes on, and hears of nothing
            has_record = record is not None and record.broker_id == broker.name
            since_s = self._doubtful_since_s.setdefault(broker.process, now_s)
            if suspended or has_record:
                since_s = self._doubtful_since_s[broker.process] = now_s
            self._history.check(
                "O1",
                now_s - since_s <= _NOTICED_S,
                lambda b=broker, s=since_s: f"{b.process} serves {topic} since {s:.3f} s without a record, which says {record}",
            )


class OwnerRecordChecks:
    """Looks at each commit of a bundle's owner record (O4, O5, O6)."""

    def __init__(self, history: History, nodes: Mapping[str, object]) -> None:
        self._history = history
        self._nodes = nodes
        self._epochs: dict[str, int] = {}
        self._owners: dict[str, str] = {}  # by key, the broker of the last record
        self._registered_s: dict[str, float] = {}  # by key, when the broker registered last

    def on_registered(self, key: str) -> None:
        self._registered_s[key] = self._history.now_s

    def on_owner(self, key: str, record: BundleOwner | None, process: str) -> None:
        """None: it is deleted by somebody, and not with a session."""
        if record is None:
            owner, taker = self._owners.pop(key, ""), process.split("#")[0]
            is_broker = "#" in process  # what a follower repeats, or an operator asks for, has no process
            key_of_owner = f"{keys.BROKERS_KEY}/{owner}"
            back_since_s = self._history.now_s - self._registered_s.get(key_of_owner, 0.0)
            is_free = not is_broker or owner in ("", taker) or key_of_owner not in self._nodes or back_since_s < _LOOK_S
            self._history.check("O5", is_free, lambda: f"{process} takes {key} from {owner}, which is registered")
            self._history.on_release(key, process)
            return
        self._owners[key] = record.broker_id
        before = self._epochs.get(key, 0)
        self._history.note(f"{process} owns {key} in epoch {record.epoch}")
        rises = record.epoch > before
        self._history.check("O4", rises, lambda: f"{process} owns {key} in epoch {record.epoch}, {before} was given out")
        self._epochs[key] = record.epoch
        others = [other for other in self._nodes if other != key and _overlap(key, other)]
        self._history.check("O6", not others, lambda: f"{process} owns {key}, and there is an owner of {others}")
        own = process.split("#")[0] == record.broker_id
        self._history.check("O4", own, lambda: f"{process} writes that {record.broker_id} owns {key}")


def _overlap(key: str, other: str) -> bool:
    """Return whether the bundles with these records share a hash. `key` is that of a record, `other` any key."""
    namespace, _, hashes = key.rpartition("/")
    other_namespace, _, other_hashes = other.rpartition("/")
    if other_namespace != namespace:
        return False
    (first, end), (other_first, other_end) = _ends(hashes), _ends(other_hashes)
    return first < other_end and other_first < end


def _ends(hashes: str) -> tuple[int, int]:
    first, _, end = hashes.partition("_")
    return int(first, 16), int(end, 16)
