"""Edits of a chain's record that remove ledgers, with the copies that they have in an object store.

    ledger on bookies, no copy     ──► its id to `deletions`
    ledger on bookies and a copy   ──► its id to `deletions`, the copy's URL to `object_deletions`
    ledger that only a copy holds  ──► the URL to `object_deletions`; its id was added to `deletions` when it left the bookies

Rule: what leaves the chain enters a deletion queue in the same write, including attempts to offload it that are not complete. So no
ledger and no object is forgotten, whenever the owner dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cepheid_metadata import Chain

MAX_WAITING_OBJECTS = 1_000
"""Objects of one topic that may wait to be deleted. Their URLs are part of the chain's record, whose size is limited. Beyond it no
offloaded ledger is trimmed and no ledger is offloaded."""

MAX_WAITING_OBJECT_BYTES = 200_000
"""Bytes of these URLs, which are as long as prefixes and topic names make them. The effect is the same beyond it."""

LEAVE_AT_ONCE = 10_000
"""Ledgers that leave a chain in one write. Their ids wait for deletion in its record, whose size is limited."""


def has_room_for_objects(chain: Chain) -> bool:
    """Whether one more object may wait to be deleted."""
    waiting = chain.object_deletions or ()
    return len(waiting) < MAX_WAITING_OBJECTS and _bytes_of(waiting) < MAX_WAITING_OBJECT_BYTES


def count_that_may_leave(chain: Chain) -> int:
    """Return how many ledgers may leave the chain in one step, from the first on, without too many objects waiting to be
    deleted."""
    offloaded, waiting = chain.offloaded or {}, chain.object_deletions or ()
    objects, size_bytes = len(waiting), _bytes_of(waiting)
    for count, ledger in enumerate(chain.ledgers):
        if (found := offloaded.get(ledger.ledger_id)) is None:
            continue
        objects, size_bytes = objects + 1, size_bytes + len(found.url.encode())
        if objects > MAX_WAITING_OBJECTS or size_bytes > MAX_WAITING_OBJECT_BYTES:
            return count
    return len(chain.ledgers)


def _bytes_of(urls: Sequence[str]) -> int:
    return sum(len(url.encode()) for url in urls)


def without_first(chain: Chain, count: int) -> Chain:
    """Return the chain without its first `count` ledgers."""
    return without(chain, [ledger.ledger_id for ledger in chain.ledgers[:count]])


def without(chain: Chain, ledger_ids: Iterable[int]) -> Chain:
    """Return the chain without these ledgers of it."""
    gone = dict.fromkeys(ledger_ids)
    offloaded = chain.offloaded or {}
    urls = [offloaded[ledger_id].url for ledger_id in gone if ledger_id in offloaded]
    from_bookies = [ledger_id for ledger_id in gone if chain.is_on_bookies(ledger_id)]
    return chain.replace(
        ledgers=tuple(ledger for ledger in chain.ledgers if ledger.ledger_id not in gone),
        deletions=tuple(dict.fromkeys((*chain.deletions, *from_bookies))),
        offloaded={ledger_id: found for ledger_id, found in offloaded.items() if ledger_id not in gone} or None,
        object_deletions=(*(chain.object_deletions or ()), *urls) or None,
    )


def without_attempts(chain: Chain, ledger_ids: Iterable[int]) -> Chain:
    """Return the chain with the incomplete attempts to offload these ledgers moved to the queue of objects to delete."""
    offloaded = dict(chain.offloaded or {})
    urls = [
        offloaded.pop(ledger_id).url for ledger_id in ledger_ids if ledger_id in offloaded and not offloaded[ledger_id].complete
    ]
    return chain.replace(offloaded=offloaded or None, object_deletions=(*(chain.object_deletions or ()), *urls) or None)


def off_bookies(chain: Chain, ledger_ids: Iterable[int]) -> Chain:
    """Return the chain with these offloaded ledgers kept only as objects: the bookies' copies are queued for deletion."""
    going = list(ledger_ids)
    offloaded = dict(chain.offloaded or {})
    for ledger_id in going:
        offloaded[ledger_id] = offloaded[ledger_id].replace(on_bookies=False)
    return chain.replace(offloaded=offloaded, deletions=(*chain.deletions, *going))
