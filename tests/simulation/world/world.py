"""One simulated cluster, one seed: real code on simulated machines, a workload, faults, then peace and an audit.

    start ──► workload + faults (safety is checked at every answer and commit) ──► heal ──► quiet? ──► audit

The seed decides everything: the size of the cluster, the quorums, what clients do, what breaks and when.
"""

from __future__ import annotations

import asyncio
import random

from cepheid_managed_ledger import ManagedLedgerConfig, OffloadConfig, Retention
from cepheid_metadata import UNDELETED, SessionState
from tests.simulation.checks.audit import audit
from tests.simulation.checks.topic import inspect_subscriptions
from tests.simulation.cuts import NO_CUTS, Cuts
from tests.simulation.faults.nemesis import Nemesis
from tests.simulation.faults.plan import Faults
from tests.simulation.workloads.clients import ClientWorkload
from tests.simulation.workloads.dedup import DedupWorkload
from tests.simulation.workloads.ledgers import LedgerWorkload, Quorums
from tests.simulation.workloads.owners import OwnershipWorkload
from tests.simulation.workloads.topics import TopicWorkload
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.repairs import SHARE, SPARES, Repairs
from tests.simulation.world.replays import Replays
from tests.simulation.world.sim_broker import FEW_LEDGERS, WINDOWS_BYTES, SimBroker
from tests.simulation.world.sim_clock import JUMPS_MS
from tests.simulation.world.sim_objects import SimObjects, some_offload, tiered_settings
from tests.simulation.world.sim_serving import found_cluster
from tests.simulation.world.stage import Stage

_QUORUMS = ((1, 1, 1), (2, 2, 2), (2, 2, 1), (3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 3, 3), (3, 2, 2), (4, 3, 2), (5, 3, 2))
_REPAIRED_QUORUMS = ((2, 2, 2), (3, 3, 2), (3, 3, 2), (3, 3, 3), (3, 2, 2), (4, 3, 2), (5, 3, 2))
"""Of worlds with repair: a bookie may be lost at any time."""
_FEWEST_FAULTS = 3
_STORES = 0.35
"""Of worlds use storage directly; the others have clients."""
_BROKERS = ("east", "west", "north")
_THREE_BROKERS = 0.25
"""Of worlds have all of them, the others two."""
_SCRUBS = 0.5
"""Of worlds have bookies whose scrubbers run."""
_OFFLOADS = 0.25
"""Of worlds have an object store, to which their topics are offloaded."""
_PAGES = 0.5
"""Of worlds have topics whose chains are in pages."""
_ORDERLY = 0.5
"""Of worlds have brokers that ask whose a topic is; in the others they fight."""


