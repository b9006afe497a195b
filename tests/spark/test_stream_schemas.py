"""A typed stream and the schemas of its topics: what the rows show, what tasks decode with, what ends a query before its offset."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from cepheid_decode import BadOptionError, ScanSpec, ScanTask, SchemaVersion
from cepheid_decode.shared_schema import rows_history
from cepheid_spark.offsets import StreamOffset
from cepheid_spark.options import parse_options
from cepheid_spark.spark_schema import rows_schema, with_reader_version
from cepheid_spark.stream_query import StreamQuery
from cepheid_spark.stream_reader import CepheidStreamReader
from cepheid_spark.stream_state import StreamState
from tests.decode.typed.typed_support import record, schema_version
from tests.spark.test_stream_query import A, B, Bench, at, ledger

OLD = record(("a", "int"))
NEW = {**OLD, "fields": [*OLD["fields"], {"name": "b", "type": ["null", "int"], "default": None}]}
OTHER = record(("c", "string"))
V0, V1 = schema_version("AVRO", OLD, 0), schema_version("AVRO", NEW, 1)
BORN_NEW = schema_version("AVRO", NEW, 0)
DIFFERENT = schema_version("AVRO", OTHER, 0)


class TypedBench(Bench):
    """Each process loads the schema of the rows, as Spark's load() does."""

    def __init__(self, **options: str) -> None:
        self.shown: tuple[SchemaVersion, ...] = ()
        super().__init__(readMode="typed", **options)

    def begin(self) -> None:
        super().begin()
        self.state._schemas = True

    def load(self) -> None:
        self.begin()
        options = self.query._options
        self.shown = rows_history(self.known.plan(sorted(self.known.chains), schemas=True), options.spec.reader_version)
        options = with_reader_version(options, self.shown)
        state = StreamState(self.known, self.known, options.topics, discovery_s=0.0, retry_s=0.0, schemas=True)  # type: ignore[arg-type]
        state._start = lambda: None  # type: ignore[method-assign]
        self.state, self.query = state, StreamQuery(options, state, None, self._starts, self.shown)

    def writers(self, start: StreamOffset, end: StreamOffset) -> dict[str, tuple[SchemaVersion, ...]]:
        """What messages of each topic of the batch are decoded with, as tasks on another machine are told: with the reader that
        load() made, and with one that was made with the first batch and knows nothing."""
        told, untold = self.specs(start, end, self.shown), self.specs(start, end, None)
        assert told == untold
        found: dict[str, tuple[SchemaVersion, ...]] = {}
        for topics, spec in told:
            assert spec.schemas == self.shown
            found |= {topic: dict(spec.writers).get(topic, spec.schemas) for topic in topics}
        return found

    def specs(
        self, start: StreamOffset, end: StreamOffset, schemas: tuple[SchemaVersion, ...] | None
    ) -> list[tuple[list[str], ScanSpec]]:
        """Of each task its topics, and what it reads by. `schemas`: as load() found them; None: the user gave the columns."""
        given = parse_options(self.given, streaming=True)
        schema = rows_schema(self.query._options, self.shown)
        planner, reader = (CepheidStreamReader(schema, given, schemas) for _ in range(2))
        planner._opened = self.query
        scanned: list[tuple[list[str], ScanSpec]] = []

        def scan_task(task: ScanTask, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
            scanned.append(([piece.topic for piece in task.pieces], spec))
            return iter(())

        with mock.patch("cepheid_spark.spark_schema.load_topic_schemas", return_value=self.shown):
            parts: list[Any] = pickle.loads(pickle.dumps(list(planner.partitions(start.to_json(), end.to_json()))))
        with mock.patch("cepheid_scan.scan_task.scan_task", scan_task):  # and nobody loads schemas any more
            for part in parts:
                list(reader.read(part))
        return scanned


def idle() -> tuple[TypedBench, StreamOffset]:
    """At the end of a topic with one version."""
    bench, start = TypedBench(), at(a=(9, 1))
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    bench.known.schemas[A] = (V0,)
    bench.load()
    assert bench.latest(start) is start
    return bench, start


def both(bench: TypedBench, a: tuple[SchemaVersion, ...], b: tuple[SchemaVersion, ...]) -> None:
    bench.known.chains = {A: [ledger(7, 5, is_open=True)], B: [ledger(9, 5, is_open=True)]}
    bench.known.schemas = {A: a, B: b}
    bench.load()


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        ((V0, V1), (V0,), V1),  # producers of B are not upgraded yet
        ((V0,), (V0, V1), V1),
        ((V0, V1), (BORN_NEW,), V1),  # B was made after the upgrade
        ((V0,), (BORN_NEW,), BORN_NEW),
        ((V0, V1), (V0, V1), V1),
        ((V0, DIFFERENT), (V0, DIFFERENT), DIFFERENT),  # alike, whatever they went through
    ],
)
def test_topics_of_one_schema_in_different_versions_are_read_together(
    a: tuple[SchemaVersion, ...], b: tuple[SchemaVersion, ...], shown: SchemaVersion
) -> None:
    bench = TypedBench(topics="a,b")
    both(bench, a, b)
    assert bench.shown[-1].definition == shown.definition
    start = at(a=(7, 1), b=(9, 1))
    end = bench.latest(start)
    assert bench.writers(start, end) == {A: a, B: b}, "each by its own topic's numbers"


def test_a_version_that_is_younger_than_the_last_look_is_read_and_the_columns_stay() -> None:
    bench, start = idle()
    bench.known.schemas[A] = (V0, V1)
    bench.known.moved[A, 9] = 4  # a bookie tells of entries; nobody has looked at the topic since
    end = bench.latest(start)
    assert bench.writers(start, end) == {A: (V0, V1)}
    assert bench.query.spec(end, ("a",), ()).reader_version == V0.version
    bench.known.schemas[A] = (V0, V1, schema_version("AVRO", NEW, 2))
    bench.load()
    assert bench.shown[-1].version == (2).to_bytes(8, "big")
    assert len(bench.writers(start, end)[A]) == 3, "the batch of the checkpoint, repeated after a restart"


