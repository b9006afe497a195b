"""One schema for the rows of several topics."""

from __future__ import annotations

import json

import pytest

from cepheid_decode import BadOptionError, HistoryPlan, LedgerHistory, SchemaVersion, TopicHistory
from cepheid_decode.shared_schema import check_shown, histories_of, rows_history
from tests.decode.typed.typed_support import record, schema_version, version

A, B = "persistent://public/default/a", "persistent://public/default/b"
OLD = record(("a", "int"))
NEW = {**OLD, "fields": [*OLD["fields"], {"name": "b", "type": ["null", "int"], "default": None}]}
KEYED = {
    kind: SchemaVersion(version(0), "KEY_VALUE", bytes(8), {"key.schema.type": kind, "value.schema.type": "STRING"})
    for kind in ("STRING", "INT32")
}
RENAMED = {**NEW, "name": "other.R"}


def plan(a: tuple[SchemaVersion, ...], b: tuple[SchemaVersion, ...], *, entries: tuple[int, int] = (1, 1)) -> HistoryPlan:
    ledgers = [LedgerHistory(7, count - 1, True, count, None, 1, 1, (), b"") for count in entries]
    topics = tuple(TopicHistory(topic, -1, "i", (ledger,)) for topic, ledger in zip((A, B), ledgers, strict=True))
    return HistoryPlan(topics, {}, schemas={A: a, B: b})


def test_equal_schemas_are_one_whatever_their_properties_say() -> None:
    versions = (schema_version("AVRO", OLD),)
    assert rows_history(plan(versions, (schema_version("AVRO", OLD, note="x"),)), None) == versions
    assert rows_history(HistoryPlan((), {}), None) == ()
    assert rows_history(plan((), ()), None) == ()


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_the_later_version_is_shown_and_of_two_that_never_met_the_one_with_more(kind: str) -> None:
    old, new, born_new, renamed = (schema_version(kind, each, n) for each, n in ((OLD, 0), (NEW, 1), (NEW, 0), (RENAMED, 0)))
    less = schema_version(kind, OLD, 1)
    assert rows_history(plan((old,), (old, new)), None) == (old, new)
    assert rows_history(plan((born_new,), (born_new, less)), None) == (born_new, less), "a field was dropped"
    assert rows_history(plan((old,), (born_new,)), None) == (born_new,)
    assert rows_history(plan((old, new), (renamed,)), None) == (old, new), "a namespace is no other record"


def test_a_version_that_the_options_name_is_that_of_a_topic_that_has_it() -> None:
    old, new = schema_version("AVRO", OLD, 0), schema_version("AVRO", NEW, 1)
    assert rows_history(plan((old,), (old, new)), version(1)) == (old, new)
    assert rows_history(plan((old,), (old, new)), version(0)) == (old,)
    with pytest.raises(BadOptionError, match="no schema version 9"):
        rows_history(plan((old,), (old, new)), version(9))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (schema_version("AVRO", OLD), schema_version("JSON", record(("c", "string")))),
        (schema_version("JSON", NEW), schema_version("JSON", {**NEW, "name": "S"})),  # read by names, all of it would be null
        (schema_version("JSON", OLD), schema_version("JSON", record(("c", "string")))),
        (schema_version("STRING"), schema_version("INT32")),
        (KEYED["STRING"], KEYED["INT32"]),  # of one definition: it is empty
        (
            schema_version("PROTOBUF_NATIVE", {"rootMessageTypeName": "x.R"}),
            schema_version("PROTOBUF_NATIVE", {"rootMessageTypeName": "x.S"}),
        ),
    ],
)
def test_schemas_of_which_none_shows_the_other(one: SchemaVersion, other: SchemaVersion) -> None:
    with pytest.raises(BadOptionError, match=f"{A} and {B} have different schemas.*readMode=messages"):
        rows_history(plan((one,), (other,)), None)
    assert rows_history(plan((one,), (other,), entries=(1, 0)), None) == (one,)
    assert rows_history(plan((one,), (other,), entries=(0, 1)), None) == (other,)
    with pytest.raises(BadOptionError, match=f"{B}: its messages cannot be shown"):
        check_shown(one, {A: (one,), B: (other,)})


def test_key_and_value_are_compared_apart() -> None:
    def key_value(value: object) -> SchemaVersion:
        kinds = {"key.schema.type": "STRING", "value.schema.type": "JSON"}
        return SchemaVersion(version(0), "KEY_VALUE", json.dumps({"key": "", "value": value}).encode(), kinds)

    check_shown(key_value(NEW), {A: (key_value(OLD),)})
    with pytest.raises(BadOptionError, match="its record is S, not R"):
        check_shown(key_value(NEW), {A: (key_value({**NEW, "name": "S"}),)})


def test_histories_are_those_of_the_topics_that_are_asked_for_without_their_partitions() -> None:
    versions = (schema_version("STRING"),)
    known = HistoryPlan((), {}, schemas={A: versions, B: ()})
    assert histories_of(known, [f"{A}-partition-3", f"{A}-partition-4", B]) == {A: versions, B: ()}
