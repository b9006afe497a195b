"""The schemas of topics: registered, numbered, and compared when producers and consumers connect.

    producer ──► known (same meaning, in force)? its version ──► may it be added? ──► compatible? ──► the next version
    consumer ──► idle topic without a schema? added ──► else: can it read the existing data?
Rules
1. A topic's partitions, and the topics of both domains under one name, share one history. Numbers rise and are never reused.
2. Decisions use the history as read from metadata; a change is a compare-and-set on it, and a broker that loses decides again. So
   however many brokers register at once, there is one history, and each version was compared with those before it.
3. Deleted versions stay readable by number, for the entries that carry it, unless they are deleted by force.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cepheid_broker.errors import IncompatibleSchemaError, InvalidSchemaError, SchemaNotFoundError, TooManySchemasError
from cepheid_broker.policies import SchemaCompatibility, TopicPolicies
from cepheid_broker.schemas.compatibility import check_reader, check_successor, compares_every_version, in_force
from cepheid_broker.schemas.definition import Definition, content_hash, parse_definition
from cepheid_broker.schemas.history_store import HistoryStore, cut
from cepheid_broker.schemas.schema import NO_VERSION, UNREGISTERED, Schema, SchemaType, encode_version
from cepheid_metadata import (
    BadVersionError,
    Found,
    MetadataStore,
    SchemaDefinition,
    SchemaHistory,
    SchemaVersion,
    list_schemas,
    topic_records,
)
from cepheid_ports import Ports
from cepheid_wire import NON_PERSISTENT, PERSISTENT, NamespaceName, TopicName

log = logging.getLogger(__name__)

MAX_HASHES = 1000  # cached; 100 bytes each
MAX_VERSIONS = 1000  # of one topic: each change writes all rows, about 250 bytes each
MAX_HISTORY_BYTES = 32 << 20  # of definitions, including deleted ones, as one call may ask for all of them


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    version: int
    schema: Schema
    created_at_ms: int


class SchemaRegistry:
    def __init__(self, store: MetadataStore, ports: Ports) -> None:
        self._store = store
        self._histories = HistoryStore(store)
        self._topics = topic_records(store)
        self._ports = ports
        self._hashes: dict[bytes, str] = {}  # digest of a sent schema → hash of its meaning
        self.registered = 0
        self.refused = 0

    def __repr__(self) -> str:
        return f"<SchemaRegistry, {self.registered} registered, {self.refused} refused>"

    # Connecting

    async def for_producer(self, topic: TopicName, schema: Schema | None, policies: TopicPolicies) -> bytes:
        """Return the version that the producer's messages carry, as sent in PRODUCER_SUCCESS.

        Raises IncompatibleSchemaError, InvalidSchemaError.
        """
        if schema is not None:
            version = await self.register(topic, schema, policies.schema_compatibility, may_add=policies.schema_auto_update)
            return encode_version(version)
        if policies.schema_validation_enforced and await self._current(topic):
            text = "the topic has one, and producers without are refused (policy schemaValidationEnforced)"
            raise self._refusal(topic, IncompatibleSchemaError(text))
        return NO_VERSION

    async def for_consumer(self, topic: TopicName, schema: Schema | None, policies: TopicPolicies, *, topic_is_idle: bool) -> None:
        """Check or register a consumer's schema. `topic_is_idle`: no producer, no consumer, no data.

        Raises IncompatibleSchemaError, InvalidSchemaError.
        """
        if schema is None:
            return
        current = await self._current(topic)
        if current:
            await self._check_consumer(topic, schema, in_force(policies.schema_compatibility), current)
        elif topic_is_idle:
            await self.register(topic, schema, policies.schema_compatibility, may_add=policies.schema_auto_update)
        else:
            text = "the topic has none but is in use, so its data is bytes: subscribe without a schema, or upload one"
            raise self._refusal(topic, IncompatibleSchemaError(text))

    async def _check_consumer(
        self, topic: TopicName, schema: Schema, strategy: SchemaCompatibility, current: tuple[SchemaVersion, ...]
    ) -> None:
        own_hash = self._hash_of(topic, schema)
        rows = current if compares_every_version(strategy, for_consumer=True) else current[-1:]
        others = [row for row in reversed(rows) if row.content_hash != own_hash]
        if not others:
            return
        definition = self._parse(topic, schema)
        try:
            for row in others:
                if (written := await self._definition(topic, row)) is not None:
                    check_reader(strategy, definition, written, row.version)
        except (IncompatibleSchemaError, InvalidSchemaError) as error:
            raise self._refusal(topic, error) from None

    # Registering

    async def register(self, topic: TopicName, schema: Schema, strategy: SchemaCompatibility, *, may_add: bool = True) -> int:
        """Return the version of this schema, registering a new one if it has none.

        Raises IncompatibleSchemaError, InvalidSchemaError.
        """
        own_hash = self._hash_of(topic, schema)
        stored = SchemaDefinition(type=schema.type.value, data=schema.data, properties=dict(schema.properties))
        while True:
            found = await self._histories.get(topic)
            current = found.record.current if found else ()
            for row in reversed(current):
                if row.content_hash == own_hash:
                    return row.version
            if not may_add:
                text = f"the topic does not have this one ({schema.type.value}), and clients may not add any"
                raise self._refusal(topic, IncompatibleSchemaError(f"{text} (policy isAllowAutoUpdateSchema)"))
            await self._check_successor(topic, schema, in_force(strategy), current)
            if found is None:
                found = await self._histories.get_or_create(topic)
                if found.record.versions:
                    continue  # another registration was faster
            try:
                return await self._append(topic, found, schema.type, own_hash, stored)
            except BadVersionError:
                continue

    async def check(self, topic: TopicName, schema: Schema, strategy: SchemaCompatibility) -> None:
        """Check what `register` would, without registering."""
        own_hash = self._hash_of(topic, schema)
        current = await self._current(topic)
        if all(row.content_hash != own_hash for row in current):
            await self._check_successor(topic, schema, in_force(strategy), current)

    async def _check_successor(
        self, topic: TopicName, schema: Schema, strategy: SchemaCompatibility, current: tuple[SchemaVersion, ...]
    ) -> None:
        rows = current if compares_every_version(strategy) else current[-1:]
        if not rows:
            return
        definition = self._parse(topic, schema)
        try:
            for row in reversed(rows):
                if (old := await self._definition(topic, row)) is not None:
                    check_successor(strategy, definition, old, row.version)
        except (IncompatibleSchemaError, InvalidSchemaError) as error:
            raise self._refusal(topic, error) from None

    async def _append(
        self, topic: TopicName, found: Found[SchemaHistory], kind: SchemaType, own_hash: str, definition: SchemaDefinition
    ) -> int:
        history = found.record
        parts = cut(definition)
        size_bytes = sum(map(len, parts))
        self._check_room(topic, history, size_bytes)
        row = SchemaVersion(
            version=history.next_version,
            type=kind.value,
            content_hash=own_hash,
            token=f"{self._ports.random.getrandbits(64):016x}",
            parts=len(parts),
            size_bytes=size_bytes,
            created_at_ms=self._ports.wall_ms(),
        )
        changed = history.replace(next_version=row.version + 1, versions=(*history.versions, row))
        await self._histories.append(topic, found, changed, row, parts)
        self.registered += 1
        extra = {"topic": str(topic.base), "version": row.version, "type": row.type, "size_bytes": size_bytes}
        log.info("schema.registered", extra=extra)
        return row.version

    def _check_room(self, topic: TopicName, history: SchemaHistory, size_bytes: int) -> None:
        count, used_bytes = len(history.versions), sum(row.size_bytes for row in history.versions)
        if count >= MAX_VERSIONS:
            raise self._refusal(topic, TooManySchemasError(f"there are {count} versions already"))
        if used_bytes + size_bytes > MAX_HISTORY_BYTES:
            text = f"{count} versions have {used_bytes} bytes; with {size_bytes} more they would have over {MAX_HISTORY_BYTES}"
            raise self._refusal(topic, TooManySchemasError(text))

    # Reading

    async def latest(self, topic: TopicName) -> RegisteredSchema:
        """Return the latest version in force. Raises SchemaNotFoundError."""
        while current := await self._current(topic):
            if (schema := await self._load(topic, current[-1])) is not None:
                return schema
        raise SchemaNotFoundError(f"topic {topic.base} has no schema", topic=str(topic))

    async def get(self, topic: TopicName, version: int) -> RegisteredSchema:
        """Return a version, even a deleted one, for the entries that carry it. Raises SchemaNotFoundError."""
        found = await self._histories.get(topic)
        row = found.record.find(version) if found else None
        schema = await self._load(topic, row) if row else None
        if schema is None:
            raise SchemaNotFoundError(f"topic {topic.base} has no schema of version {version}", topic=str(topic), version=version)
        return schema

    async def versions(self, topic: TopicName) -> AsyncIterator[RegisteredSchema]:
        """Yield all versions in force, oldest first."""
        for row in await self._current(topic):
            if (schema := await self._load(topic, row)) is not None:
                yield schema

    async def version_of(self, topic: TopicName, schema: Schema) -> int:
        """Return the version in force with the same meaning. Raises SchemaNotFoundError, InvalidSchemaError."""
        own_hash = self._hash_of(topic, schema)
        for row in reversed(await self._current(topic)):
            if row.content_hash == own_hash:
                return row.version
        raise SchemaNotFoundError(f"topic {topic.base} does not have this {schema.type.value} schema", topic=str(topic))

    # Deleting

    async def delete(self, topic: TopicName, *, force: bool = False) -> int:
        """End all versions; with `force` also delete them. Return the version number that this used.

        Raises SchemaNotFoundError.
        """
        while True:
            found = await self._histories.get(topic)
            history = found.record if found else SchemaHistory()
            if found is None or not (history.versions if force else history.current):
                raise SchemaNotFoundError(f"topic {topic.base} has no schema", topic=str(topic))
            number = history.next_version
            changed = history.replace(next_version=number + 1, current_from=number + 1, versions=() if force else history.versions)
            try:
                await self._histories.replace(topic, found, changed)
            except BadVersionError:
                continue
            log.info("schema.deleted", extra={"topic": str(topic.base), "version": number, "force": force})
            return number

    async def on_topic_deleting(self, topic: TopicName) -> None:
        """Delete the history of a closed topic whose record is deleted next, unless another topic uses it (rule 1)."""
        base = topic.base
        for domain in (PERSISTENT, NON_PERSISTENT):
            user = TopicName(domain, base.namespace, base.local_name)
            if user != topic and await self._topics.exists(user):
                return
        await self._delete_all(base)

    async def on_namespace_deleting(self, namespace: NamespaceName) -> None:
        """Delete the schemas of a namespace, including those uploaded for topics that were never created."""
        for name in await list_schemas(self._store, namespace.tenant, namespace.local_name):
            await self._delete_all(TopicName(PERSISTENT, namespace, name))

    async def _delete_all(self, topic: TopicName) -> None:
        while (found := await self._histories.get(topic)) is not None:
            try:
                await self._histories.delete(topic, found)
            except BadVersionError:
                await asyncio.sleep(0)  # another caller is adding a version, in several steps

    # Inside

    async def _current(self, topic: TopicName) -> tuple[SchemaVersion, ...]:
        found = await self._histories.get(topic)
        return found.record.current if found else ()

    async def _load(self, topic: TopicName, row: SchemaVersion) -> RegisteredSchema | None:
        stored = await self._histories.definition(topic, row)
        if stored is None:
            return None
        return RegisteredSchema(row.version, Schema(SchemaType(stored.type), stored.data, stored.properties), row.created_at_ms)

    async def _definition(self, topic: TopicName, row: SchemaVersion) -> Definition | None:
        loaded = await self._load(topic, row)
        return None if loaded is None else parse_definition(loaded.schema)

    def _hash_of(self, topic: TopicName, schema: Schema) -> str:
        """Return the hash of its meaning, cached, as thousands of producers may reconnect with the same megabyte."""
        sent = _digest(schema)
        known = self._hashes.get(sent)
        if known is None:
            known = content_hash(self._parse(topic, schema))
            if len(self._hashes) >= MAX_HASHES:
                self._hashes.pop(next(iter(self._hashes)))
            self._hashes[sent] = known
        return known

    def _parse(self, topic: TopicName, schema: Schema) -> Definition:
        if schema.type in UNREGISTERED:
            raise InvalidSchemaError(f"type {schema.type.value} is for topics without a schema: it cannot be registered")
        try:
            return parse_definition(schema)
        except InvalidSchemaError as error:
            raise self._refusal(topic, error) from None

    def _refusal(self, topic: TopicName, error: IncompatibleSchemaError | InvalidSchemaError) -> Exception:
        self.refused += 1
        return type(error)(f"schema of topic {topic.base}: {error.args[0]}", topic=str(topic), **error.facts)


def _digest(schema: Schema) -> bytes:
    digest = hashlib.sha256(json.dumps([schema.type.value, sorted(schema.properties.items())]).encode())
    digest.update(schema.data)
    return digest.digest()
