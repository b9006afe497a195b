"""Deletes ledgers that left a chain, and whole chains.

Rules:
1. A ledger is deleted only after a committed record says that it left the chain (the deletion queue is part of that record).
2. Deleting is repeated until it succeeds; "already deleted" is success. What a crash leaves is finished at the next opening. The
   queue may name a ledger deleted long ago: what an operator restored since stays.
3. A topic is deleted in this order: the chain is taken over, all its ledgers and those of its cursors are closed, the chain is
   emptied, cursors and ledgers are deleted, the chain's record last.
4. Closing a ledger needs its bookies, and its record. What cannot be closed is found before anything is deleted, so that such a
   topic keeps everything. From then on only metadata is needed.
5. A chain of more than `_LEAVE_AT_ONCE` ledgers is emptied in steps, the oldest ledgers first: the deletion queue is in the record,
   whose size is limited. A crash in between leaves a shorter chain.
6. Objects of offloaded ledgers are deleted before the record. An object store that does not answer does not prevent the deletion:
   after `_OBJECTS_PATIENCE_S` without progress its objects are left, logged, and found by `cepheid tiered sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable, Sequence
from functools import partial

from cepheid_ledger import LedgerClient, LedgerError, NoSuchLedgerError
from cepheid_managed_ledger.chain_edits import count_that_may_leave, without_first
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ChainNotDeletableError
from cepheid_managed_ledger.object_deletion import delete_objects_or_leave
from cepheid_metadata import (
    Chain,
    CorruptRecordError,
    Delete,
    MetadataStore,
    NewerFormatError,
    NoSuchKeyError,
    Op,
    cursor_records,
    keys,
    list_cursors,
)
from cepheid_ports import CepheidError
from cepheid_tiered import SegmentStore
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_CURSORS_AT_ONCE = 500
_LEDGERS_AT_ONCE = 100
_LEAVE_AT_ONCE = 1_000
_OBJECTS_PATIENCE_S = 20.0


async def delete_waiting(keeper: ChainKeeper, client: LedgerClient, turns: asyncio.Semaphore) -> None:
    """Delete the ledgers of the queue, as far as possible now. `turns` is shared by all topics: this is never urgent."""
    for ledger_id in keeper.waiting_deletions():
        try:
            async with turns:
                await _delete(client, ledger_id)
        except (CepheidError, TimeoutError) as error:
            log.warning("ledger.delete_failed", extra={"ledger_id": ledger_id, "error": str(error)})
            return
        keeper.note_deleted(ledger_id)


async def delete_chain(
    topic: TopicName, keeper: ChainKeeper, store: MetadataStore, client: LedgerClient, segments: SegmentStore | None = None
) -> None:
    """Delete a chain that `keeper` has loaded, in the order of rule 3; the first step shuts out its owner.

    Raises ChainNotDeletableError: nothing was deleted (rule 4). After any other error of the stores, call it again.
    """
    records = cursor_records(store)
    chain = keeper.chain
    ledger_ids = tuple(ledger.ledger_id for ledger in chain.ledgers if chain.is_on_bookies(ledger.ledger_id))
    taken = chain.replace(epoch=chain.epoch + 1)
    await keeper.take_over(taken)
    names = await list_cursors(store, topic)
    await _end_ledgers(topic, [*keeper.waiting_deletions(), *ledger_ids, *await _cursor_ledgers(topic, names, store)], client)
    patience_s = _OBJECTS_PATIENCE_S
    while (count := _count_that_leaves(keeper.chain)) < len(keeper.chain.ledgers):  # rule 5
        await keeper.commit(lambda chain, count=count: (without_first(chain, count), ()))  # type: ignore[misc]
        patience_s = await _delete_left(topic, keeper, client, segments, patience_s)
    await keeper.commit(lambda chain: (without_first(chain.replace(terminated_at=None), len(chain.ledgers)), ()))
    for start in range(0, len(names), _CURSORS_AT_ONCE):
        deletes: list[Op] = []
        cursor_ledgers: dict[int, None] = {}
        for name in names[start : start + _CURSORS_AT_ONCE]:
            found = await records.get((topic, name))
            if found is not None:
                deletes.append(Delete(records.key_of((topic, name)), found.version))
                if found.record.cursor_ledger_id is not None:
                    cursor_ledgers[found.record.cursor_ledger_id] = None
        await keeper.commit(partial(_without_cursors, deletes, cursor_ledgers))
    for ledger_id in keeper.waiting_deletions():
        await _delete(client, ledger_id)
        keeper.note_deleted(ledger_id)
    await delete_objects_or_leave(topic, segments, keeper.chain.object_deletions or (), patience_s)
    if strays := await _stray_pages(topic, keeper, store):
        await keeper.commit(lambda _: (None, strays))
    await keeper.delete()


async def _stray_pages(topic: TopicName, keeper: ChainKeeper, store: MetadataStore) -> list[Op]:
    """Return deletions of the pages that the chain's record does not name.

    An interrupted restore may have left some, and a key with children cannot be deleted.
    """
    key = keys.chain_key(topic)
    strays: list[Op] = []
    try:
        names = await store.children(key)
    except NoSuchKeyError:  # another owner has deleted it: the next write detects that
        names = []
    for name in names:
        page_key = f"{key}/{name}"
        if page_key not in keeper.page_keys and (found := await store.get(page_key)) is not None:
            strays.append(Delete(page_key, found.version))
    return strays


def _count_that_leaves(chain: Chain) -> int:
    return min(_LEAVE_AT_ONCE, count_that_may_leave(chain))


async def _delete_left(
    topic: TopicName, keeper: ChainKeeper, client: LedgerClient, segments: SegmentStore | None, patience_s: float
) -> float:
    """Delete what has left the chain of a topic being deleted. Return the time left to wait for the object store, in seconds."""
    waiting, urls = keeper.waiting_deletions(), keeper.chain.object_deletions or ()
    for start in range(0, len(waiting), _LEDGERS_AT_ONCE):
        group = waiting[start : start + _LEDGERS_AT_ONCE]
        await asyncio.gather(*(_delete(client, ledger_id) for ledger_id in group))
        for ledger_id in group:
            keeper.note_deleted(ledger_id)
    objects_began = asyncio.get_running_loop().time()
    await delete_objects_or_leave(topic, segments, urls, patience_s)
    gone = set(urls)
    await keeper.commit(lambda chain: (chain.replace(object_deletions=_without(chain.object_deletions, gone)), ()))
    has_failed = bool(urls) and asyncio.get_running_loop().time() - objects_began >= patience_s
    log.info("chain.shortened", extra={"topic": str(topic), "ledgers_left": len(keeper.chain.ledgers)})
    return 0.0 if has_failed else patience_s


def _without(urls: Sequence[str] | None, gone: Container[str]) -> tuple[str, ...] | None:
    return tuple(url for url in urls or () if url not in gone) or None


async def _cursor_ledgers(topic: TopicName, names: Sequence[str], store: MetadataStore) -> list[int]:
    records, ledger_ids = cursor_records(store), []
    for start in range(0, len(names), _CURSORS_AT_ONCE):
        found = await asyncio.gather(*(records.get((topic, name)) for name in names[start : start + _CURSORS_AT_ONCE]))
        ledger_ids += [one.record.cursor_ledger_id for one in found if one is not None and one.record.cursor_ledger_id is not None]
    return ledger_ids


async def _end_ledgers(topic: TopicName, ledger_ids: Sequence[int], client: LedgerClient) -> None:
    """Close every ledger before anything is deleted (rule 4). Raises ChainNotDeletableError for the first that cannot be closed."""

    async def end(ledger_id: int) -> None:
        try:
            await client.end_for_deletion(ledger_id)
        except (LedgerError, CorruptRecordError, NewerFormatError, TimeoutError) as error:
            why = error.args[0] if error.args else "no answer in time"
            message = f"nothing of topic {topic} was deleted: its ledger {ledger_id} cannot be closed now: {why}"
            raise ChainNotDeletableError(message, topic=str(topic), ledger_id=ledger_id) from error

    for start in range(0, len(ledger_ids), _LEDGERS_AT_ONCE):
        outcomes = await asyncio.gather(*map(end, ledger_ids[start : start + _LEDGERS_AT_ONCE]), return_exceptions=True)
        if (failure := next((outcome for outcome in outcomes if outcome is not None), None)) is not None:
            raise failure


def _without_cursors(deletes: Sequence[Op], cursor_ledgers: Iterable[int], chain: Chain) -> tuple[Chain, Sequence[Op]]:
    return chain.replace(deletions=tuple(dict.fromkeys([*chain.deletions, *cursor_ledgers]))), deletes


async def _delete(client: LedgerClient, ledger_id: int) -> None:
    try:
        await client.delete(ledger_id, spare_undeleted=True)
    except NoSuchLedgerError:
        pass
