"""Brokers that own a topic, or believe so: append, read, acknowledge, skip, reset, roll over, truncate, give up, take over.

    own ──► open ──► check what the last owner promised ──► serve until it fails, or a while ──► close, or just stop ──► open …

Two brokers run this loop for one topic: each opening deposes the other, which finds out at its next write.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from cepheid_ledger import NotEnoughBookiesError
from cepheid_managed_ledger import (
    ManagedLedger,
    ManagedLedgerConfig,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    NoOpenLedgerError,
    OffloadConfig,
    Retention,
    SplitPosition,
    State,
    TooManyAppendsError,
)
from cepheid_metadata import Position, keys
from cepheid_wire import TopicName
from tests.simulation.checks.client_notes import words_of
from tests.simulation.checks.cursors import check_saved
from tests.simulation.checks.history import History
from tests.simulation.checks.topic import acked_messages, check_backlog, check_backlog_told, check_entry, check_opened
from tests.simulation.checks.topic_model import BATCH_MESSAGES, DEDUP, NOWHERE, WHOLE, Acked, CursorModel, TopicModel
from tests.simulation.checks.trim import RIGHT_MS, check_positions
from tests.simulation.workloads.ledgers import EXPECTED, Pending, Quorums
from tests.simulation.workloads.owners import OwnershipWorkload
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_clock import true_ms

_MOST_PENDING = 6
_CURSORS = ("fast", "slow", DEDUP)
_KEPT_MS = 3_600_000
_FOR_EVER = Retention(time_ms=-1, size_bytes=-1)
_RETENTIONS = (
    (Retention(), _FOR_EVER),
    (Retention(time_ms=-1, size_bytes=600), Retention(time_ms=-1, size_bytes=1_200), _FOR_EVER),
    (Retention(time_ms=_KEPT_MS, size_bytes=-1),) * 2 + (_FOR_EVER,),
)
"""Between which policies a topic changes; often those that a clock or the size decides about."""
_EVERY_EIGHTH = WHOLE // 0xFF
"""Bit 0 of each byte of a mask. Eight random bits, repeated in each byte, decide about a batch: parts of it often add up to all."""
_NO_LEDGER_BYTES = 30
"""State that is surely kept in a cursor's record (half of the settings' `cursor_inline_bytes`): a position and little else."""


class _Memory(NamedTuple):
    """What one cursor object was given, and how often its model's saved state had been reset and lost when that began."""

    model: CursorModel
    resets: int
    losses: int
    acked: Acked


