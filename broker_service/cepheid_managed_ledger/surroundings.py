"""The objects that the managed ledgers of a broker share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cepheid_ledger import LedgerClient
from cepheid_managed_ledger.catch_up_budget import CatchUpBudget
from cepheid_managed_ledger.count_budget import CountBudget
from cepheid_managed_ledger.cursor_flusher import CursorFlusher
from cepheid_managed_ledger.offload_pool import OffloadPool
from cepheid_managed_ledger.position_numbers import PositionNumbers
from cepheid_managed_ledger.settings import ManagedLedgerSettings
from cepheid_managed_ledger.tail_cache import TailCache
from cepheid_metadata import MetadataStore, PageLimits
from cepheid_ports import Ports, TaskOwner
from cepheid_tiered import SegmentStore
from cepheid_wire import TopicName


@dataclass(frozen=True, slots=True)
class Surroundings:
    client: LedgerClient
    store: MetadataStore
    tail_cache: TailCache
    catch_up: CatchUpBudget
    counts: CountBudget
    flusher: CursorFlusher
    tasks: TaskOwner
    """Outlives every managed ledger: runs work that must be finished."""
    settings: ManagedLedgerSettings
    ports: Ports
    offload_pool: OffloadPool
    page_limits: PageLimits
    segments: SegmentStore | None = None
    """Object stores; None: their libraries are not installed, and nothing is offloaded."""
    unfinished: dict[TopicName, asyncio.Future[None]] = field(default_factory=dict)
    """Openings that were cancelled and still run to their end."""
    publish_times: PositionNumbers = field(default_factory=PositionNumbers)
    lengths: PositionNumbers = field(default_factory=PositionNumbers)
    """Payload bytes of ledgers up to and including an entry."""
    deletion_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))
    start_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(32))
    """For topics that were opened without a new ledger: all of them may create one when the bookies return."""
