"""What every process with a broker does around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cepheid_broker.serving import Serving
from cepheid_broker.settings import BrokerSettings
from cepheid_ledger import LedgerSettings
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_managed_ledger import ManagedLedgerConfig
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree
from cepheid_ports import Ports

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

pytestmark = pytest.mark.virtual_time


def no_families() -> Iterator[Family]:
    yield from ()


async def test_ledger_ids_that_were_taken_in_a_session_are_dropped_with_it() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    bookies = BookieDirectory(store, Ports(), LedgerSettings())
    config = ManagedLedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1)
    serving = Serving(
        BrokerSettings(),
        "test",
        store,
        bookies,
        config,
        Ports(),
        families=no_families,
        is_ready=lambda: True,
        on_failed=lambda _: None,
    )
    ids: LedgerIds = serving._ledger_ids
    first = await ids.take()
    assert await ids.take() == first + 1
    store.expire_session()
    store.renew_session()
    other = await LedgerIds(MemoryStore(tree)).take()
    assert await ids.take() > other, "metadata may be another by now"
    await serving.aclose()
