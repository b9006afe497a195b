"""Decide what offloading does next for one topic, without I/O.

    [5: 40 MB, 3 h ago] [6: 40 MB, 2 h] [8: 40 MB, 1 h] [9: 10 MB, being written]
    after 60 MB: 5 is due (90 MB are newer), 6 is not (50 MB are newer)             │   after 90 min: 5 and 6 are due

Rules:
1. Only ledgers that ended and have entries are offloaded, the oldest first.
2. A ledger is due when `after_bytes` of newer ledgers are on the bookies, when it ended `after_ms` ago, or when an administrator
   asked for all ledgers before a position. Each of these requires that offloading is on.
3. An incomplete attempt without a running upload in this opening is a leftover. It is cleared before anything else, even if
   offloading is off by now.
4. The bookies' copies of a ledger may be deleted `keep_ms` after its upload became complete, unless they are being read.
5. Times are from `SteadyClock`, which never runs ahead, so a wall clock that jumps a year deletes nothing early.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from cepheid_managed_ledger.chain_edits import has_room_for_objects
from cepheid_managed_ledger.settings import OffloadConfig
from cepheid_metadata import Chain, ChainLedger, Position

_LEAVE_AT_ONCE = 100
"""Ledgers in one write. In a long chain, more of them could lie in more pages than one write can change."""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The next steps of offloading a topic."""

    clear: tuple[int, ...] = ()
    """Ledgers with an incomplete attempt that must be cleared."""
    upload: ChainLedger | None = None
    """The next ledger to offload."""
    leave: tuple[int, ...] = ()
    """Ledgers whose copies on the bookies may be deleted."""

    @property
    def is_idle(self) -> bool:
        return not self.clear and self.upload is None and not self.leave


def due_ledgers(
    chain: Chain, *, last_size_bytes: int, config: OffloadConfig, now_ms: int, before: Position | None = None
) -> list[ChainLedger]:
    """Return the ledgers that are due (rule 2) and have no complete copy yet, oldest first.

    `last_size_bytes` is the size of the ledger being written, which the record does not have. `before`: what a running command asks
    for.
    """
    if config.url is None:
        return []
    due: list[ChainLedger] = []
    newer_bytes = 0
    for ledger in reversed(chain.ledgers):
        if ledger.is_open:
            newer_bytes += last_size_bytes
            continue
        if ledger.entries and chain.offload_of(ledger.ledger_id) is None:  # rule 1
            by_size = 0 <= config.after_bytes <= newer_bytes
            by_age = config.after_ms >= 0 and now_ms - ledger.closed_at_ms >= config.after_ms
            if by_size or by_age or is_before(ledger, before):
                due.append(ledger)
        if chain.is_on_bookies(ledger.ledger_id):
            newer_bytes += ledger.size_bytes
    due.reverse()
    return due


def is_before(ledger: ChainLedger, before: Position | None) -> bool:
    """Return whether all entries of an ended ledger are before a position."""
    return before is not None and Position(ledger.ledger_id, (ledger.entries or 0) - 1) < before


def plan_offload(
    chain: Chain,
    *,
    last_size_bytes: int,
    config: OffloadConfig,
    now_ms: int,
    before: Position | None = None,
    skipped: Container[int] = (),
    is_read_from_bookies: Callable[[int], bool] = lambda _: False,
) -> OffloadPlan:
    """Return what to do next. `skipped` are ledgers that failed recently: others come first."""
    offloaded = chain.offloaded or {}
    clear = tuple(ledger_id for ledger_id, found in offloaded.items() if not found.complete)  # rule 3
    if config.url is None:
        return OffloadPlan(clear)
    due = due_ledgers(chain, last_size_bytes=last_size_bytes, config=config, now_ms=now_ms, before=before)
    has_room = has_room_for_objects(chain)
    upload = next((ledger for ledger in due if has_room and ledger.ledger_id not in skipped), None)
    leave = tuple(
        ledger_id
        for ledger_id in offloaded
        if may_leave_bookies(chain, ledger_id, config, now_ms) and ledger_id not in skipped and not is_read_from_bookies(ledger_id)
    )
    return OffloadPlan(clear, upload, leave[:_LEAVE_AT_ONCE])


def may_leave_bookies(chain: Chain, ledger_id: int, config: OffloadConfig, now_ms: int) -> bool:
    """Return whether the ledger has had a complete copy for long enough (rule 4)."""
    found = chain.offload_of(ledger_id)
    return found is not None and found.on_bookies and config.keep_ms >= 0 and now_ms - found.completed_at_ms >= config.keep_ms
