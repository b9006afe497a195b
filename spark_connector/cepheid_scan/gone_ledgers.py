"""Records of brokers about ledgers that left their chains, read once for all topics that need them between two plans.

    topic, ids ──► ids not requested since the last plan ──pages──► by topic and incarnation ──► those of the topic

Rules
1. A record that was read is valid until the next plan: ledgers in no chain of a plan were closed or deleted before it.
2. Living ledgers are read first, then deleted ones, since ledgers move from the first to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cepheid_decode.errors import AdminRefusedError

_RECORDS_PER_PAGE, _MOST_PAGES = 1000, 20  # of ids that are read together
_BLOCK = 200  # of ids


class GoneLedgers:
    """Caches records of ledgers. `get`: returns the decoded answer for path and query."""

    def __init__(self, get: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._get = get
        self._read: list[range] = []
        self._unreadable: list[range] = []
        self._last_entries: dict[tuple[str, str], dict[int, int]] = {}  # by topic and incarnation, for ledgers with entries

    def forget(self) -> None:
        """Forget all records, as there is a new plan (rule 1)."""
        self._read, self._unreadable, self._last_entries = [], [], {}

    def of(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        """Return last entries by id, like `Planner.gone_ledgers`. Raises PlanUnavailableError."""
        for part in _without(_whole_blocks(ids), self._read):
            if any(part.start <= one.start and one.stop <= part.stop for one in self._unreadable):
                return None
            if not self._read_part(part):
                self._unreadable.append(part)
                return None
        found = self._last_entries.get((topic, incarnation), {})
        return {ledger_id: last for ledger_id, last in found.items() if ledger_id in ids}

    def _read_part(self, ids: range) -> bool:
        """Return False if the records are refused, too many or damaged, so that the topics of these ledgers are unknown."""
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
        """Return the records of existing ledgers; None: as in `_read_part`."""
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
    """Return the ids extended to whole blocks, which the next topic will probably need."""
    return range(ids.start - ids.start % _BLOCK, ids.stop + -ids.stop % _BLOCK)


def _without(ids: range, read: list[range]) -> list[range]:
    """Return the parts of `ids` that are in none of `read`."""
    parts = [ids]
    for one in read:
        both_sides = [(range(part.start, min(part.stop, one.start)), range(max(part.start, one.stop), part.stop)) for part in parts]
        parts = [side for sides in both_sides for side in sides if side]
    return parts
