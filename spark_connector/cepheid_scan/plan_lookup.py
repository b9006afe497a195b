"""Where one ledger lies by now, for a reader whose plan has grown old: looked up anew, from nobody's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeAlias

from cepheid_decode.errors import NoSuchTopicError
from cepheid_decode.history import LedgerHistory, Piece
from cepheid_decode.scan_request import PlanSource
from cepheid_scan.open_planner import open_planner

Replan: TypeAlias = Callable[[Piece], LedgerHistory | None]


def find_ledger(source: PlanSource, topic: str, ledger_id: int) -> LedgerHistory | None:
    """None: the topic has it no more (trimmed), or is gone itself."""
    return find_ledger_and_bookies(source, topic, ledger_id)[0]


def find_ledger_and_bookies(source: PlanSource, topic: str, ledger_id: int) -> tuple[LedgerHistory | None, Mapping[str, str]]:
    """With the addresses of all bookies that are up: it may lie on others than when it was planned."""
    with closing(open_planner(source)) as planner:
        try:
            plan = planner.plan([topic])
        except NoSuchTopicError:
            return None, {}
    found = (ledger for ledger in plan.topics[0].ledgers if ledger.ledger_id == ledger_id)
    return next(found, None), plan.bookies
