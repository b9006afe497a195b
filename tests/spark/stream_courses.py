"""A model of topics, of the broker's leases and of Spark's order of calls: for courses of a stream without Spark, in no time.

World   topics as chains of ledgers: written, rolled over, left by dying owners, trimmed, deleted and made anew
Course  one checkpoint, processes that die between any two calls; the rows of each batch, judged against the World
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import BinaryType, StructField, StructType

from cepheid_decode import DataLossError, Edge, Fragment, HistoryPlan, LedgerHistory, MessagePosition, TopicHistory, TopicSelection
from cepheid_scan.ledger_ends import LedgerEnd
from cepheid_spark.data_loss import Loss
from cepheid_spark.lease import Held
from cepheid_spark.lease_keeper import LeaseKeeper
from cepheid_spark.options import parse_options
from cepheid_spark.partitions import TaskPartition
from cepheid_spark.stream_query import StreamQuery
from cepheid_spark.stream_reader import CepheidStreamReader
from cepheid_spark.stream_state import Snapshot, StreamState

_SCHEMA = StructType([StructField("value", BinaryType())])
_ENTRY_BYTES = 100
_IDLE_TRIGGERS = 20
MANY = 5000


class ProcessDied(Exception):
    """Between two calls of Spark."""


@dataclass
class Ledger:
    ledger_id: int
    numbers: list[int] = field(default_factory=list)  # of all that is stored; one entry each
    confirmed: int = 0
    told: int = 0  # of it, by bookies: LAC + 1
    is_open: bool = True


class World:
    """What brokers and bookies have. Numbers count up through all topics; an acknowledged one is written once."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.chains: dict[str, list[Ledger]] = {}
        self.written: dict[str, list[int]] = {}  # acknowledged, of each topic, in order
        self.places: dict[str, list[tuple[int, int]]] = {}  # of them
        self.cursors: dict[tuple[str, str], MessagePosition] = {}  # first entry that is held, by topic and subscription
        self.begins: dict[tuple[str, str], MessagePosition] = {}  # from there on it has held everything
        self.incarnations: dict[str, int] = {}
        self.records: dict[tuple[str, str], dict[int, int]] = {}  # of ledgers that went with entries: their last ones
        self._numbers = 0
        self._next_ids = [1000, 5]  # of two blocks: ids are given out once, and rise within a chain

    def create(self, topic: str, *, low_id: bool = False, ledger_id: int | None = None) -> None:
        """`low_id`: as when a broker with an older block of ids makes a topic anew; `ledger_id`: as in a cluster set up again."""
        self.chains[topic] = [self._ledger(low_id) if ledger_id is None else Ledger(ledger_id)]
        self.incarnations[topic] = self.incarnations.get(topic, 0) + 1
        self.written.setdefault(topic, [])
        self.places.setdefault(topic, [])

    def delete(self, topic: str) -> None:
        del self.chains[topic]
        for key in [key for key in self.cursors if key[0] == topic]:
            del self.cursors[key]

    def _ledger(self, low_id: bool = False) -> Ledger:
        self._next_ids[low_id] += self.chance.randrange(1, 4)
        return Ledger(self._next_ids[low_id])

    def write(self, topic: str, count: int) -> None:
        ledger = self.chains[topic][-1]
        for _ in range(count):
            self._numbers += 1
            ledger.numbers.append(self._numbers)
        self._confirm(topic, ledger, self.chance.randrange(len(ledger.numbers) - ledger.confirmed + 1))
        ledger.told = self.chance.randrange(ledger.told, ledger.confirmed + 1)

    @property
    def now(self) -> int:
        return self._numbers + 1

    def settle(self, topic: str) -> None:
        """Writers are idle: all is confirmed, and bookies know it."""
        ledger = self.chains[topic][-1]
        self._confirm(topic, ledger, len(ledger.numbers) - ledger.confirmed)
        ledger.told = ledger.confirmed

    def _confirm(self, topic: str, ledger: Ledger, count: int) -> None:
        self.written[topic] += ledger.numbers[ledger.confirmed : ledger.confirmed + count]
        self.places[topic] += [(ledger.ledger_id, ledger.confirmed + each) for each in range(count)]
        ledger.confirmed += count

    def roll(self, topic: str) -> None:
        self.settle(topic)
        self.lose_owner(topic)

    def lose_owner(self, topic: str) -> None:
        """The next one keeps some of the tail that was never acknowledged; an empty ledger leaves the chain."""
        chain = self.chains[topic]
        last = chain[-1]
        kept = self.chance.randrange(last.confirmed, len(last.numbers) + 1)
        self._confirm(topic, last, kept - last.confirmed)
        del last.numbers[kept:]
        last.is_open, last.told = False, kept
        if not last.numbers:
            chain.pop()
        chain.append(self._ledger())

    def trim(self, topic: str, count: int = 99) -> None:
        """Without retention: what cursors let go."""
        chain = self.chains[topic]
        held = [place for (name, _), place in self.cursors.items() if name == topic]
        for _ in range(count):
            head = chain[0]
            end = MessagePosition(head.ledger_id, len(head.numbers))
            if len(chain) == 1 or any(place < end for place in held):
                return
            self.records.setdefault((topic, f"i{self.incarnations[topic]}"), {})[head.ledger_id] = len(head.numbers) - 1
            chain.pop(0)

    def read(self, topic: str, ledger_id: int, first: int, last: int) -> list[int]:
        for ledger in self.chains.get(topic, ()):
            if ledger.ledger_id == ledger_id:
                assert 0 <= first <= last < ledger.confirmed, f"{topic} {ledger_id}:{first}..{last} is not confirmed"
                return ledger.numbers[first : last + 1]
        raise DataLossError(f"{topic}: ledger {ledger_id} is gone")

    # Planner and EndWatch

    def topics(self, selection: TopicSelection) -> list[str]:
        return sorted(self.chains)

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        return HistoryPlan(tuple(self._history(topic) for topic in topics), {"bookie": "h:1"})

    def _history(self, topic: str) -> TopicHistory:
        return TopicHistory(topic, -1, f"i{self.incarnations[topic]}", tuple(self._shown(topic)))

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int]:
        there = self.records.get((topic, incarnation), {})
        return {ledger_id: last for ledger_id, last in there.items() if ledger_id in ids}

    def _shown(self, topic: str) -> list[LedgerHistory]:
        return [
            LedgerHistory(
                each.ledger_id,
                each.confirmed - 1,
                each.is_open,
                each.confirmed * _ENTRY_BYTES,
                None if each.is_open else 1,
                1,
                1,
                (Fragment(0, ("bookie",)),),
                b"",
            )
            for each in self.chains[topic]
        ]

    def update(self, plan: HistoryPlan) -> None:
        self._watched = {(history.topic, each.ledger_id) for history in plan.topics for each in history.ledgers if each.is_open}

    def ends(self) -> dict[tuple[str, int], LedgerEnd]:
        return {
            (topic, each.ledger_id): LedgerEnd(each.told - 1, 0)
            for topic, chain in self.chains.items()
            for each in chain
            if (topic, each.ledger_id) in self._watched
        }

    def close(self) -> None:
        pass