class World(Stage):
    def __init__(
        self, seed: int, *, faults: Faults | None = None, operations: int = 300, trace: bool = False, cuts: Cuts = NO_CUTS
    ) -> None:
        super().__init__(f"{seed}", faults or Faults(), trace=trace, suppressed=cuts.faults)
        self.seed = seed
        self.skipped = cuts.actions
        self.actions = 0
        self._wanted_operations = operations if cuts.operations is None else cuts.operations
        self._fewest_faults = _FEWEST_FAULTS if cuts.operations is None else 0
        self.stores = self.orderly = True
        self.healed = False
        self.clients: ClientWorkload | None = None
        self.repairs: Repairs | None = None
        self.replays = Replays(random.Random(f"{seed}/replays"), self._progress)
        self._inspector = random.Random(f"{seed}/inspector")
        self._operator = random.Random(f"{seed}/operator")

    def run(self) -> None:
        """Raises InvariantViolation or SimulationError. What happened is in `history` and `plan`."""
        self.play(self._live())

    async def _live(self) -> None:
        self.quorums = Quorums(*self.random.choice(_QUORUMS))
        brokers = _BROKERS if random.Random(f"{self.seed}/brokers").random() < _THREE_BROKERS else _BROKERS[:2]
        spares, has_repair = self.random.randrange(3), self._has_repair()
        if has_repair:
            self.quorums = Quorums(*random.Random(f"{self.seed}/repaired quorums").choice(_REPAIRED_QUORUMS))
            spares = SPARES
        offload = self._some_offload()
        self.build(self.quorums.ensemble_size + spares, brokers, registers=True)
        window_bytes = random.Random(f"{self.seed}/windows").choice(WINDOWS_BYTES)
        has_pages = random.Random(f"{self.seed}/pages").random() < _PAGES
        for broker in self.brokers.values():
            broker.settings = broker.settings.model_copy(update={"append_window_bytes": window_bytes})
            if has_pages:
                broker.page_limits = FEW_LEDGERS
        self.disks_to_lose = self.random.randrange(self.quorums.ack_quorum)  # below Qa in all: every entry keeps a copy
        self._least_ack_quorum = self.disks_to_lose + 1
        if has_repair:
            self.repairs = Repairs(self, random.Random(f"{self.seed}/repairs"))
            self.disks_to_lose = self.repairs.reserved = min(self.disks_to_lose, self.quorums.ack_quorum - 2)
            self._least_ack_quorum = self.disks_to_lose + 2
        self.ledger_workload = LedgerWorkload(self.random, self.history, self.quorums)
        await found_cluster(self.tree)
        self._choose_flavour()
        self.topic_workload = TopicWorkload(
            "orders", self.random, self.history, self.quorums, weak_ledgers=self._least_ack_quorum == 1, offload=offload
        )
        self.dedup_workload = DedupWorkload("payments", random.Random(f"{self.seed}/dedup"), self.history, self.quorums)
        self.owners = OwnershipWorkload(random.Random(f"{self.seed}/owners"), self.history, self.tree)
        self.topic_workload.weather = self.weather
        self.topic_workload.set_clock_ahead = self.set_clock_ahead
        if self.orderly:
            self.topic_workload.owners = self.dedup_workload.owners = self.owners
        if self.clients is not None:
            await self._prepare_clients(self.clients, offload)
        scrubs = random.Random(f"{self.seed}/scrubs").random() < _SCRUBS
        for bookie in self.bookies.values():
            bookie.scrubs = scrubs
            bookie.checks.on_mark = lambda bookie=bookie: self._on_mark(bookie)
            bookie.start()
        for broker in self.brokers.values():
            self.begin(broker)
        if self.stores:
            for client in self.dedup_workload.clients:
                self.start_outside(self.dedup_workload.produce(client), client.name)
        if self.clients is not None:
            self.clients.start()
        if self.repairs is not None:
            self.repairs.start()
        nemesis = Nemesis(self)
        while self._goes_on(nemesis):
            await asyncio.sleep(self.random.expovariate(10.0))
            if self.stores:
                self._visit_ledgers()
                self.owners.watch(list(self.brokers.values()), self.topic_workload.topic)
            self._look_around()
            nemesis.act()
        self.history.note("healing")
        self.ledger_workload.stopped = self.topic_workload.stopped = self.dedup_workload.stopped = True
        if self.clients is not None:
            self.clients.stop()
        self.plan.heal()
        await nemesis.heal()
        self.healed = True
        await audit(self)

    def _goes_on(self, nemesis: Nemesis) -> bool:
        """A rolling restart is over first, unless a run is made smaller."""
        if self._operations() < self._wanted_operations or self.plan.dealt < self._fewest_faults:
            return True
        waits = self.repairs is not None and self.repairs.waits_for_more
        return (nemesis.is_rolling or waits) and self._fewest_faults > 0

    def _some_offload(self) -> OffloadConfig:
        """In some worlds there is an object store, which topics are offloaded to."""
        rng = random.Random(f"{self.seed}/offload")
        if rng.random() >= _OFFLOADS:
            return OffloadConfig()
        self.objects = SimObjects(self.plan, self.history)
        return OffloadConfig(**some_offload(rng))

    def _has_repair(self) -> bool:
        return random.Random(f"{self.seed}/has repair").random() < SHARE

    def _choose_flavour(self) -> None:
        """Brokers whose storage is used directly, or brokers that serve clients; in good order or not."""
        flavour, order = random.Random(f"{self.seed}/flavour"), random.Random(f"{self.seed}/order")
        self.stores = flavour.random() < _STORES
        self.orderly = order.random() < _ORDERLY
        if not self.stores:
            self.clients = ClientWorkload(self, list(self.brokers))

    async def _prepare_clients(self, clients: ClientWorkload, offload: OffloadConfig) -> None:
        await clients.found()
        quorums, retention = self.quorums, Retention(time_ms=-1, size_bytes=-1)
        tiered = tiered_settings(offload)
        for broker in self.brokers.values():
            broker.serves, broker.orderly = True, self.orderly
            broker.ledger_config = ManagedLedgerConfig(quorums.ensemble_size, quorums.write_quorum, quorums.ack_quorum, retention)
            broker.broker_settings = broker.broker_settings.model_copy(update={"tiered": tiered})
            broker.on_down = lambda broker: self.later(0.3, lambda: broker.node.alive or self.begin(broker))
        self.sockets.listened_in = lambda protocol, name: clients.tap(protocol, self.brokers[name])

    def _operations(self) -> int:
        """But those of producers that only wait for each other."""
        return sum(self.history.operations.values()) - self.dedup_workload.operations

    def _progress(self) -> float:
        """0 at the start, 1 when there were as many operations as wanted."""
        return self._operations() / max(1, self._wanted_operations)

    def does(self) -> bool:
        """Gives an action of visitors and operators its ordinal, right before it happens. False: it is left out."""
        ordinal, self.actions = self.actions, self.actions + 1
        return ordinal not in self.skipped

    def weather(self, broker: SimBroker) -> int | None:
        """See `TopicWorkload.weather`."""
        is_fine = (
            not self.tree.out
            and not self.tree.electing
            and self.tree.slow == 1.0
            and broker.store.session_state is SessionState.CONNECTED
        )
        return self.plan.total() if is_fine else None

    def other_quorums(self, rng: random.Random) -> Quorums | None:
        """Some that this cluster can have, and under which no disk that is lost takes the last copy along."""
        fit = [
            quorums
            for quorums in (Quorums(*sizes) for sizes in _QUORUMS)
            if quorums.ensemble_size <= (len(self.bookies) if self.repairs is None else self.quorums.ensemble_size)
            and quorums.ack_quorum >= self._least_ack_quorum
            and quorums != self.quorums
        ]
        return rng.choice(fit) if fit else None

    def change_quorums(self, quorums: Quorums) -> None:
        """An operator's doing; for ledgers made from now on."""
        self.history.note(f"quorums are {quorums} from now on")
        self.quorums = self.ledger_workload.quorums = self.topic_workload.quorums = quorums

    def set_clock_ahead(self, broker: SimBroker) -> None:
        """See `TopicWorkload.set_clock_ahead`."""
        if self.plan.active and self.plan.deals("clock set ahead"):
            clock = self.plan.clocks.of(broker.name)
            clock.jump(max(JUMPS_MS))
            self.later(1.0, clock.correct)

    def come_back(self, broker: SimBroker) -> None:
        """A while after a crash. Once all is healed each has begun again, and who is stopped then is to stay away."""
        if not (broker.node.alive or self.healed):
            self.begin(broker)

    def begin(self, broker: SimBroker) -> None:
        """Starts a broker's process and what runs in it."""
        broker.start()
        if not self.stores:
            self.owners.on_served(broker)
            return
        if self.topic_workload.owners is not None:
            self.spawn(broker.node, self.owners.run(broker), "ownership")
        self.spawn(broker.node, self.ledger_workload.write(broker), "write")
        self.spawn(broker.node, self.topic_workload.own(broker), "own")
        self.spawn(broker.node, self.dedup_workload.own(broker), "own with deduplication")

    def on_bookie_down(self, bookie: SimBookie) -> None:
        self.later(self.random.choice((0.05, 0.3, 1.0, 4.0)), lambda: bookie.node.alive or bookie.gone or bookie.start())

    def on_fence(self, bookie: SimBookie) -> None:
        """Right before a promise: what if power were lost in this instant?"""
        if self.replays.take("fence"):
            self._replay(bookie)

    def _replay(self, bookie: SimBookie) -> None:
        name = f"replay {len(self.replays.taken)}"
        self.start_outside(bookie.replay_copy(f"{self.seed}/{name}"), name)

    def _on_mark(self, bookie: SimBookie) -> None:
        """The journal lets go of what it held: what if power were lost now?"""
        if self.replays.take("mark"):
            self._replay(bookie)

    def _look_around(self) -> None:
        """An inspector looks at some disk, and at the counts and excuses of some broker's subscriptions."""
        rng = self._inspector
        serving = [bookie for bookie in self.bookies.values() if bookie.serving]
        if serving and self.replays.take("any moment"):
            self._replay(rng.choice(serving))
        if serving and rng.random() < 0.05:
            bookie = rng.choice(serving)
            bookie.checks.scan(bookie.disks, bookie.index)
        if rng.random() < 0.1:
            inspect_subscriptions(self.history, rng.choice(list(self.brokers.values())))

    def _visit_ledgers(self) -> None:
        """Somebody recovers or reads some ledger, perhaps the one that is being written."""
        broker = self.random.choice(list(self.brokers.values()))
        open_ledgers = [record.ledger_id for record in self.history.ledgers.values() if not record.is_closed]
        if not broker.node.alive:
            return
        if open_ledgers and self.random.random() < 0.15:
            victim = self.random.choice(open_ledgers)
            if self.does():
                self.spawn(broker.node, self.ledger_workload.recover(broker, victim), f"recover {victim}")
        if self.history.ledgers and self.random.random() < 0.3:
            victim = self.random.choice(list(self.history.ledgers))
            if self.does():
                self.spawn(broker.node, self.ledger_workload.read(broker, victim), f"read {victim}")
        self._operate(broker)

    def _operate(self, broker: SimBroker) -> None:
        """Somebody deletes ledgers of no topic, those too that came back, and brings back what was deleted a moment ago."""
        rng, history, work = self._operator, self.history, self.ledger_workload
        bare = [
            ledger_id for ledger_id, record in history.ledgers.items() if "topic" not in record.custom or UNDELETED in record.custom
        ]
        if bare and rng.random() < 0.03:
            victim = rng.choice(bare)
            if self.does():
                self.spawn(broker.node, work.delete(broker, victim), f"delete {victim}")
        if history.restorable and rng.random() < 0.2:
            back = rng.choice(list(history.restorable))
            if self.does():
                self.spawn(broker.node, work.bring_back(broker, back), f"bring back {back}")
