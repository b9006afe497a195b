"""Lists the ledgers that a bookie holds, page by page, for a comparison with metadata."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from cepheid_bookie.bookie import Bookie
from cepheid_bookie.errors import LedgersNotListedError

PAGE_LEDGERS = 10_000


def held_ledgers(bookie: Bookie, above: int) -> dict[str, Any]:
    """Return the first `PAGE_LEDGERS` ids above `above`; `next` is the `above` of the following page, None at the end.

    Raises LedgersNotListedError in the first seconds of a bookie with many ledgers: a partial list would look like missing ledgers.
    """
    if not bookie.ledgers_listed:
        raise LedgersNotListedError(f"bookie {bookie.bookie_id} has just started and is still listing its ledgers")
    ids = bookie.ledgers()
    first = bisect_right(ids, above)
    page = ids[first : first + PAGE_LEDGERS]
    more = first + len(page) < len(ids)
    return {"bookie_id": bookie.bookie_id, "ledgers": page, "next": page[-1] if more else None}
