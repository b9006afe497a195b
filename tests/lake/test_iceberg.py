"""Exports to an Iceberg table in a catalog of SQLite: snapshots, positions, and schemas that get columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import cepheid_lake
from cepheid.sync import connect
from cepheid_lake import ConcurrentExportError, LakeTargetError
from cepheid_lake.iceberg_target import IcebergTarget
from cepheid_lake.target import Committed
from cepheid_testkit import ProcessCluster


@pytest.fixture
def catalog(tmp_path: Path) -> dict[str, str]:
    return {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}


def catalog_of(catalog: dict[str, str]) -> Any:
    from pyiceberg.catalog import load_catalog  # here: it takes a second, in each process of a run

    return load_catalog("default", **catalog)


def rows_of(catalog: dict[str, str], table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = catalog_of(catalog).load_table(table).scan().to_arrow().to_pylist()
    return found


def test_a_topic_with_a_schema_that_gets_a_field(catalog: dict[str, str]) -> None:
    @dataclass
    class Flight:
        carrier: str
        delay: int

    first = Flight

    @dataclass
    class Flight:  # type: ignore[no-redef]
        carrier: str
        delay: int
        cancelled: bool = False

    with ProcessCluster() as server, connect(server.service_url) as client:

        def export() -> int:
            return cepheid_lake.export(
                "flights", "iceberg://lake.flights", service_url=server.service_url, catalog=catalog, mode="typed"
            ).rows

        with client.producer("flights", schema=first) as producer:
            producer.send_all(first("AA", number) for number in range(3))
        assert export() == 3
        with client.producer("flights", schema=Flight) as later:
            later.send(Flight("UA", 7, True))  # type: ignore[call-arg]
        assert export() == 1
        assert export() == 0
    shown = [(row["carrier"], row["delay"], row.get("cancelled")) for row in rows_of(catalog, "lake.flights")]
    assert sorted(shown) == [("AA", 0, None), ("AA", 1, None), ("AA", 2, None), ("UA", 7, True)]


def committed(place: str) -> Committed:
    return Committed("persistent://public/default/t", "messages", {"persistent://public/default/t": place})


def test_positions_are_those_of_the_newest_snapshot_of_an_export(catalog: dict[str, str]) -> None:
    target = IcebergTarget("iceberg://lake.rows", catalog)
    assert target.open() is None
    for place in ("1:1", "1:2"):
        target.add(pa.record_batch({"value": [place.encode()]}))
        target.commit(committed(place))
    table = catalog_of(catalog).load_table("lake.rows")
    table.append(pa.table({"value": [b"by hand"]}))
    assert IcebergTarget("iceberg://lake.rows", catalog).open() == committed("1:2")


def test_of_two_exports_at_the_same_time_one_is_refused(catalog: dict[str, str]) -> None:
    def opened() -> IcebergTarget:
        target = IcebergTarget("iceberg://lake.rows", catalog)
        target.open()
        target.add(pa.record_batch({"value": [b"x"]}))
        return target

    opened().commit(committed("1:1"))
    first, second = opened(), opened()
    first.commit(committed("1:2"))
    with pytest.raises(ConcurrentExportError, match=r"lake\.rows was changed by another process"):
        second.commit(committed("1:2"))
    assert len(rows_of(catalog, "lake.rows")) == 2


def test_a_table_with_rows_of_somebody_else_is_left_alone(catalog: dict[str, str]) -> None:
    tables = catalog_of(catalog)
    tables.create_namespace("lake")
    table = tables.create_table("lake.others", schema=pa.schema({"value": pa.binary()}))
    table.append(pa.table({"value": [b"x"]}))
    with pytest.raises(LakeTargetError, match="no snapshot of an export: export to a separate table"):
        IcebergTarget("iceberg://lake.others", catalog).open()


def test_a_catalog_that_cannot_be_reached(tmp_path: Path) -> None:
    properties = {"uri": f"sqlite:///{tmp_path}/nowhere/catalog.db", "warehouse": f"file://{tmp_path}"}
    with pytest.raises(LakeTargetError, match=r"lake\.rows: the"):
        IcebergTarget("iceberg://lake.rows", properties).open()
