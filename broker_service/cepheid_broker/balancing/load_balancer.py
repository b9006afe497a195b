"""Balance the bundles of all brokers from load reports every few seconds. Each broker runs a balancer; one of them is the leader.

    stand for election ──► elected: round after round until the record is another's or the session is lost
    round: settings ──► reports, all at once ──► loads sent to all brokers ──► plan ──► orders to the owners of the bundles

Rules
1. A leader stores only its election in metadata. The next leader starts from the next reports.
2. A broker whose report is missing after `REPORT_LIMIT_S` is left out: no bundle moves to it or from it. A report is used for three
   rounds.
3. The leader logs one line for each move or split, whether done, refused or not answered. `view` shows the last 100.
4. A leader that no other broker answers for `_ALONE_ROUNDS` rounds resigns, and does not stand again for `_OUT_ROUNDS`: it may be
   the one that is cut off. A leader that is drained resigns too.
5. While balancing is disabled, the leader still collects reports and sends loads: placement uses them, and `view` shows what it
   would do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from cepheid_broker.balancing.balance import BalanceRules, BrokerState, Move, Plan, Split, balance
from cepheid_broker.balancing.balance_memory import BalanceMemory
from cepheid_broker.balancing.loads import BrokerReport
from cepheid_broker.balancing.orders import BundleOrders, MoveOrder, OrderRefusedError, SplitOrder
from cepheid_broker.balancing.own_load import OwnLoad
from cepheid_broker.balancing.peers import BalancePeers
from cepheid_broker.errors import BrokerError
from cepheid_broker.ownership import PeerSilentError, RemoteRefusedError, SplitRefusedError, check_may_split
from cepheid_broker.settings import BalanceSettings
from cepheid_metadata import Election, LeaderRecord, MetadataError, SessionState, dynamic_settings, leader_record
from cepheid_ports import CepheidError, TaskOwner

log = logging.getLogger(__name__)

PREFIX = "balance."
"""Prefix of the names of settings that can be changed while brokers run."""
REPORT_LIMIT_S = 2.0
"""How long a round waits for a report. A broker that does not answer must not delay the others."""
_ROUNDS_USED = 3
_LOOK_S = 1.0
_HASTE = 0.2
"""Part of the interval after which the next round begins if one could not move all that it should."""
_ALONE_ROUNDS = 3
_OUT_ROUNDS = 12
_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a move or a split."""

    at_ms: int
    action: Move | Split
    error: str = ""
    unanswered: bool = False
    """Whether the bundle's owner did not answer, and may still carry it out."""


@dataclass(frozen=True, slots=True)
class _Heard:
    report: BrokerReport
    round: int


@dataclass(frozen=True, slots=True)
class BalanceView:
    """What the leader knows, for operators."""

    leader: LeaderRecord
    settings: BalanceSettings
    brokers: Sequence[BrokerState]
    reports: Mapping[str, BrokerReport]
    leaving: Sequence[str]
    missing: Sequence[str]
    """Ids of registered brokers that did not report."""
    plan: Plan
    """Moves and splits that would be made now, without waiting for loads to be uneven for some rounds."""
    recent: Sequence[Outcome] = field(default=())


