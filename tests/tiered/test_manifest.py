"""The manifest of a topic: it reads back as it was written, and nothing else reads as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_tiered.manifest import (
    DamagedManifestError,
    Manifest,
    ManifestCursor,
    ManifestLedger,
    ManifestObject,
    NewerManifestError,
    manifest_url,
    name_from,
    url_from,
)

URL = "s3://bucket/prefix/t/n/orders/manifest.json?region=eu-west-1"


def a_manifest(ledgers: int = 3, cursors: int = 2) -> Manifest:
    return Manifest(
        cluster_id="c1",
        cluster="flights",
        topic="persistent://t/n/orders",
        incarnation="i1",
        epoch=7,
        written_at_ms=1_700_000_000_000,
        tenant_record={"format": 1, "admin_roles": []},
        namespace_record={"format": 3, "offload": {"url": "s3://bucket/prefix"}},
        topic_record={"format": 1, "created_at_ms": 1},
        base_record=None,
        schema_history=None,
        schema_definitions={},
        ledgers=[
            ManifestLedger(
                ledger_id,
                50_000,
                100 << 20,
                5_000_000 if ledger_id % 2 else None,
                1_700_000_000_000,
                ManifestObject(f"{ledger_id:020d}-0123456789abcdef.parquet", 60 << 20, 1_700_000_000_000, 123)
                if ledger_id
                else None,
            )
            for ledger_id in range(ledgers)
        ],
        cursors=[ManifestCursor(f"sub-{number} ü", (1, number), b"\x00\xff" * number, {"a": "b"}) for number in range(cursors)],
        cursors_at_ms=1_700_000_000_000,
        terminated_at=(2, -1),
        properties={"k": "v"},
    )


@pytest.mark.parametrize(("ledgers", "cursors"), [(0, 0), (1, 0), (3, 2), (1_001, 501)])
def test_reads_back_as_it_was_written(ledgers: int, cursors: int) -> None:
    manifest = a_manifest(ledgers, cursors)
    assert Manifest.decode(manifest.encode(), URL) == manifest


def test_a_manifest_of_20_000_ledgers_is_bounded() -> None:
    assert len(a_manifest(20_000).encode()) < 3_000_000


def test_a_newer_manifest_is_refused_by_name() -> None:
    newer = a_manifest().encode().replace(b'"format":1', b'"format":2,"color":"red"', 1)
    with pytest.raises(NewerManifestError, match=r"orders/manifest\.json.* is a manifest of format 2; .* up to 1"):
        Manifest.decode(newer, URL)


@given(st.data())
def test_a_manifest_that_was_cut_or_changed_is_damaged(data: st.DataObject) -> None:
    whole = a_manifest().encode().rstrip()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    for broken in (whole[:at], bytes(changed)):
        with pytest.raises((DamagedManifestError, NewerManifestError)):
            Manifest.decode(broken, URL)


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        ("s3://bucket/prefix/t/n/orders/7-ab.parquet?region=eu-west-1", "7-ab.parquet"),
        ("s3://bucket/old/t/n/orders/7-ab.parquet?region=eu-west-1", "s3://bucket/old/t/n/orders/7-ab.parquet?region=eu-west-1"),
        ("file:///data/t/n/a%2Fb/7-ab.parquet", "file:///data/t/n/a%2Fb/7-ab.parquet"),
    ],
)
def test_names_of_segments_lead_back_to_their_urls(segment: str, name: str) -> None:
    assert name_from(URL, segment) == name
    assert url_from(URL, name) == segment
    assert name_from(manifest_url(segment), segment) == segment.rpartition("/")[2].partition("?")[0]


def test_a_moved_bucket_is_read_where_it_is_now() -> None:
    moved = "file:///mnt/copy/t/n/orders/manifest.json"
    assert url_from(moved, "7-ab.parquet") == "file:///mnt/copy/t/n/orders/7-ab.parquet"


@pytest.mark.parametrize("name", ["", "../other/7.parquet", ".hidden"])
def test_a_name_that_leaves_the_directory_is_refused(name: str) -> None:
    with pytest.raises(DamagedManifestError, match="not a name of an object beside it"):
        url_from(URL, name)


def test_unknown_fields_of_a_known_format_are_damage() -> None:
    manifest = replace(a_manifest(), cluster="x")
    pieces = list(manifest.encode_pieces())
    import crc32c

    body = b"".join(pieces[:-1]).replace(b'{"format":1', b'{"format":1,"color":"red"', 1)
    with pytest.raises(DamagedManifestError, match="field color is unknown"):
        Manifest.decode(body + f',"crc32c":"{crc32c.crc32c(body):08x}"}}\n'.encode(), URL)
