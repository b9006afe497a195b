"""A table in an Iceberg catalog, through pyiceberg: rows and their positions are committed in one snapshot.

    batches ──► append(rows, snapshot_properties={"cepheid.export": …}) ──► the catalog replaces the table's metadata, or refuses

Iceberg's catalogs accept a commit only if no other one was made to the table's branch since it was read, so no lock is needed.
New columns of the topic's schema are added to the table; columns removed from the schema stay, and are null in new rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from cepheid_lake.errors import ConcurrentExportError, LakeTargetError
from cepheid_lake.target import FORMAT, Committed, check_format

_RECORD = "cepheid.export"
"""The key of our record in a snapshot's properties."""
_RETRIES = "commit.retry.num-retries"
_LOOKED_BACK = 1000  # snapshots: others may also write to the table, for example compaction


class IcebergTarget:
    """An Iceberg table as a `Target`. `url`: iceberg://namespace.table. `properties`: of the catalog, as in pyiceberg (`uri`,
    `warehouse`, …); without any, the catalog `default` of its configuration file is used.
    """

    def __init__(self, url: str, properties: Mapping[str, str]) -> None:
        self._name = url.removeprefix("iceberg://").strip("/")
        namespace, _, table = self._name.rpartition(".")
        if not namespace or not table or "/" in self._name:
            raise LakeTargetError(f"{url!r}: write iceberg://namespace.table", url=url)
        self._namespace = namespace
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError:
            raise LakeTargetError(f"{url} needs pyiceberg: pip install 'cepheid[lake]'", url=url) from None
        try:
            self._catalog = load_catalog("default", **properties)
        except Exception as error:
            raise self._failed("the catalog cannot be opened", error) from None
        self._table: Any = None
        self._batches: list[Any] = []
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<IcebergTarget {self._name}>"

    def open(self) -> Committed | None:
        from pyiceberg.exceptions import NoSuchTableError

        try:
            self._table = self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None
        except Exception as error:
            raise self._failed("the table cannot be read", error) from None
        return self._last_commit()

    def add(self, batch: Any) -> int:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        return self._bytes

    def commit(self, committed: Committed) -> None:
        from pyiceberg.exceptions import CommitFailedException

        rows = pa.Table.from_batches(self._batches)
        record = {"format": FORMAT, "topic": committed.topic, "mode": committed.mode, "positions": dict(committed.positions)}
        try:
            if self._table is None:
                self._catalog.create_namespace_if_not_exists(self._namespace)
                self._table = self._catalog.create_table(self._name, schema=rows.schema)
            # Of this object, not of the table: pyiceberg would add rows after those that another export has already added.
            self._table.metadata.properties[_RETRIES] = "0"
            with self._table.transaction() as change:
                with change.update_schema() as schema:
                    schema.union_by_name(rows.schema)
                change.append(rows, snapshot_properties={_RECORD: json.dumps(record)})
        except CommitFailedException as error:
            raise ConcurrentExportError(
                f"{self._name} was changed by another process meanwhile: {error}", table=self._name
            ) from None
        except Exception as error:
            raise self._failed("the rows cannot be added", error) from None
        self.close()

    def close(self) -> None:
        self._batches, self._bytes = [], 0

    def _last_commit(self) -> Committed | None:
        """Return the commit in the newest snapshot of an export, or None for an empty table."""
        snapshot = self._table.current_snapshot()
        for _ in range(_LOOKED_BACK):
            if snapshot is None:
                break
            properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            if (text := properties.get(_RECORD)) is not None:
                return self._parsed(text)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        if self._table.current_snapshot() is None:
            return None
        raise LakeTargetError(
            f"the table {self._name} has rows, but no snapshot of an export: export to a separate table",
            table=self._name,
        )

    def _parsed(self, text: str) -> Committed:
        try:
            record = json.loads(text)
            committed = Committed(record["topic"], record["mode"], dict(record["positions"]))
        except (ValueError, TypeError, KeyError) as error:
            raise LakeTargetError(f"a snapshot of {self._name} has a damaged property {_RECORD}: {error!r}") from None
        check_format(record.get("format"), f"the table {self._name}")
        return committed

    def _failed(self, what: str, error: Exception) -> LakeTargetError:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return LakeTargetError(f"{self._name}: {what}: {said[0][:300]}", table=self._name)