class TopicWorkload:
    def __init__(
        self,
        name: str,
        rng: random.Random,
        history: History,
        quorums: Quorums,
        *,
        weak_ledgers: bool = True,
        offload: OffloadConfig | None = None,
    ) -> None:
        self.offload = offload or OffloadConfig()
        self.topic = TopicName.parse(f"persistent://public/default/{name}")
        self._random = rng
        self._history = history
        self.begin_anew()
        self.quorums = quorums
        self._other_quorums = Quorums(1, 1, 1) if weak_ledgers else quorums
        (self._retentions,) = rng.choices(_RETENTIONS, (1, 2, 2))
        self._keeps_by_age = all(retention.time_ms and retention.size_bytes == -1 for retention in self._retentions)
        self.config = self._new_config(quorums)
        self._payloads = 0
        self._appends = 0
        self._sessions: dict[ManagedLedger, tuple[SimBroker, int]] = {}  # opened by whom, who had lost how many sessions
        self._memories: dict[Any, _Memory] = {}
        self._deleted_by_mistake: dict[int, None] = {}  # ledgers with states of cursors
        self._unheard: set[tuple[ManagedLedger, str]] = set()
        """Openings and cursors with a reset of which nobody heard the end: it may come yet, and make void what was acknowledged
        since, whatever a save behind it tells."""
        self.pending: dict[str, Pending] = {}  # by process
        self.stopped = False
        self.owners: OwnershipWorkload | None = None  # None: brokers fight
        self.set_clock_ahead: Callable[[SimBroker], None] = lambda _: None
        """Of a broker's machine, by a year, for a moment."""
        self.weather: Callable[[SimBroker], int | None] = lambda _: None
        """As far as metadata goes: while it stays the same, what this broker writes there comes through. None: it does not."""

    def begin_anew(self) -> None:
        """Nothing is in the topic."""
        self.model = TopicModel(str(self.topic), keys.chain_key(self.topic))
        self.model.keeps_on_bookies_ms = self.offload.keep_ms if self.offload.url is not None else 0
        self._history.topics[self.model.key] = self.model

    def forget(self) -> None:
        """It is being deleted: whatever was promised of it may go."""
        del self._history.topics[self.model.key]

    def _new_config(self, quorums: Quorums) -> ManagedLedgerConfig:
        retention = self._random.choice(self._retentions)
        return ManagedLedgerConfig(quorums.ensemble_size, quorums.write_quorum, quorums.ack_quorum, retention, self.offload)

    async def own(self, broker: SimBroker) -> None:
        """Again and again, with pauses in which somebody else may."""
        rng = self._random
        while not self.stopped:
            await asyncio.sleep(rng.choice((0.0, 0.1, 0.5, 2.0)))
            if self.owners is not None and not await self.owners.is_here(broker, self.topic):
                continue
            managed_ledger = await self.open(broker)
            if managed_ledger is None:
                continue
            if self.owners is not None:
                self.owners.on_open(broker, self.topic, managed_ledger)
            await self._serve(broker, managed_ledger)
            if self.owners is not None and rng.random() < 0.3:
                await self.owners.give_up(broker, self.topic)
            if rng.random() < 0.5:
                if rng.random() < 0.5:
                    self._consume_all(managed_ledger)
                await self.close(managed_ledger)

    async def open(self, broker: SimBroker) -> ManagedLedger | None:
        """None: not now. What was promised before is checked."""
        history = self._history
        history.did("open")
        is_right = abs(broker.ports.wall_ms() - true_ms()) < RIGHT_MS
        recorded = history.chains.get(self.model.key)
        self.model.note_policy(broker.process, self.config.retention)
        try:
            managed_ledger = await broker.managed_ledgers.open(self.topic, self.config)
        except EXPECTED as error:
            history.note(f"{broker.process} cannot open {self.topic}: {error}")
            refused = isinstance(error, NotEnoughBookiesError)
            history.check("V10", not refused, lambda error=error: f"{broker.process} does not open {recorded}: {error}")
            return None
        history.note(lambda: f"{broker.process} opened {managed_ledger!r}")
        if managed_ledger.lacking is not None:
            history.check("V10", True, "")
            history.did("open without a new ledger")
        is_new = managed_ledger not in self._sessions
        self._sessions[managed_ledger] = broker, broker.sessions_lost
        if is_right and abs(broker.ports.wall_ms() - true_ms()) < RIGHT_MS and _was_made_in_time(managed_ledger):
            self.model.timely[broker.process, managed_ledger.chain.epoch] = None
        reigning = history.reigning.get(keys.chain_key(self.topic))
        if reigning == (broker.process, managed_ledger.chain.epoch):  # else a later owner's promises are out already
            check_opened(history, self.model, managed_ledger, is_new=is_new)
            check_positions(history, broker.process, managed_ledger)
        return managed_ledger

    async def _serve(self, broker: SimBroker, managed_ledger: ManagedLedger) -> None:
        rng = self._random
        opening = (broker.process, managed_ledger.chain.epoch)
        quiet = rng.random() < 0.3  # without producers: such an owner learns late that it is deposed
        for _ in range(rng.choice((3, 20, 60))):
            if managed_ledger.state is not State.OPEN or self.stopped:
                return
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.001, 0.01)))
            try:
                await self._act(opening, managed_ledger, quiet=quiet)
            except EXPECTED as error:
                self._history.note(f"{broker.process} {self.topic}: {error!r}")

    async def close(self, managed_ledger: ManagedLedger) -> None:
        """In good order: what was acknowledged is saved, unless something is in its way."""
        self._history.did("close")
        broker, _ = self._sessions[managed_ledger]
        before, asked = self.weather(broker) if managed_ledger.is_usable else None, []
        for name, cursor in managed_ledger.cursors.items():
            model = self.model.cursors.get(name)
            _, _, state = await cursor.encoded()
            if model is not None and len(state) <= _NO_LEDGER_BYTES and (managed_ledger, name) not in self._unheard:
                asked.append((model, model.voids, self._memory(cursor, model).copy()))
        await managed_ledger.aclose()
        as_ever = before is not None and self.weather(broker) == before and managed_ledger.failure is None
        if as_ever and self._reigns(managed_ledger):
            for model, voids, acked in asked:
                if self.model.cursors.get(model.name) is model and model.voids == voids and self._is_kept(model.name):
                    model.must.add(acked)
                    check_saved(self._history, self.model, self.topic, model.name, acked)

    def _is_kept(self, name: str) -> bool:
        """Not in a ledger that an operator has deleted: its owner does not know, has nothing to save, and says that it is saved."""
        record = self._history.cursor_records.get(keys.cursor_key(self.topic, name))
        return record is None or record.cursor_ledger_id not in self._deleted_by_mistake

    def _is_news(self, managed_ledger: ManagedLedger, cursor: Any, model: CursorModel) -> bool:
        """What a deposed owner reports as saved was saved before: where an operator has lost a state since, its successor went on
        from what was left, and nobody told it. Whoever reigns saves all that it knows with the next acknowledgement."""
        found = self._memories.get(cursor)
        return found is None or found.losses == model.losses or self._reigns(managed_ledger)

    def _reigns(self, managed_ledger: ManagedLedger) -> bool:
        broker, _ = self._sessions[managed_ledger]
        return self._history.reigning.get(self.model.key) == (broker.process, managed_ledger.chain.epoch)

    def forget_state(self, name: str, mark_delete: Position) -> None:
        """What a cursor had saved is lost for good, but for the last position in its record."""
        model = self.model.cursors[name]
        model.losses += 1
        model.must = Acked(upto=min(model.must.upto, mark_delete))
        model.created_at = mark_delete  # without sequence ids it stands where it was made, or here

    async def _act(self, opening: tuple[str, int], managed_ledger: ManagedLedger, *, quiet: bool) -> None:
        rng = self._random
        cursor = managed_ledger.cursors.get(rng.choice(_CURSORS))
        draw = rng.uniform(0.5 if quiet else 0.0, 1.0)
        if draw < 0.5:
            await self.pending.setdefault(opening[0], Pending()).wait_below(_MOST_PENDING)
            self.append(opening, managed_ledger)
        elif draw < 0.6:
            await self._read(managed_ledger)
        elif cursor is None:
            await self.create_cursor(managed_ledger, rng.choice(_CURSORS))
        elif draw < 0.85:
            if cursor.name == DEDUP:
                self._move_with_ids(cursor)
            elif draw < 0.77:
                kind = self.acknowledge(cursor)
                await self._save_and_fail(managed_ledger, cursor, 0.4 if kind == "messages" else 0.05)
            elif draw < 0.79:
                self._move_on(cursor)
            else:
                self._deliver_again(cursor)
                await self._save_and_fail(managed_ledger, cursor, 0.6)
        elif draw < 0.90 or (draw < 0.947 and cursor.name == DEDUP):  # which is never reset or deleted
            self._check_cursors(opening, managed_ledger)
            await self.save(managed_ledger, cursor)
        elif draw < 0.94:
            await self.reset(managed_ledger, cursor)
        elif draw < 0.947:
            await self._delete_cursor(managed_ledger, cursor.name)
        elif draw < 0.952:
            self._change_policies(opening[0], managed_ledger)
        elif draw < 0.98 or (draw >= 0.99 and (draw < 0.997 or self._keeps_by_age)):
            await self._trim(opening, managed_ledger)
        elif draw < 0.99:
            await self._lose_cursor_ledger(opening, managed_ledger)
        else:
            await self._truncate(opening[0], managed_ledger)

    # Producers

    def append(
        self, opening: tuple[str, int], managed_ledger: ManagedLedger, payloads: list[bytes] | None = None
    ) -> asyncio.Future[bool]:
        """Whether it was stored, as far as the producer is told. Without payloads: of what comes to mind."""
        rng, model, history = self._random, self.model, self._history
        if payloads is None:
            payloads = [self._payload() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        history.did("publish")
        self._appends += 1
        number = self._appends
        model.sent.update(dict.fromkeys(payloads))
        appended = model.appended.setdefault(opening, {})
        appended.update(dict.fromkeys(payloads))
        pending = self.pending.setdefault(opening[0], Pending())
        pending.begin()
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_done(outcome: Position | ManagedLedgerError, count: int) -> None:
            pending.end()
            history.check("V9", count == len(payloads), f"{self.topic}: {len(payloads)} entries were answered as {count}")
            if isinstance(outcome, Position):
                self._on_stored(opening, number, outcome, payloads, managed_ledger)
            elif isinstance(outcome, TooManyAppendsError | NoOpenLedgerError):
                history.did("append refused")
                model.note_refusal(opening, number, self._appends)
                for payload in payloads:  # refused: it never was in the order of appends
                    del appended[payload]
            if not told.done():
                told.set_result(isinstance(outcome, Position))

        managed_ledger.append(payloads, on_done)
        return told

    def _on_stored(
        self, opening: tuple[str, int], number: int, first: Position, payloads: list[bytes], managed_ledger: ManagedLedger
    ) -> None:
        model, history, name = self.model, self._history, str(self.topic)
        broker, sessions_lost = self._sessions[managed_ledger]
        in_session = broker.sessions_lost == sessions_lost
        history.check("O1", in_session, f"{broker.process} told OK for {first} of {name}, opened in a lost session")
        behind_refused = model.behind_refused(opening, number)
        history.check("M5", not behind_refused, f"{name}: told {first}, appended before the refusal of what came before was heard")
        runs = first.runs if isinstance(first, SplitPosition) else ((first, len(payloads)),)
        positions = [Position(start.ledger_id, start.entry_id + index) for start, count in runs for index in range(count)]
        for position, payload in zip(positions, payloads, strict=True):
            history.check("M3", position not in model.stored, f"{name}: two appends were told {position}")
            self._check_is_there(position)
            model.stored[position] = payload
        last = positions[-1]
        history.check("M9", managed_ledger.last_confirmed >= last, f"{name}: told {last} before it can be read")
        before = model.answered.get(opening, (0, NOWHERE))
        history.check("M3", before < (number, first) and before[1] < first, f"{name}: told {first} after {before[1]}")
        model.answered[opening] = number, last

    def _check_is_there(self, position: Position) -> None:
        """M3, in this very moment: the committed chain names the ledger, which does not end before the entry."""
        history, ledger_id = self._history, position.ledger_id
        chain = history.chains[keys.chain_key(self.topic)]
        named = any(ledger.ledger_id == ledger_id for ledger in chain.ledgers) or self.model.may_be_gone(position)
        history.check("M3", named, lambda: f"{self.topic}: told {position}, of a ledger that is not in {chain}")
        end = history.readable_end(ledger_id)
        history.check("M3", position.entry_id <= end, lambda: f"{self.topic}: told {position}; {history.story(ledger_id)}")

    async def _read(self, managed_ledger: ManagedLedger) -> None:
        rng = self._random
        self._history.did("read")
        stored = list(self.model.stored)
        start = rng.choice(stored) if stored else managed_ledger.first_position()
        groups = managed_ledger.read_cached(start, max_entries=5, max_bytes=2_000)
        if groups is None:
            groups = await managed_ledger.read(start, max_entries=5, max_bytes=2_000)
        self.check_groups(managed_ledger, groups)

    def check_groups(self, managed_ledger: ManagedLedger, groups: list[Any]) -> list[tuple[Position, bytes]]:
        entries: list[tuple[Position, bytes]] = []
        for group in groups:
            for entry_id, payload in enumerate(group.payloads(), group.first_entry_id):
                entries.append((Position(group.ledger_id, entry_id), bytes(payload)))
        for position, payload in entries:
            check_entry(self._history, self.model, position, payload)
            last = managed_ledger.last_confirmed
            self._history.check(
                "L9", position <= last, lambda p=position, last=last: f"{self.topic}: {p} was read, the last entry is {last}"
            )
        return entries

    # Consumers

    def acknowledge(self, cursor: Any) -> str:
        """Says what kind of acknowledgement it was."""
        rng, model, stored = self._random, self.model.cursors.get(cursor.name), list(self.model.stored)
        if model is None or not stored:
            return ""  # a deposed owner still has a cursor that was deleted
        self._history.did("acknowledge")
        near = [position for position in stored if position > cursor.mark_delete][:20] or stored[-3:]
        kind = rng.choice(("single", "single", "some", "cumulative", "messages"))
        if kind == "cumulative":
            asked = Acked(upto=rng.choice(near[: max(1, len(near) // 2)]))
        elif kind == "messages":
            asked = Acked(messages={rng.choice(near): rng.randrange(1, 256) * _EVERY_EIGHTH})
        else:
            asked = Acked(entries=dict.fromkeys(rng.sample(near, min(len(near), 1 if kind == "single" else 4))))
        self.acknowledge_these(cursor, model, asked)
        return kind

    def acknowledge_these(self, cursor: Any, model: CursorModel, asked: Acked) -> None:
        model.allow(asked)
        mark_before = cursor.mark_delete
        repeated = all(not asked.messages_of(position) & ~acked_messages(cursor, position) for position in self.model.stored)
        # A repetition claims nothing: a deposed owner, whom nobody told of a reset, has nothing to save for it and says so.
        # Not by the cursor's own count of changes: one that forgets to count would never be found out.
        if _acknowledge(cursor, asked) and not repeated:
            self._memory(cursor, model).add(asked)
        self._history.check("C1", cursor.mark_delete >= mark_before, f"{cursor!r} moved back from {mark_before}")

    def _move_on(self, cursor: Any) -> None:
        """As skipping, expiry and eviction do: nobody acknowledged, and yet it counts."""
        model, further = self.model.cursors.get(cursor.name), [p for p in self.model.stored if p > cursor.mark_delete]
        if model is None or not further:
            return
        self._history.did("move on")
        asked = Acked(upto=self._random.choice(further[:10]))
        model.allow(asked)
        if cursor.advance_to(asked.upto):
            self._memory(cursor, model).add(asked)

    def _change_policies(self, process: str, managed_ledger: ManagedLedger) -> None:
        """Retention and quorums, of a topic that is open: the next trim and the next ledger go by them."""
        self._history.did("change policies")
        quorums = self._random.choice((self.quorums, self._other_quorums))
        self.config = managed_ledger.config = self._new_config(quorums)
        self.model.note_policy(process, self.config.retention)
        managed_ledger.tick()

    def _deliver_again(self, cursor: Any) -> None:
        model = self.model.cursors.get(cursor.name)
        waiting = [position for position in self.model.stored if not cursor.is_acknowledged(position)]
        if model is None or not waiting:
            return
        self._history.did("deliver again")
        position = self._random.choice(waiting[:10])
        model.redelivered[position] = model.redelivered.get(position, 0) + 1
        before = cursor.redelivery_counts_in(position.ledger_id).get(position.entry_id, 0)
        cursor.count_redelivery(*position)
        after = cursor.redelivery_counts_in(position.ledger_id)[position.entry_id]
        self._history.check("C8", after == before + 1, f"{cursor!r} counts {after} after {before} at {position}")
        self._memory(cursor, model).counts[position] = after

    def _move_with_ids(self, cursor: Any) -> None:
        """As deduplication does: sequence ids that belong to exactly this mark-delete position."""
        model, further = self.model.cursors.get(cursor.name), [p for p in self.model.stored if p > cursor.mark_delete]
        if model is None or not further:
            return
        self._history.did("move with sequence ids")
        asked = Acked(upto=self._random.choice(further[:5]))
        model.allow(asked)
        if cursor.acknowledge_cumulative(asked.upto):
            cursor.set_sequence_ids({"ledger": asked.upto.ledger_id, "entry": asked.upto.entry_id})
            self._memory(cursor, model).add(asked)

    async def _trim(self, opening: tuple[str, int], managed_ledger: ManagedLedger) -> None:
        """Perhaps of all that there is, and of a topic that grows meanwhile."""
        rng = self._random
        if rng.random() < 0.6:
            self._consume_all(managed_ledger)
            for cursor in managed_ledger.cursors.values():
                await self.save(managed_ledger, cursor)
        for _ in range(rng.choice((1, 2))):
            for _ in range(rng.choice((0, 0, 3, 6))):
                self.append(opening, managed_ledger)
            if rng.random() < 0.5:
                self.set_clock_ahead(self._sessions[managed_ledger][0])
            await managed_ledger.trim()
            self._check_cursors(opening, managed_ledger)

    async def _truncate(self, process: str, managed_ledger: ManagedLedger) -> None:
        """Everything that is consumed goes, whatever the policies say. When it fails, what it wrote may be there all the same."""
        self._history.did("truncate")
        self.model.note_policy(process, Retention())
        await managed_ledger.truncate()
        self.model.policies[process].remove(Retention())

    def _check_cursors(self, opening: tuple[str, int], managed_ledger: ManagedLedger) -> None:
        """Of an owner that is not deposed."""
        check_positions(self._history, opening[0], managed_ledger)
        if managed_ledger.is_usable and self._history.reigning.get(self.model.key) == opening:
            for name, cursor in managed_ledger.cursors.items():
                model = self.model.cursors.get(name)
                if model is not None and not model.resetting and (managed_ledger, name) not in self._unheard:
                    check_backlog_told(self._history, self.model, model, self._memory(cursor, model), cursor)

    def _consume_all(self, managed_ledger: ManagedLedger) -> None:
        """Every cursor moves behind the last entry that somebody was told of."""
        last = max((position for position in self.model.stored if managed_ledger.is_valid(position)), default=None)
        if last is None:
            return
        for cursor in managed_ledger.cursors.values():
            if (model := self.model.cursors.get(cursor.name)) is None:
                continue
            asked = Acked(upto=last)
            model.allow(asked)
            if cursor.advance_to(last):
                if cursor.name == DEDUP:
                    cursor.set_sequence_ids({"ledger": last.ledger_id, "entry": last.entry_id})
                self._memory(cursor, model).add(asked)

    async def _save_and_fail(self, managed_ledger: ManagedLedger, cursor: Any, odds: float) -> None:
        """Now and then: the very last thing that an owner did is what the next one has to know."""
        if self._random.random() < odds:
            await self.save(managed_ledger, cursor)
            if self._random.random() < 0.7:
                managed_ledger.fail(ManagedLedgerFailedError(f"{self.topic}: its owner gives it up", topic=str(self.topic)))

    async def _lose_cursor_ledger(self, opening: tuple[str, int], managed_ledger: ManagedLedger) -> None:
        """An operator deletes the wrong ledger. What was acknowledged comes again; nothing else may happen."""
        broker, _ = self._sessions[managed_ledger]
        for cursor in managed_ledger.cursors.values():
            if (model := self.model.cursors.get(cursor.name)) is not None and cursor.name != DEDUP:
                for position in [position for position in self.model.stored if position > cursor.mark_delete][1:7]:
                    self.acknowledge_these(cursor, model, Acked(messages={position: 1}))  # too much for its record
            await self.save(managed_ledger, cursor)  # so that nothing waits to be saved elsewhere
        records = [self._history.cursor_records.get(keys.cursor_key(self.topic, name)) for name in _CURSORS]
        named = [record.cursor_ledger_id for record in records if record is not None and record.cursor_ledger_id is not None]
        if not named or self._history.reigning[keys.chain_key(self.topic)] != opening:
            return
        self._history.did("delete a cursor's ledger")
        ledger_id = self._random.choice(named)
        self._history.note(f"an operator deletes ledger {ledger_id}, which has states of cursors")
        await broker.ledgers.recover(ledger_id)
        self._deleted_by_mistake[ledger_id] = None
        self._forget_states(ledger_id)
        try:
            await broker.ledgers.delete(ledger_id)
        finally:
            self._forget_states(ledger_id)
        if self._random.random() < 0.7:  # before it saves them anew
            managed_ledger.fail(ManagedLedgerFailedError(f"{self.topic}: its owner gives it up", topic=str(self.topic)))

    def _forget_states(self, ledger_id: int) -> None:
        for name in self.model.cursors:
            record = self._history.cursor_records.get(keys.cursor_key(self.topic, name))
            if record is not None and record.cursor_ledger_id == ledger_id:
                self.forget_state(name, record.mark_delete)

    async def save(self, managed_ledger: ManagedLedger, cursor: Any) -> None:
        """What a client does that asks for a response to its acknowledgements."""
        self._history.did("save")
        model = self.model.cursors.get(cursor.name)
        if model is None:
            return
        check_backlog(self._history, cursor)
        voids, asked = model.voids, self._memory(cursor, model).copy()
        await cursor.saved()
        is_same = self.model.cursors.get(cursor.name) is model and model.voids == voids
        is_certain = (managed_ledger, cursor.name) not in self._unheard
        if is_same and is_certain and self._is_kept(cursor.name) and self._is_news(managed_ledger, cursor, model):
            model.must.add(asked)
            if not model.resetting:
                check_saved(self._history, self.model, self.topic, cursor.name, asked)
            self._history.note(lambda: f"{cursor!r} reports as saved: {asked!r}")

    async def reset(self, managed_ledger: ManagedLedger, cursor: Any) -> None:
        model = self.model.cursors.get(cursor.name)
        targets = [position for position in self.model.stored if managed_ledger.is_valid(position)]
        if model is None or not targets:
            return
        target = self._random.choice(targets)
        left = WHOLE & -(1 << 7 * target.entry_id % BATCH_MESSAGES)  # into the batch, at a message that differs from entry to entry
        before, resetting = cursor.ack_set, self.reset_to(managed_ledger, cursor, model, target, left)
        if self._random.random() < 0.5:
            await resetting
        else:  # consumers that do not know of it yet
            await asyncio.gather(resetting, self._acknowledge_during(cursor, before))

    async def _acknowledge_during(self, cursor: Any, ack_set: Any) -> None:
        await asyncio.sleep(self._random.choice((0.0, 0.001, 0.002, 0.003)))  # its write is on its way, or done
        model = self.model.cursors.get(cursor.name)
        if cursor.ack_set is ack_set and model is not None:
            self._history.did("acknowledge")
            self.acknowledge_these(cursor, model, Acked(upto=max(self.model.stored)))

    async def reset_to(
        self, managed_ledger: ManagedLedger, cursor: Any, model: CursorModel, position: Position, left: int = WHOLE
    ) -> None:
        """`left`: of the batch at that position, the messages with which delivery goes on."""
        self._history.did("reset")
        layer = model.begin_reset(position, left)
        self._history.note(f"{cursor!r} is reset to {position}, messages {left:#b}")
        resets = model.resets
        try:
            await cursor.reset(position, () if left == WHOLE else words_of(left))
        except BaseException:
            self._unheard.add((managed_ledger, cursor.name))
            raise
        finally:
            known = self.model.cursors.get(cursor.name) is model and model.resets == resets
            model.resets += 1  # what was acknowledged meanwhile is void
            model.resetting -= 1
        self._history.note(f"{cursor!r} was reset to {position}")
        if known and managed_ledger.is_valid(position):
            model.end_reset(layer, position, left)
            starts = cursor.first_unacknowledged(), WHOLE & ~acked_messages(cursor, position)
            self._history.check(
                "C4", starts == (position, left), lambda: f"{cursor!r} was reset to {position}, {left:#b}, and starts at {starts}"
            )

    async def create_cursor(self, managed_ledger: ManagedLedger, name: str) -> None:
        if name in self.model.cursors:
            return  # it is there, and this owner is deposed; or somebody tried, and the next opening will tell
        await self.create_cursor_at(
            managed_ledger, name, self._random.choice((managed_ledger.first_position(), managed_ledger.last_confirmed))
        )

    async def create_cursor_at(self, managed_ledger: ManagedLedger, name: str, mark_delete: Position) -> None:
        self._history.did("create cursor")
        model = self.model.cursors[name] = CursorModel(name, layers=[Acked(upto=mark_delete)], created_at=mark_delete)
        cursor = await managed_ledger.create_cursor(name, mark_delete)
        model.allow(Acked(upto=cursor.mark_delete))
        model.certain = True

    async def _delete_cursor(self, managed_ledger: ManagedLedger, name: str) -> None:
        model = self.model.cursors.get(name)
        if model is not None:
            self._history.did("delete cursor")
            model.certain = False
            await managed_ledger.delete_cursor(name)
            if self.model.cursors.get(name) is model:
                del self.model.cursors[name]

    def _memory(self, cursor: Any, model: CursorModel) -> Acked:
        """What this very object was given since the last reset; another owner's object has its own."""
        found = self._memories.get(cursor)
        if found is None or found.model is not model or found.resets != model.resets:
            found = self._memories[cursor] = _Memory(model, model.resets, model.losses, Acked())
        return found.acked

    def _payload(self) -> bytes:
        self._payloads += 1
        return f"{self.topic.local_name}-{self._payloads}".encode() + b"." * self._random.choice((0, 10, 10, 300, 900))


def _acknowledge(cursor: Any, asked: Acked) -> bool:
    """False: refused."""
    for position, messages in asked.messages.items():
        return bool(cursor.acknowledge_indexes(position, words_of(WHOLE & ~messages), BATCH_MESSAGES))
    if asked.entries:
        return not cursor.acknowledge(asked.entries)
    return bool(cursor.acknowledge_cumulative(asked.upto))


def _was_made_in_time(managed_ledger: ManagedLedger) -> bool:
    """Its clock was right when it was made, which may be long ago: `open` gives out the one that is open already."""
    clock = managed_ledger._clock
    return abs(clock._made_at_ms - (true_ms() - int(1000 * clock.age_s))) < RIGHT_MS