class ModelLease:
    """cepheid_spark.lease.Lease, and what the broker makes of its calls."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name

    def hold(self, topic: str, first: MessagePosition, *, takes: bool = False) -> Held:
        if topic not in self._world.chains:
            return Held.NO_TOPIC
        if (held := self.hold_on(topic, first)) is not None:
            return held
        earliest = MessagePosition(self._world.chains[topic][0].ledger_id, 0)
        place = self._place(topic, self._at_or_behind(topic, first)) or earliest
        self._world.cursors[topic, self.name] = self._world.begins[topic, self.name] = place
        return Held.MADE

    def hold_on(self, topic: str, first: MessagePosition) -> Held | None:
        key = topic, self.name
        if key not in self._world.cursors:
            return None
        place, stands = (self._at_or_behind(topic, each) for each in (first, self._world.cursors[key]))
        if stands > place:
            self._world.cursors[key], self._world.begins[key] = place, stands
            return Held.MOVED_BACK
        self._world.begins[key] = min(stands, self._world.begins.get(key, stands))
        return Held.FOUND if self._world.begins[key] <= first else Held.FOUND_LATER

    def move(self, topic: str, first: MessagePosition) -> bool:
        if (topic, self.name) not in self._world.cursors:
            return False
        place = self._place(topic, first)
        if place is None:
            return False
        self._world.cursors[topic, self.name] = place
        return True

    def drop(self, topic: str) -> None:
        self._world.cursors.pop((topic, self.name), None)

    def _at_or_behind(self, topic: str, first: MessagePosition) -> MessagePosition:
        """Ledgers that went mean what is behind them."""
        later = [each.ledger_id for each in self._world.chains[topic] if each.ledger_id >= first.ledger_id]
        return MessagePosition(later[0], 0) if later and later[0] > first.ledger_id else first

    def _place(self, topic: str, first: MessagePosition) -> MessagePosition | None:
        """None: 412."""
        chain = self._world.chains[topic]
        if any(each.ledger_id == first.ledger_id for each in chain):
            return MessagePosition(first.ledger_id, first.entry_id)
        return None if first.ledger_id > chain[0].ledger_id else MessagePosition(chain[0].ledger_id, 0)


class Course:
    """`options` as Spark's. `disturb` is called between any two calls, and may kill the process.

    `by_time`: each process begins with startingTimestamp=now. A message's number is its publish time."""

    def __init__(
        self, world: World, *, from_latest: bool, disturb: Callable[[Course], None], by_time: bool = False, **options: str
    ) -> None:
        self.world = world
        self.disturb = disturb
        self.offsets: list[str] = []  # texts, as in the checkpoint
        self.committed = 0  # batches
        self.batches: dict[int, dict[str, list[int]]] = {}
        self.starts: dict[str, int] | None = None  # how many numbers of a topic lie before the first offset
        self.losses: list[str] = []  # that were skipped, as the log says
        self.since = 0  # of the process that wrote the first offset
        self._from_latest = from_latest
        self._by_time = by_time
        held = options.get("subscription") != "none"
        given = {"adminUrl": "http://nobody:1", "topicsPattern": ".*", "metadataRetry": "0ms", "chunkLookback": "0", **options}
        self._options = parse_options(given, streaming=True)
        self._held = held
        self.begin()

    # The process

    def begin(self) -> None:
        world = self.world
        if self._by_time:
            self._options = replace(self._options, start=Edge(publish_time_ms=world.now))
        self.state = StreamState(world, world, self._options.topics, discovery_s=0.0, retry_s=0.0)  # type: ignore[arg-type]
        self.state._start = lambda: None  # type: ignore[method-assign]  # looks come with disturbances
        self.query = StreamQuery(self._options, self.state, object() if self._held else None, self._resolve)  # type: ignore[arg-type]
        self.query._new_keeper = self._new_keeper  # type: ignore[method-assign]
        believe = self.query._believe

        def believe_and_note(loss: Loss | None, *, is_counted: bool) -> None:
            believe(loss, is_counted=is_counted)
            if loss is not None and is_counted:
                self.losses.append(str(loss))

        self.query._believe = believe_and_note  # type: ignore[method-assign]
        self.reader = CepheidStreamReader(_SCHEMA, self._options)
        self.reader._opened = self.query

    def _new_keeper(self, name: str) -> LeaseKeeper:
        keeper = LeaseKeeper(ModelLease(self.world, name), renew_s=0.0, at_once=1)  # type: ignore[arg-type]
        keeper._start = lambda: None  # type: ignore[method-assign]
        return keeper

    def _resolve(self, snapshot: Snapshot) -> dict[str, MessagePosition]:
        starts: dict[str, MessagePosition] = {}
        for topic, view in snapshot.views.items():
            ledgers = view.history.ledgers
            at = MessagePosition(ledgers[-1].ledger_id, ledgers[-1].last_entry_id + 1)
            starts[topic] = at if self._from_latest else MessagePosition(ledgers[0].ledger_id, 0)
        return starts

    def background(self) -> None:
        """What its threads do by turns."""
        if self.world.chance.random() < 0.5 and self.state._snapshot is not None:
            self.state.look()
        if self.query._keeper is not None and self.world.chance.random() < 0.5:
            self.query._keeper._work()

    # Spark

    def run(self, triggers: int, *, available_now: bool = False) -> None:
        """One run of the query: ProcessDied and DataLossError end it."""
        self._between()
        limit = self.reader.getDefaultReadLimit()
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        if len(self.offsets) > self.committed:
            self._between()
            self._execute(len(self.offsets) - 1)
        idle = 0
        for _ in range(triggers):
            self._between()
            idle = 0 if self._trigger(limit) else idle + 1
            if idle and (available_now or idle > _IDLE_TRIGGERS):
                return
        assert triggers < MANY, "it never ends"

    def _between(self) -> None:
        self.disturb(self)

    def _trigger(self, limit: ReadLimit) -> bool:
        start = self._initial() if not self.offsets else json.loads(self.offsets[-1])
        self._between()
        end = self.reader.latestOffset(start, limit)
        text = json.dumps(end)
        self._between()
        self.reader.reportLatestOffset()
        if text == json.dumps(start):
            return False
        assert end != start, f"equal offsets, two texts: {text}"
        if not self.offsets:
            self.since = self._options.start.publish_time_ms or 0
        self.offsets.append(text)
        self._between()
        if len(self.offsets) > 1:
            self.reader.commit(json.loads(self.offsets[-2]))
            self._between()
        self._execute(len(self.offsets) - 1)
        return True

    def _initial(self) -> dict[str, Any]:
        initial = self.reader.initialOffset()
        assert self.reader.initialOffset() is not None
        return json.loads(json.dumps(initial))  # type: ignore[no-any-return]

    def _execute(self, number: int) -> None:
        start = json.loads(self.offsets[number - 1]) if number else self._initial()
        end = json.loads(self.offsets[number])
        self._between()
        partitions = [each for each in self.reader.partitions(start, end) if isinstance(each, TaskPartition)]
        self._between()
        rows: dict[str, list[int]] = {}
        for partition in partitions:
            since_ms = partition.spec.row_filter.publish_from_ms or 0
            for piece in partition.task.pieces:
                try:
                    read = self.world.read(piece.topic, piece.ledger_id, piece.first_entry_id, piece.last_entry_id)
                except DataLossError as error:
                    if self._options.spec.fail_on_data_loss:
                        raise
                    self.losses.append(str(error))
                    continue
                rows.setdefault(piece.topic, []).extend(number for number in read if number >= since_ms)
        before = self.batches.setdefault(number, rows)
        if self._options.spec.fail_on_data_loss:
            assert before == rows, f"batch {number} was {before}, repeated it is {rows}"
        self.batches[number] = rows
        self._between()
        self.committed = number + 1

    # The judgement

    def rows(self, topic: str) -> list[int]:
        return [number for _, batch in sorted(self.batches.items()) for number in batch.get(topic, ())]

    def expected(self, topic: str) -> list[int]:
        """All that is acknowledged from where the offsets say that the topic begins, and not older than the query's start."""
        froms = [json.loads(text).get("from", {}) for text in self.offsets]
        first = next((tuple(each[topic][:2]) for each in froms if topic in each), None)
        written = self.world.written[topic]
        if first is None:
            assert not self.offsets or not self.rows(topic)
            return []
        places = zip(written, self.world.places[topic], strict=True)
        return [number for number, place in places if place >= first and number >= self.since]
