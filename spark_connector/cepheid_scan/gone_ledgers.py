"""What brokers have recorded of ledgers that left their chains: read once for all topics that ask between two plans.

    topic, ids ──► ids that nobody has asked for since the last plan ──pages──► by topic and incarnation ──► those of the topic

Rules
1. A record that was read counts until the next plan: what is in no chain of a plan was closed, or deleted, before it.
2. Of ids first the living are read, then the deleted: it is from the first to the second that ledgers move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cepheid_decode.errors import AdminRefusedError

_RECORDS_PER_PAGE, _MOST_PAGES = 1000, 20  # of ids that are read together
_BLOCK = 200  # of ids


class GoneLedgers:
    """`get`: path and query to the decoded answer."""

    def __init__(self, get: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._get = get
        self._read: list[range] = []
        self._unreadable: list[range] = []
        self._last_entries: dict[tuple[str, str], dict[int, int]] = {}  # by topic and incarnation, of ledgers with entries

    def forget(self) -> None:
        """There is a new plan (rule 1)."""
        self._read, self._unreadable, self._last_entries = [], [], {}

    def of(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        """Last entries by id, as `Planner.gone_ledgers`. Raises PlanUnavailableError."""
        for part in _without(_whole_blocks(ids), self._read):
            if any(part.start <= one.start and one.stop <= part.stop for one in self._unreadable):
                return None
            if not self._read_part(part):
                self._unreadable.append(part)
                return None
        found = self._last_entries.get((topic, incarnation), {})
        return {ledger_id: last for ledger_id, last in found.items() if ledger_id in ids}

    def _read_part(self, ids: range) -> bool:
        """False: the records are refused, too many or damaged, so nobody knows of which topics these ledgers were."""
        for deleted in ("false", "true"):  # rule 2
            if (ledgers := self._records(ids, deleted)) is None:
                return False
            for ledger in ledgers:
                custom, last = ledger["custom"], ledger.get("last_entry_id")
                if custom.get("use") == "entries" and last is not None and last >= 0:
                    key = custom.get("topic", ""), custom.get("incarnation", "")
                    self._last_entries.setdefault(key, {})[ledger["ledger_id"]] = last
        self._read.append(ids)
        return True

    def _records(self, ids: range, deleted: str) -> list[dict[str, Any]] | None:
        """Of the ledgers that there are; None: as in `_read_part`."""
        above: int | None = ids.start - 1
        found: list[dict[str, Any]] = []
        for _ in range(_MOST_PAGES):
            if above is None or above + 1 >= ids.stop:
                return found
            limit = min(_RECORDS_PER_PAGE, ids.stop - above - 1)
            try:
                page = self._get("/cepheid/v1/ledgers", {"above": above, "limit": limit, "deleted": deleted})
            except AdminRefusedError:
                return None
            if page.get("incomplete") or any(record["ledger_id"] < ids.stop for record in page.get("damaged", ())):
                return None
            found += [view["ledger"] for view in page["ledgers"] if view["ledger"]["ledger_id"] < ids.stop]
            above = page["next"]
        return found if above is None or above + 1 >= ids.stop else None


def _whole_blocks(ids: range) -> range:
    """With those around that the next topic most likely asks for."""
    return range(ids.start - ids.start % _BLOCK, ids.stop + -ids.stop % _BLOCK)


def _without(ids: range, read: list[range]) -> list[range]:
    """What of `ids` is in none of `read`."""
    parts = [ids]
    for one in read:
        both_sides = [(range(part.start, min(part.stop, one.start)), range(max(part.start, one.stop), part.stop)) for part in parts]
        parts = [side for sides in both_sides for side in sides if side]
    return parts
