"""Checks by the driver before a write begins, so that impossible writes fail before any task runs.

columns ──► RowPlan        topic ──► number of partitions, schema ──► SinkPlan, pickled for the tasks
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import cepheid
from cepheid_decode import BadOptionError
from cepheid_spark.sink_options import SinkOptions
from cepheid_spark.sink_records import RecordEncoder, definition_of
from cepheid_spark.sink_rows import Encoder, RowPlan, plan_rows
from cepheid_spark.sink_sender import PayloadSchema, claim_properties, connect, open_producer
from cepheid_spark.sink_values import PRIMITIVE_KINDS, PrimitiveEncoder, ProtobufEncoder

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

PROTOBUF = "PROTOBUF_NATIVE"
"""Kinds of schemas by the client's name. The older PROTOBUF is not written: it lacks field numbers of nested messages."""


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """Data for the tasks. `counts`: the number of partitions of the write's topic. `schema`: that of records and of
    typed values; None: the column `value` has payloads.
    """

    options: SinkOptions
    rows: RowPlan
    counts: Mapping[str, int] = field(default_factory=dict)
    schema: cepheid.TopicSchema | None = None
    columns: StructType | None = None

    def encoder(self) -> Encoder | None:
        """Return the encoder. Raises BadOptionError if the columns do not fit the schema."""
        if self.schema is None:
            return None
        if self.columns is None:
            return PrimitiveEncoder(self.schema.kind, self.rows.value_type).encode
        if self.schema.kind == PROTOBUF:
            return ProtobufEncoder(self.schema.definition, self.columns).encode
        return RecordEncoder(self.schema.kind, json.loads(self.schema.definition), self.columns).encode

    def payload_schema(self) -> PayloadSchema:
        return PayloadSchema(self.schema)


def plan_sink(schema: StructType, options: SinkOptions) -> SinkPlan:
    """Return the plan. Raises BadOptionError, and the client's errors."""
    plan = SinkPlan(options, plan_rows(schema, has_topic=options.topic is not None, encode=options.encode))
    if plan.rows.has_records:
        from pyspark.sql.types import StructType

        plan = replace(plan, columns=StructType([schema.fields[index] for index in plan.rows.fields]))
    if options.topic is None:
        return _with_derived_schema(plan, "the rows") if plan.rows.has_records else plan
    return asyncio.run(_look_at_topic(plan, options.topic))


async def _look_at_topic(plan: SinkPlan, topic: str) -> SinkPlan:
    async with connect(plan.options) as client:
        count = await client.partitions(topic)
        plan = replace(plan, counts={topic: count})
        if plan.rows.has_records:
            plan = _with_schema(plan, topic, await client.topic_schema(topic))
        elif plan.rows.value_type != "binary":
            plan = _with_value_schema(plan, topic, await client.topic_schema(topic))
        plan.encoder()  # whether the columns fit
        await _try_to_open(client, plan, f"{topic}-partition-0" if count else topic)
    return plan


def _with_schema(plan: SinkPlan, topic: str, found: cepheid.TopicSchema | None) -> SinkPlan:
    """Return the plan with the current schema of the topic: a later one is used by the next micro-batch."""
    encode = plan.options.encode
    if found is None:
        return _with_derived_schema(plan, topic)
    if found.kind in PRIMITIVE_KINDS:
        raise BadOptionError(f"{topic} has a schema of kind {found.kind}, which has no fields: write one column value")
    if found.kind not in ("AVRO", "JSON", PROTOBUF):
        raise BadOptionError(
            f"{topic} has a schema of kind {found.kind}: write a column value with payloads that are encoded already, as binary"
        )
    if encode is not None and encode != found.kind.lower():
        raise BadOptionError(f"option encode: {topic} has a schema of kind {found.kind}: leave encode out", option="encode")
    return replace(plan, schema=found)


def _with_value_schema(plan: SinkPlan, topic: str, found: cepheid.TopicSchema | None) -> SinkPlan:
    """Return the plan for values. Text is a payload on topics without a primitive schema; other types need one."""
    if found is not None and found.kind in PRIMITIVE_KINDS:
        return replace(plan, schema=found)
    if plan.rows.value_type != "string":
        has = "no schema" if found is None else f"a schema of kind {found.kind}"
        raise BadOptionError(
            f"column value is {plan.rows.value_type}, which needs a topic with a primitive schema, and {topic} has {has}: cast it "
            "to binary or string, or give the fields of a record as columns",
            column="value",
        )
    return plan


def _with_derived_schema(plan: SinkPlan, where: str) -> SinkPlan:
    assert plan.columns is not None, "records have columns"
    if plan.options.encode is None:
        why = f"{where} has no schema" if plan.options.topic is not None else "a column names the topics"
        raise BadOptionError(
            f"{why}, and there is no column value: give encode=avro or encode=json, which makes a schema of the columns, or a "
            "column value",
            option="encode",
        )
    definition = json.dumps(definition_of(plan.columns)).encode()
    return replace(plan, schema=cepheid.TopicSchema(plan.options.encode.upper(), "Row", definition))


async def _try_to_open(client: cepheid.Client, plan: SinkPlan, topic: str) -> None:
    """Open a producer and close it: the broker checks whether the topic may be written, registers the schema, and deduplicates.

    Its name is the same each time: a topic remembers names, and there may be a micro-batch every second.
    """
    options = plan.options
    name = f"spark-check-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    try:
        claim = claim_properties(options, "check") if options.exactly_once else {}
        producer = await open_producer(client, options, topic, plan.payload_schema(), name, claim, waits=False)
    except cepheid.BusyError:
        return  # another write is checking the same
    await producer.close()
