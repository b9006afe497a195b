"""Ledgers in object storage, as the plan service names them: never as trimmed, never with a secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cepheid_broker.admin import plan as module
from cepheid_broker.admin.context import AdminContext
from cepheid_metadata import (
    Chain,
    ChainLedger,
    Fragment,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    OffloadedLedger,
    Position,
    ledger_records,
)

URL = "s3://bucket/p/public/default/t/7-ab.parquet?region=eu-west-1"
END = Position(9, -1)


def ledger_metadata(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        state=LedgerState.OPEN,
        fragments=(Fragment(first_entry_id=0, ensemble=("b1",)),),
        creation_token=1,
        created_at_ms=5,
        custom={"topic": "t"},
    )


def offloaded(**fields: Any) -> OffloadedLedger:
    return OffloadedLedger(**{"url": URL, "started_at_ms": 1, "complete": True, "object_bytes": 50, **fields})


async def ledgers_of(chain: Chain, *on_bookies: int, after: int = -1) -> list[Any]:
    store = MemoryStore(MemoryTree())
    for ledger_id in on_bookies:
        await ledger_records(store).create(ledger_id, ledger_metadata(ledger_id))
    context = cast(AdminContext, SimpleNamespace(store=store))
    return await module._ledgers(context, chain, END, 0, after)


def chain_of(offload: OffloadedLedger) -> Chain:
    ended = ChainLedger(ledger_id=7, entries=3, size_bytes=300, closed_at_ms=5)
    return Chain(incarnation="i", ledgers=(ended, ChainLedger(ledger_id=9)), offloaded={7: offload})


async def test_a_ledger_that_is_only_an_object_has_no_fragments_and_is_not_missing() -> None:
    first, last = await ledgers_of(chain_of(offloaded(on_bookies=False)), 9)
    assert first["offloaded"] == {"url": URL, "object_bytes": 50, "on_bookies": False}
    assert (first["entries"], first["last_entry_id"], "fragments" in first) == (3, 2, False)
    assert "fragments" in last
    assert "offloaded" not in last


async def test_a_ledger_in_both_places_has_fragments_and_the_object() -> None:
    first, _ = await ledgers_of(chain_of(offloaded()), 7, 9)
    assert "fragments" in first
    assert first["offloaded"]["on_bookies"]


async def test_an_upload_that_is_not_complete_is_not_named() -> None:
    first, _ = await ledgers_of(chain_of(offloaded(complete=False)), 7, 9)
    assert "offloaded" not in first


async def test_a_ledger_that_bookies_should_have_and_do_not_was_trimmed() -> None:
    first, _ = await ledgers_of(chain_of(offloaded()), 9)
    assert first is None


async def test_known_ledgers_tell_that_they_moved() -> None:
    first, _ = await ledgers_of(chain_of(offloaded(on_bookies=False)), 9, after=7)
    assert first["offloaded"]["url"] == URL


@pytest.mark.parametrize(("on_bookies", "expected"), [(True, 1), (False, 2)])
async def test_older_readers_are_refused_only_where_they_would_miss_a_ledger(on_bookies: bool, expected: int) -> None:
    ledgers = await ledgers_of(chain_of(offloaded(on_bookies=on_bookies)), *((7, 9) if on_bookies else (9,)))
    assert module._format_of([{"ledgers": ledgers}, {"ledgers": []}]) == expected


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, URL),
        ("file:///data/cold/7.parquet", "file:///data/cold/7.parquet"),
        ("abfs://box@account.dfs.core.windows.net/7.parquet", "abfs://box@account.dfs.core.windows.net/7.parquet"),
        (
            "s3://AKIA:hidden@bucket/7.parquet?endpoint=http%3A%2F%2Fh%3A9000&secret_access_key=hidden",
            "s3://bucket/7.parquet?endpoint=http://h:9000",
        ),
    ],
)
async def test_the_url_carries_no_secret(url: str, shown: str) -> None:
    first, _ = await ledgers_of(chain_of(offloaded(url=url)), 7, 9)
    assert first["offloaded"]["url"] == shown
    assert "hidden" not in repr(first)
