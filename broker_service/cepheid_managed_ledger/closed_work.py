"""Decides whether a topic that is not open has work to do, from its records alone: a pure core.

A topic offloads, trims and expires only while a broker has it open. `closed_work` says whether opening it would do any of that, so
that a broker can look through many topics and open only those few.

    chain record, positions of its cursors, policies, time ──► reasons to open it; the ledgers that are due to be offloaded

Rules:
1. An opening closes the ledger that a crashed owner left open, and adds a new one. So every ledger with entries counts as one that
   may be trimmed, unless the topic is terminated: that one keeps its last ledger.
2. Empty ledgers are no reason. Each opening creates one, so there would always be a reason.
3. A message counts as expired once its ledger was closed that long ago: it was published before that. Newer ones wait for the next
   check.
4. Positions may be older than what was acknowledged (`CursorRecord.mark_delete`). Then a trim happens later, never earlier.
5. If there is no subscription and no retention was set, everything may be trimmed as soon as the topic is open. That is no reason
   to open it: what was published before any client could subscribe is not deleted unless a client uses the topic.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping
from dataclasses import dataclass

from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.offload_plan import due_ledgers, plan_offload
from cepheid_managed_ledger.settings import ManagedLedgerConfig
from cepheid_managed_ledger.trim import plan_trim
from cepheid_metadata import Chain, ChainLedger, Position

_NEW_LEDGER_ID = 1 << 62


class Reason(enum.Enum):
    """Why a closed topic should be opened."""

    LEFT_OPEN = "its last ledger was left open"
    OFFLOAD = "ledgers are due to be offloaded"
    ATTEMPTS = "uploads were cut off"
    OFF_BOOKIES = "offloaded ledgers may leave the bookies"
    DELETIONS = "ledgers or objects wait to be deleted"
    RETENTION = "ledgers are past their retention"
    EXPIRY = "messages are past their time to live"


_NEED_POSITIONS = (Reason.LEFT_OPEN, Reason.RETENTION, Reason.EXPIRY)


@dataclass(frozen=True, slots=True)
class ClosedWork:
    reasons: tuple[Reason, ...] = ()
    due: tuple[ChainLedger, ...] = ()
    """Ledgers that are due to be offloaded, oldest first. Also if no object store can be used: then they are no reason."""

    @property
    def depends_on_positions(self) -> bool:
        """Whether all reasons depend on the positions of cursors."""
        return bool(self.reasons) and all(reason in _NEED_POSITIONS for reason in self.reasons)


def closed_work(
    chain: Chain,
    config: ManagedLedgerConfig,
    now_ms: int,
    *,
    expire_after_ms: int | None = None,
    positions: Mapping[str, Position] | None = None,
    not_expired: Container[str] = (),
    can_offload: bool = True,
) -> ClosedWork:
    """Return what is due for a topic that no broker has open.

    `expire_after_ms`: time to live of messages; None: they do not expire. `positions`: mark-delete positions of the durable cursors
    by name; None: they were not read, and what any position would make due counts as due. `not_expired`: cursors of the broker
    itself, which are not subscriptions and have no backlog that expires.
    """
    ended = [ledger for ledger in chain.ledgers if not ledger.is_open]
    due = tuple(due_ledgers(chain, last_size_bytes=0, config=config.offload, now_ms=now_ms))
    plan = plan_offload(chain, last_size_bytes=0, config=config.offload, now_ms=now_ms)
    has_limits = bool(due) or config.retention.time_ms >= 0 or config.retention.size_bytes >= 0 or expire_after_ms is not None
    keeps_nothing = config.retention.time_ms == 0 or config.retention.size_bytes == 0
    is_spared = keeps_nothing and positions is not None and all(name in not_expired for name in positions)  # rule 5
    is_offloaded = config.offload.url is not None and max(config.offload.after_bytes, config.offload.after_ms) >= 0
    found = {
        Reason.LEFT_OPEN: len(ended) < len(chain.ledgers) and ((has_limits and not is_spared) or is_offloaded),
        Reason.OFFLOAD: can_offload and plan.upload is not None,
        Reason.ATTEMPTS: can_offload and bool(plan.clear),
        Reason.OFF_BOOKIES: can_offload and bool(plan.leave),
        Reason.DELETIONS: bool(chain.deletions) or (can_offload and bool(chain.object_deletions)),
        Reason.RETENTION: not is_spared and _may_trim(chain, ended, config, now_ms, positions),
        Reason.EXPIRY: expire_after_ms is not None and _expires(ended, now_ms - expire_after_ms, positions, not_expired),
    }
    return ClosedWork(tuple(reason for reason, holds in found.items() if holds), due)


def _may_trim(
    chain: Chain, ended: list[ChainLedger], config: ManagedLedgerConfig, now_ms: int, positions: Mapping[str, Position] | None
) -> bool:
    if not ended:
        return False
    acknowledged = None
    if positions:
        ledgers = LedgerList(ended)
        acknowledged = min(map(ledgers.rank, positions.values()))
    after_opening = ended if chain.terminated_at is not None else [*ended, ChainLedger(ledger_id=_NEW_LEDGER_ID)]  # rule 1
    count = plan_trim(
        after_opening,
        last_size_bytes=after_opening[-1].size_bytes,
        acknowledged_entries=acknowledged,
        retention=config.retention,
        now_ms=now_ms,
    )
    return any(ledger.entries for ledger in after_opening[:count])  # rule 2


def _expires(
    ended: list[ChainLedger], before_ms: int, positions: Mapping[str, Position] | None, not_expired: Container[str]
) -> bool:
    old_entries = 0
    for ledger in ended:
        if ledger.closed_at_ms >= before_ms:  # rule 3
            break
        old_entries += ledger.entries or 0
    if not old_entries or positions is None:
        return old_entries > 0
    ledgers = LedgerList(ended)
    return any(ledgers.rank(position) < old_entries for name, position in positions.items() if name not in not_expired)
