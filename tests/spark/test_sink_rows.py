"""Rows to messages, without Spark's JVM: which column is what, the order of rows, payloads of records."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from cepheid_scan import BadOptionError
from cepheid_spark.sink_records import AVRO, JSON, RecordEncoder, definition_of
from cepheid_spark.sink_rows import RowPlan, SinkRowError, plan_rows
from tests.spark.spark_types import columns

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 123456, UTC)
TIME = pa.timestamp("us", tz="UTC")
MAP = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    ("schema", "parts", "fields"),
    [
        ("value binary", {"value": 0}, ()),
        ("key string; value string; event_time timestamp", {"key": 0, "value": 1, "event_time": 2}, ()),
        ("value binary; __key string; __eventTime bigint", {"value": 0, "key": 1, "event_time": 2}, ()),
        ("value binary; properties map<string,string>; deliver_at timestamp", {"value": 0, "properties": 1, "deliver_at": 2}, ()),
        ("id bigint; key string; __key string", {"key": 2}, (0, 1)),
    ],
)
def test_columns_are_parts_of_a_message_or_fields_of_a_record(schema: str, parts: dict[str, int], fields: tuple[int, ...]) -> None:
    plan = plan_rows(columns(schema), has_topic=True, encode=None)
    assert (plan.parts, plan.fields) == (parts, fields)


def test_the_option_topic_wins_over_the_column() -> None:
    schema = columns("value binary; topic string")
    assert plan_rows(schema, has_topic=False, encode=None).parts == {"value": 0, "topic": 1}
    assert plan_rows(schema, has_topic=True, encode=None).parts == {"value": 0}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("value array<string>", "column value is array<string>, which is neither a payload"),
        ("value binary; key binary", "cast it to string"),
        ("value binary; event_time string", "milliseconds since 1970"),
        ("value binary; publish_time timestamp; ledger_id bigint", "df.drop('publish_time', 'ledger_id')"),
        ("value binary; orderingkey binary", "did you mean ordering_key?"),
        ("value binary; price int", "encode=avro"),
        ("value binary; key string; __key string", "both the key"),
        ("__key string", "nothing to write"),
    ],
)
def test_a_column_that_cannot_be_written_is_refused(schema: str, said: str) -> None:
    with pytest.raises(BadOptionError) as caught:
        plan_rows(columns(schema), has_topic=True, encode=None)
    assert said in str(caught.value)


def test_a_topic_is_needed() -> None:
    with pytest.raises(BadOptionError, match="which topic"):
        plan_rows(columns("value binary"), has_topic=False, encode=None)


def test_each_part_of_a_row_is_that_of_its_message() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(["a", None]),
            "value": pa.array(["x", ""]),
            "properties": pa.array([[("b", "2"), ("a", "1")], None], MAP),
            "event_time": pa.array([MOMENT, None], TIME),
            "deliver_at": pa.array([None, 17], pa.int64()),
            "ordering_key": pa.array([b"o", None]),
        }
    )
    plan = RowPlan({name: index for index, name in enumerate(batch.schema.names)})
    messages = plan.messages(batch, None)
    assert messages.payloads == [b"x", b""]
    assert messages.keys == ["a", None], "a null key: a message without one"
    assert messages.properties == [{"a": "1", "b": "2"}, None]
    assert messages.event_times == [1_772_366_400_123, None]
    assert messages.deliver_at == [None, 17]
    assert messages.ordering_keys == [b"o", None]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"value": pa.array([None], pa.binary())}, "row 7 of its task has neither value nor key"),
        ({"topic": pa.array([None], pa.string())}, "row 7 of its task has no topic"),
        ({"properties": pa.array([[("a", None)]], MAP)}, "the property 'a' is null"),
        ({"event_time": pa.array([-5], pa.int64())}, "event_time is before 1970"),
    ],
)
def test_a_row_that_is_no_message_is_named(column: dict[str, Any], said: str) -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x"]), **column})
    plan = RowPlan({name: index for index, name in enumerate(batch.schema.names)})
    with pytest.raises(SinkRowError) as caught:
        plan.messages(batch, None, first_row=7)
    assert said in str(caught.value)


def test_rows_are_sorted_alike_in_whatever_order_they_come() -> None:
    chance = random.Random(5)
    rows = [
        {
            "value": b"%d" % (number % 7),
            "event_time": chance.choice([None, 5, 9]),
            "properties": chance.choice([None, [("a", "1")]]),
        }
        for number in range(200)
    ]
    schema = pa.schema({"value": pa.binary(), "event_time": pa.int64(), "properties": MAP})
    plan = RowPlan({"value": 0, "event_time": 1, "properties": 2})

    def sort() -> pa.Table:
        chance.shuffle(rows)
        return plan.in_order(pa.Table.from_pylist(rows, schema))

    first, second = sort(), sort()
    assert first.to_pylist() == second.to_pylist()
    assert plan.content(first) == plan.content(second)
    assert plan.content(first) != plan.content(first.slice(1))
    times = [time for time in first.column("event_time").to_pylist() if time is not None]
    assert times == sorted(times), "by event time first"


def test_the_zone_of_the_session_does_not_tell_rows_apart() -> None:
    plan = RowPlan({"value": 0, "event_time": 1})
    tables = [
        pa.table({"value": [b"x"], "event_time": pa.array([MOMENT], pa.timestamp("us", tz=zone))})
        for zone in ("UTC", "Europe/Paris")
    ]
    first, second = (plan.content(plan.in_order(table)) for table in tables)
    assert first == second


RECORD = (
    "id bigint; name string; at timestamp; day date; price decimal(10,2); "
    "tags array<string>; more map<string,int>; inner struct<a:int>"
)
VALUES: dict[str, Any] = {
    "id": 3, "name": "n", "at": MOMENT, "day": date(2026, 3, 1), "price": Decimal("1.50"), "tags": ["x", None], "more": [("k", 1)],
    "inner": {"a": None},
}  # fmt: skip


def test_records_are_encoded_as_avro_by_a_schema_made_of_the_columns() -> None:
    schema = columns(RECORD)
    definition = definition_of(schema)
    payload = RecordEncoder(AVRO, definition, schema).encode(VALUES)
    import io

    read: Any = fastavro.schemaless_reader(io.BytesIO(payload), fastavro.parse_schema(definition), None)
    assert read == {**VALUES, "more": {"k": 1}}


def test_records_are_encoded_as_json_with_numbers_for_times() -> None:
    schema = columns(RECORD)
    read = json.loads(RecordEncoder(JSON, definition_of(schema), schema).encode(VALUES))
    assert read["at"] == 1_772_366_400_123_456
    assert (read["day"], read["price"], read["more"], read["inner"]) == (20513, "1.50", {"k": 1}, {"a": None})


ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "paid_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "DONE"]}, "default": "NEW"},
    ],
}


def test_the_schema_of_the_topic_decides_and_fields_without_a_column_are_their_default() -> None:
    encoder = RecordEncoder(JSON, ORDER, columns("id int; paid_at timestamp"))
    assert json.loads(encoder.encode({"id": 1, "paid_at": MOMENT})) == {
        "id": 1, "paid_at": 1_772_366_400_123, "note": None, "state": "NEW",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("id bigint", "a field paid_at without a default"),
        ("id string; paid_at timestamp", "column id must be tinyint or smallint or int or bigint"),
        ("id bigint; paid_at bigint", "column paid_at must be timestamp"),
        ("id bigint; paid_at timestamp; nota string", "did you mean note?"),
    ],
)
def test_columns_that_do_not_fit_the_topics_schema_are_refused(schema: str, said: str) -> None:
    with pytest.raises(BadOptionError) as caught:
        RecordEncoder(JSON, ORDER, columns(schema))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"id": None, "state": "NEW"}, "id is null"), ({"id": 1, "state": "OLD"}, "state is 'OLD', and the schema has NEW, DONE")],
)
def test_a_value_that_does_not_fit_names_its_field(values: dict[str, Any], said: str) -> None:
    encoder = RecordEncoder(JSON, ORDER, columns("id int; paid_at timestamp; state string"))
    with pytest.raises(ValueError, match=said):
        encoder.encode({"paid_at": MOMENT, **values})
