"""Schema histories in metadata: read at each connect, changed by one compare-and-set.

    history (rows: version, hash, token) ──► definition of a row: its parts, joined
Rules
1. A row and its definition appear together: in one `multi`, or, if that is too large, first the parts and then the row together
   with a check that every part still exists. A row without a definition is never visible.
2. Keys of parts hold a random token, so two writers never share one; a writer that loses deletes its parts.
3. Parts without a row (after a crash) are deleted with the topic's history. They are swept under a check of its version, so that a
   row added meanwhile keeps its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_metadata import (
    MAX_REQUEST_BYTES,
    BadVersionError,
    Check,
    CorruptRecordError,
    Create,
    Delete,
    Found,
    KeyExistsError,
    MetadataStore,
    NoSuchKeyError,
    NotEmptyError,
    Op,
    SchemaDefinition,
    SchemaHistory,
    SchemaVersion,
    keys,
    schema_histories,
)
from cepheid_wire import TopicName

PART_BYTES = MAX_REQUEST_BYTES - 50_000  # leaves room for the key and the request's own bytes
SWEEP_GROUP = 100


class HistoryStore:
    """Histories by topic or partition, which share one. Changes raise BadVersionError: read again and decide."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._histories = schema_histories(store)

    async def get(self, topic: TopicName) -> Found[SchemaHistory] | None:
        return await self._histories.get(topic)

    async def get_or_create(self, topic: TopicName) -> Found[SchemaHistory]:
        while (found := await self._histories.get(topic)) is None:
            try:
                await self._histories.create(topic, SchemaHistory())
            except KeyExistsError:
                pass
        return found

    async def definition(self, topic: TopicName, row: SchemaVersion) -> SchemaDefinition | None:
        """Return the definition of a row; None if the version was deleted since the history was read."""
        parts: list[bytes] = []
        for key in self._part_keys(topic, row):
            part = await self._store.get(key)
            if part is None:
                await self._check_deleted(topic, row, key)
                return None
            parts.append(part.value)
        return SchemaDefinition.decode(b"".join(parts), keys.schema_part_key(topic, row.token, 0))

    async def _check_deleted(self, topic: TopicName, row: SchemaVersion, key: str) -> None:
        found = await self._histories.get(topic)
        if found is not None and row in found.record.versions:
            raise CorruptRecordError(f"{key} is gone, but version {row.version} is in the history of {topic.base}", key=key)

    async def append(
        self, topic: TopicName, found: Found[SchemaHistory], history: SchemaHistory, row: SchemaVersion, parts: Sequence[bytes]
    ) -> None:
        """Store `history`, whose last row is the new `row`, with its definition. Raises BadVersionError, with nothing changed."""
        creates = [Create(key, part) for key, part in zip(self._part_keys(topic, row), parts, strict=True)]
        change = self._histories.replace_op(topic, history, found.version)
        # The record may have been deleted and created again up to the same version: then the last row's token is gone.
        same = [Check(key, 0) for old in found.record.versions[-1:] for key in self._part_keys(topic, old)]
        ops: list[Op] = [change, *same, *creates]
        size_bytes = sum(len(op.key) for op in ops) + len(change.value) + sum(map(len, parts))
        staged = size_bytes > MAX_REQUEST_BYTES
        try:
            if not staged:
                await self._store.multi(ops)
            else:
                there = Check(change.key, found.version)  # else the part would create an empty record as its parent
                for create in creates:
                    await self._store.multi([there, create])
                await self._store.multi([change, *same, *(Check(create.key, 0) for create in creates)])
        except (BadVersionError, NoSuchKeyError) as error:
            if staged:
                await self._take_back(creates)
            raise BadVersionError(f"the schemas of {topic.base} were changed meanwhile", topic=str(topic.base)) from error

    async def _take_back(self, creates: Sequence[Create]) -> None:
        for create in creates:
            try:
                await self._store.delete(create.key, None)
            except NoSuchKeyError:  # already swept with the whole history
                pass

    async def replace(self, topic: TopicName, found: Found[SchemaHistory], history: SchemaHistory) -> None:
        """Store a change that adds no row, and delete the definitions of rows that it omits."""
        gone = [row for row in found.record.versions if row not in history.versions]
        deletes = [Delete(key, 0) for row in gone for key in self._part_keys(topic, row)]
        await self._changing(topic, [self._histories.replace_op(topic, history, found.version), *deletes])

    async def delete(self, topic: TopicName, found: Found[SchemaHistory]) -> None:
        """Delete the history and every definition."""
        await self._sweep(topic, found)
        deletes = [Delete(key, 0) for row in found.record.versions for key in self._part_keys(topic, row)]
        try:
            await self._changing(topic, [*deletes, self._histories.delete_op(topic, found.version)])
        except NotEmptyError:  # another caller is adding a version, and finds the history gone or has added it
            raise BadVersionError(f"the schemas of {topic.base} are being changed", topic=str(topic.base)) from None

    async def _sweep(self, topic: TopicName, found: Found[SchemaHistory]) -> None:
        root = keys.schemas_key(topic)
        listed = {key for row in found.record.versions for key in self._part_keys(topic, row)}
        strays = [key for name in await self._store.children(root) if (key := f"{root}/{name}") not in listed]
        for start in range(0, len(strays), SWEEP_GROUP):
            deletes = [Delete(key, 0) for key in strays[start : start + SWEEP_GROUP]]
            await self._changing(topic, [Check(root, found.version), *deletes])

    async def _changing(self, topic: TopicName, ops: Sequence[Op]) -> None:
        try:
            await self._store.multi(ops)
        except NoSuchKeyError as error:
            raise BadVersionError(f"the schemas of {topic.base} were changed meanwhile", topic=str(topic.base)) from error

    def _part_keys(self, topic: TopicName, row: SchemaVersion) -> list[str]:
        return [keys.schema_part_key(topic, row.token, part) for part in range(row.parts)]


def cut(definition: SchemaDefinition) -> list[bytes]:
    """Return the encoding in parts, each of which fits a request."""
    encoded = definition.encode()
    return [encoded[start : start + PART_BYTES] for start in range(0, len(encoded), PART_BYTES)]