@pytest.mark.parametrize("schemas", [(), (DIFFERENT,)])
def test_a_topic_that_holds_nothing_does_not_matter(schemas: tuple[SchemaVersion, ...]) -> None:
    """A consumer may be there before the first producer."""
    bench = TypedBench(topics="a,b")
    bench.known.chains[A] = [ledger(7, 5, is_open=True)]
    bench.known.schemas[A] = (V0, V1)
    bench.load()
    start = at(a=(7, 1))
    bench.known.chains[B], bench.known.schemas[B] = [ledger(9, 0, is_open=True)], schemas
    bench.state.look()
    end = bench.latest(start)
    assert bench.writers(start, end) == {A: (V0, V1)}
    bench.load()
    assert bench.shown == (V0, V1)
    assert bench.writers(start, end) == {A: (V0, V1)}
    bench.known.moved[A, 7] = 9
    assert bench.writers(end, bench.latest(end)) == {A: (V0, V1)}


@pytest.mark.parametrize(("schemas", "why"), [((), "it has no schema"), ((DIFFERENT,), "field 'a'")])
def test_a_topic_that_the_rows_cannot_show_ends_the_query_before_its_offset(schemas: tuple[SchemaVersion, ...], why: str) -> None:
    bench = TypedBench(topics="a,b")
    bench.known.chains[A] = [ledger(7, 5, is_open=True)]
    bench.known.schemas[A] = (V0, V1)
    bench.load()
    start = at(a=(7, 1))
    bench.known.chains[B], bench.known.schemas[B] = [ledger(9, 3, is_open=True)], schemas
    bench.state.look()
    with pytest.raises(BadOptionError, match=f"{B}: .*{why}.*leave it out of the topics"):
        bench.latest(start)
    if schemas:
        with pytest.raises(BadOptionError, match=f"{A} and {B} have different schemas"):
            bench.load()
    del bench.known.chains[B]
    bench.load()
    end = bench.latest(start)
    assert bench.writers(start, end) == {A: (V0, V1)}


def test_a_first_schema_that_is_younger_than_the_last_look_is_looked_for() -> None:
    bench = TypedBench(topics="a,b")
    both(bench, (V0,), ())
    bench.known.chains[B] = [ledger(9, 0, is_open=True)]
    bench.load()
    start = at(a=(7, 4))
    assert bench.latest(start) is start
    bench.known.schemas[B] = (V0,)
    bench.known.moved[B, 9] = 2
    end = bench.latest(start)
    assert bench.writers(start, end) == {B: (V0,)}


def test_a_batch_of_an_earlier_version_that_names_such_a_topic_says_so_and_goes_on_without_it() -> None:
    bench = TypedBench(topics="a,b", failOnDataLoss="false")
    both(bench, (V0,), ())
    start = at(a=(7, 1), b=(9, 1))
    end = StreamOffset(at(a=(7, 4), b=(9, 4)).ends, cut={A: 100, B: 100})
    with pytest.raises(BadOptionError, match=f"{B}: .*it has no schema"):
        bench.writers(start, end)
    del bench.known.chains[B]
    bench.load()
    assert bench.writers(start, end) == {A: (V0,)}


def test_a_topic_made_anew_without_a_schema_is_not_read_with_the_old_one() -> None:
    bench = TypedBench(failOnDataLoss="false")
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    bench.known.schemas[A] = (V0,)
    bench.load()
    bench.known.incarnation, bench.known.schemas[A] = "another", ()
    bench.known.chains[A] = [ledger(12, 3, is_open=True)]
    bench.state.look()
    with pytest.raises(BadOptionError, match=f"{A}: .*it has no schema"):
        bench.latest(replace(at(a=(9, 1)), incarnations={A: "i"}))


def test_a_schema_that_is_deleted_between_two_looks_ends_the_query_before_its_offset() -> None:
    """By force: else its versions stay readable."""
    bench, start = idle()
    bench.known.moved[A, 9] = 4
    plans = bench.known.plans
    end = bench.latest(start)
    bench.known.schemas[A] = ()
    assert bench.writers(start, end) == {A: (V0,)}, "by the look that the offset was given out by"
    assert bench.known.plans == plans + 1
    bench.known.moved[A, 9] = 7
    with pytest.raises(BadOptionError, match=f"{A}: .*it has no schema"):
        bench.latest(end)


def test_long_histories_hardly_make_tasks_larger() -> None:
    """A micro-batch has up to 50,000 tasks, each of which is pickled by itself."""
    versions = tuple(
        schema_version("AVRO", record(*((f"a_field_{field}", "string") for field in range(60 + number))), number)
        for number in range(50)
    )
    bench = TypedBench(topics="a,b", targetPartitionBytes="1mb")
    both(bench, versions, versions[:25])
    start = at(a=(7, 1), b=(9, 1))
    end = bench.latest(start)
    given = parse_options(bench.given, streaming=True)
    schema = rows_schema(bench.query._options, bench.shown)
    sizes = []
    for schemas in (bench.shown, None):
        planner = CepheidStreamReader(schema, given, schemas)
        planner._opened = bench.query
        with mock.patch("cepheid_spark.spark_schema.load_topic_schemas", return_value=bench.shown):
            parts = planner.partitions(start.to_json(), end.to_json())
        sizes.append(max(len(pickle.dumps(part)) for part in parts))
    assert sizes[0] < 4_096
    assert sizes[1] < 16_384