class LoadBalancer:
    """Balances the cluster while this broker is the leader. Call `start` once and `aclose` once."""

    def __init__(self, orders: BundleOrders, peers: BalancePeers, settings: BalanceSettings) -> None:
        self._orders = orders
        self._store = orders.store
        self._ownership = orders.ownership
        self._own_load: OwnLoad = orders.own_load
        self._ports = orders.own_load.ports
        self._peers = peers
        self._settings = self._in_force = settings
        self._values: Mapping[str, str] = {}  # settings changed at run time
        self._election = Election(leader_record(self._store), self._new_candidacy)
        self._dynamic = dynamic_settings(self._store)
        self._tasks = TaskOwner("balancing")
        self._deposed = asyncio.Event()
        self._unsubscribe = self._store.subscribe(self._on_session)
        self._recent: deque[Outcome] = deque(maxlen=_REMEMBERED)
        self._acting = asyncio.Lock()
        self._out_until_s = float("-inf")
        self.is_leader = False
        self.moves = 0
        self.splits = 0
        self.refused = 0
        """Moves and splits that failed or were refused."""
        self._forget()

    def __repr__(self) -> str:
        return f"<LoadBalancer of {self._ownership.broker_id}{', the leader' if self.is_leader else ''}>"

    @property
    def orders(self) -> BundleOrders:
        return self._orders

    def start(self) -> None:
        self._tasks.start(self._run(), name="lead")

    async def aclose(self) -> None:
        self._unsubscribe()
        await self._tasks.aclose()

    async def leader(self) -> LeaderRecord | None:
        """Return the current leader according to its record. Raises MetadataError."""
        found = await leader_record(self._store).get(None)
        return None if found is None else found.record

    def learn_loads(self, loads: Mapping[str, float], unsteady: Collection[str] = ()) -> None:
        """Store the loads of all brokers and the ids of unsteady ones, as received from the leader."""
        ownership, now_s = self._ownership, asyncio.get_running_loop().time()
        ownership.placement.set_loads(loads, now_s, registered=ownership.brokers, unsteady=unsteady)

    async def settings(self) -> BalanceSettings:
        """Return the settings in force: those of this process, overridden by changes at run time. Raises MetadataError."""
        found = await self._dynamic.get(None)
        values: Mapping[str, str] = {} if found is None else found.record.values
        if values != self._values:  # so that invalid values are logged once
            self._values, self._in_force = values, changed(self._settings, values)
        return self._in_force

    async def view(self) -> BalanceView:
        """Collect reports and return what the leader knows. Call at the leader only. Raises MetadataError, BrokerError."""
        candidacy, settings = self._require_led(), await self.settings()
        await self._hear()
        states = await self._states()
        plan = balance(states, _rules(settings), may_serve=self._may_serve, may_stay=self._may_stay)
        return BalanceView(
            candidacy,
            settings,
            states,
            {name: heard.report for name, heard in self._heard.items()},
            [name for name in self._ownership.brokers if name in self._ownership.leaving],
            [name for name in self._ownership.brokers if name not in self._heard],
            plan,
            tuple(self._recent),
        )

    async def balance_now(self) -> list[Outcome]:
        """Carry out the plan that `view` shows, even if automatic balancing is disabled. Raises what `view` raises."""
        self._require_led()
        async with self._acting:
            plan = (await self.view()).plan
            return await self._perform(plan)

    # Election and rounds

    def _new_candidacy(self) -> LeaderRecord:
        return LeaderRecord(broker_id=self._ownership.broker_id, since_ms=self._ports.wall_ms())

    def _require_led(self) -> LeaderRecord:
        candidacy = self._election.candidacy
        if not self.is_leader or candidacy is None:
            raise OrderRefusedError(f"{self._ownership.broker_id} is not the leader")
        return candidacy

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._deposed.set()

    async def _run(self) -> None:
        while True:
            try:
                if self._may_stand() and await self._election.stand():
                    await self._lead()
            except MetadataError as error:
                log.info("balance.metadata_away", extra={"error": str(error)})
            except Exception:  # a defect of balancing must not end the broker
                log.exception("balance.failed")
            finally:
                self.is_leader = False
            await asyncio.sleep(self._settings.interval_s)

    def _may_stand(self) -> bool:
        return self._ownership.broker_id in self._ownership.brokers and not self._is_out()

    def _is_out(self) -> bool:
        """Return whether this broker must not lead now, because it is draining or resigned recently (rule 4)."""
        is_drained = self._ownership.broker_id in self._ownership.leaving
        return is_drained or asyncio.get_running_loop().time() < self._out_until_s

    async def _lead(self) -> None:
        """Run rounds until this broker is no longer the leader. Raises MetadataError."""
        self._deposed.clear()
        self._forget()
        self.is_leader = True
        log.info("balance.elected", extra={"broker": self._ownership.broker_id})
        while not self._deposed.is_set() and self._may_stand():
            settings = await self.settings()
            if not await self._election.holds():
                return
            is_cut_off = await self._round(settings)
            if self._rounds - self._answered_round >= _ALONE_ROUNDS:
                self._out_until_s = asyncio.get_running_loop().time() + _OUT_ROUNDS * settings.interval_s
                log.warning("balance.gave_way", extra={"broker": self._ownership.broker_id, "unanswered": list(self._silent)})
                break
            await self._rest(_HASTE if is_cut_off else 1.0)
        if not self._deposed.is_set() and self._is_out():
            await self._election.resign()

    async def _rest(self, part: float) -> None:
        """Wait for this part of the interval, or until this broker is deposed. A shorter interval takes effect within `_LOOK_S`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not self._deposed.is_set():
            try:
                settings = await self.settings()
            except MetadataError:  # the next round finds out whether that lasts
                settings = self._in_force
            if (left_s := part * settings.interval_s - (loop.time() - began_s)) <= 0:
                return
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._deposed.wait()
            except TimeoutError:
                pass

    async def _round(self, settings: BalanceSettings) -> bool:
        """Run one round. Return whether the next should follow soon: as much moved as a round may, and every broker answers."""
        async with self._acting:
            self._rounds += 1
            await self._hear()
            plan = self._memory.plan(await self._states(), _rules(settings), self._may_serve, self._may_stay)
            self._log_notes(plan)
            outcomes = await self._perform(plan) if settings.enabled else []
            moved = sum(isinstance(outcome.action, Move) and not outcome.error for outcome in outcomes)
            return moved >= settings.moves_at_once and not self._silent

    def _forget(self) -> None:
        self._memory = BalanceMemory()
        self._heard: dict[str, _Heard] = {}
        self._silent: dict[str, None] = {}
        self._notes: tuple[str, ...] = ()
        self._rounds = 0
        self._answered_round = 0
        """Last round in which another broker answered, even with a refusal, or in which there was no other."""

    async def _hear(self) -> None:
        """Ask every broker for its load report (rule 2)."""
        told = self._told()
        brokers = list(self._ownership.brokers)
        found = await asyncio.gather(*(self._report_of(name, *told) for name in brokers))
        if all(name == self._ownership.broker_id for name in brokers):
            self._answered_round = self._rounds
        for name, report in zip(brokers, found, strict=True):
            if report is not None:
                self._heard[name] = _Heard(report, self._rounds)
        self._heard = {
            name: heard
            for name, heard in self._heard.items()
            if name in self._ownership.brokers and self._rounds - heard.round < _ROUNDS_USED
        }
        self.learn_loads(*self._told())

    def _told(self) -> tuple[Mapping[str, float], list[str]]:
        """Return what is sent to other brokers: loads by id, and the ids of unsteady brokers."""
        loads = {name: heard.report.load for name, heard in self._heard.items()}
        return loads, self._memory.unsteady([heard.report for heard in self._heard.values()])

    async def _report_of(self, broker_id: str, loads: Mapping[str, float], unsteady: list[str]) -> BrokerReport | None:
        if broker_id == self._ownership.broker_id:
            report: BrokerReport | None = await self._own_load.report()
        else:
            report = await self._asked(broker_id, loads, unsteady)
        if report is not None:
            self._memory.on_report(asyncio.get_running_loop().time(), report)
        return report

    async def _asked(self, broker_id: str, loads: Mapping[str, float], unsteady: list[str]) -> BrokerReport | None:
        try:
            async with asyncio.timeout(REPORT_LIMIT_S):
                report = await self._peers.report(broker_id, loads, unsteady)
        except (BrokerError, TimeoutError) as error:
            if isinstance(error, RemoteRefusedError):
                self._answered_round = self._rounds
            if broker_id not in self._silent:
                self._silent[broker_id] = None
                text = str(error) or f"no answer within {REPORT_LIMIT_S:g} s"
                log.warning("balance.no_report", extra={"broker": broker_id, "error": text})
            return None
        self._answered_round = self._rounds
        self._silent.pop(broker_id, None)
        return report

    async def _states(self) -> list[BrokerState]:
        reports = [heard.report for heard in self._heard.values()]
        now_s = asyncio.get_running_loop().time()
        may_split = await self._may_split()
        return self._memory.states(now_s, reports, self._ownership.leaving, may_split=may_split)

    async def _may_split(self) -> bool:
        try:
            await check_may_split(self._store)
        except SplitRefusedError:
            return False
        return True

    def _may_serve(self, bundle: str, broker_id: str) -> bool:
        isolation = self._ownership.placement.isolation
        if isolation.is_empty:
            return True
        loads = {name: heard.report.load for name, heard in self._heard.items()}
        return broker_id in isolation.allowed(_namespace_of(bundle), self._ownership.brokers, loads)

    def _may_stay(self, bundle: str, broker_id: str) -> bool:
        """Return whether isolation policies allow the broker under some load, because it is a secondary one."""
        brokers = self._ownership.brokers
        return broker_id in self._ownership.placement.isolation.allowed_at_most(_namespace_of(bundle), brokers)

    # Moves and splits

    async def _perform(self, plan: Plan) -> list[Outcome]:
        actions: list[Move | Split] = [*plan.splits, *plan.moves]
        outcomes = list(await asyncio.gather(*map(self._act, actions)))
        self._recent.extend(outcomes)
        return outcomes

    async def _act(self, action: Move | Split) -> Outcome:
        """Send one order and log its outcome (rule 3)."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        facts: dict[str, Any] = {"bundle": action.bundle, "why": action.why}
        facts |= {"from": action.source, "to": action.target} if isinstance(action, Move) else {"broker": action.broker}
        try:
            await self._order(action)
        except PeerSilentError as error:
            log.warning("balance.unanswered", extra={**facts, "error": str(error)})
            if isinstance(action, Move):
                self._memory.on_moved(loop.time(), action)  # the owner carries it out (orders.py, rule 4), or loses the bundle soon
            else:
                self._memory.on_refused(loop.time(), action, str(error))
            return Outcome(self._ports.wall_ms(), action, str(error), unanswered=True)
        except CepheidError as error:
            self.refused += 1
            self._memory.on_refused(loop.time(), action, str(error))
            log.warning("balance.refused", extra={**facts, "error": str(error)})
            return Outcome(self._ports.wall_ms(), action, str(error))
        duration_ms = round(1000 * (loop.time() - began_s))
        if isinstance(action, Move):
            self.moves += 1
            self._memory.on_moved(loop.time(), action)
            log.info("balance.moved", extra={**facts, "duration_ms": duration_ms})
        else:
            self.splits += 1
            log.info("balance.split", extra={**facts, "by": action.by, "duration_ms": duration_ms})
        return Outcome(self._ports.wall_ms(), action)

    async def _order(self, action: Move | Split) -> None:
        """Send the order to the bundle's owner and wait for its answer. Raises CepheidError."""
        candidacy = self._require_led()
        if isinstance(action, Move):
            move = MoveOrder(leader=candidacy, bundle=action.bundle, target=action.target, why=action.why)
            await self._to(action.source, move, self._orders.move, self._peers.move)
        else:
            split = SplitOrder(leader=candidacy, bundle=action.bundle, by=action.by, why=action.why)
            await self._to(action.broker, split, self._orders.split, self._peers.split)

    async def _to(self, broker_id: str, order: Any, here: Callable[[Any], Any], there: Callable[[str, Any], Any]) -> None:
        if broker_id == self._ownership.broker_id:
            await here(order)
        else:
            await there(broker_id, order)

    def _log_notes(self, plan: Plan) -> None:
        if plan.notes != self._notes:
            for note in plan.notes:
                log.warning("balance.stuck", extra={"why": note})
            self._notes = plan.notes


def _namespace_of(bundle: str) -> str:
    tenant, namespace, _ = bundle.split("/", 2)
    return f"{tenant}/{namespace}"


def _rules(settings: BalanceSettings) -> BalanceRules:
    return BalanceRules(settings.tolerance, settings.moves_at_once, settings.split_topics)


def changed(settings: BalanceSettings, values: Mapping[str, str]) -> BalanceSettings:
    """Return the settings with the changes made at run time. A value that is no longer valid is logged and ignored; the others
    apply."""
    fields = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
    known = {name: value for name, value in fields.items() if name in BalanceSettings.model_fields}
    try:
        return BalanceSettings.model_validate({**dict(settings), **known})
    except ValidationError as error:
        log.warning("balance.bad_setting", extra={"error": str(error)})
        bad = {f"{PREFIX}{problem['loc'][0]}" for problem in error.errors()}
        return changed(settings, {name: value for name, value in values.items() if name not in bad})
