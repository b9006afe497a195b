"""Settings of automatic repair, with bounds in the type and the meaning in the description."""

from __future__ import annotations

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt


class RecoverySettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of the auditor, which finds ledgers that lack copies, and of the replication worker, which copies them."""

    enabled: bool = Field(
        True,
        description="Whether this process takes part in automatic repair: it may become the auditor, and it copies entries. "
        "`cepheid repair off` stops repair in the whole cluster.",
    )
    grace_s: float = Field(
        300.0,
        ge=0,
        description="Time for which a bookie may be unregistered before its ledgers are copied elsewhere. Keep it longer than a "
        "restart of a bookie takes. Outages of metadata do not count. A bookie that is decommissioned or recovered on request "
        "has no such time.",
    )
    open_ledger_grace_s: float = Field(
        60.0,
        ge=0,
        description="Time for which an open ledger may keep a lost bookie in its record, before it is closed by recovery. A "
        "living writer replaces such a bookie within `ledger.unregistered_bookie_s`, so only ledgers without one are left by then.",
    )
    walk_interval_s: PositiveFloat = Field(
        3600.0, description="Time between two walks over all ledgers. A lost, returned or draining bookie starts one at once."
    )
    walk_ledgers_per_s: PositiveInt = Field(
        2000, description="Ledgers that a walk reads from metadata per second, at one request each."
    )
    checks_per_s: PositiveFloat = Field(
        50.0,
        description="Copies that a walk reads per second to check that they are there and valid: the last entries of ledgers that "
        "were closed since the walk before and of fragments on bookies that came back, and a sample of all others. As many "
        "requests a second check ledgers that were closed by recovery: one for all copies that a bookie has of a fragment.",
    )
    poll_s: PositiveFloat = Field(
        5.0, description="Interval at which the switch, the bookies and the ledgers to repair are looked at."
    )
    ledgers_at_once: PositiveInt = Field(
        16, le=256, description="Ledgers that a worker copies at once. Each takes up to 3 MiB of memory."
    )
    placement_ledgers_per_walk: NonNegativeInt = Field(
        1000,
        description="Ledgers per regular walk whose copies are moved to other racks, because they could be spread over more of "
        "them. 0: they are counted, and stay where they are.",
    )
    retry_s: PositiveFloat = Field(
        10.0,
        description="First pause before a ledger that could not be repaired, or whose copies could not be checked, is tried again. "
        "It doubles up to 5 minutes.",
    )
