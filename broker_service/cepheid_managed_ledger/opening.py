"""Opening a topic's chain, so that correctness does not depend on which broker believes that it owns the topic.

    load chain ──► fence the ledger without a recorded end, find its end ──► prepare a new ledger ──► one write: its end, the new
                        ▲                                                         │                      ledger, the chain
                        └── another process changed a ledger's record ◄───────────│──────────────────────────┴──► the chain was:
                                                                                  │                another opening won, fail
                                                                                  └──too few bookies──► the same write without a
                                                                                                new ledger; `start_late` adds it
Rules:
1. Nothing is served before the chain is taken over.
2. Every ledger before the new one is closed at exactly the entries that the chain records. The end of the last one is written
   together with the chain (one compare-and-set for both, including the new ledger's record): a topic costs two writes, not four,
   and an opening that fails leaves no ledger behind. A conflict on a ledger's record says nothing about the chain: another process
   closed the ledger, or repair moved copies of it. The end is then looked for again, and written by itself. With the end, repair
   is asked to check each copy of that ledger once: what its writer knew about missing copies was lost with it. If all that is too
   large for one write (a record with thousands of fragments, a chain with tens of thousands of deletions), each record is written
   on its own, the chain last.
3. A ledger of the chain that has no metadata is lost data: an error for an operator, never an empty ledger.
4. Empty ledgers leave the chain through the deletion queue, in the same write; they are deleted after it. While there is no new
   ledger, the last one stays even if it is empty: clients may hold positions in it.
5. Ledger ids rise along the chain: clients compare positions by them. A chain without ledgers may belong to a topic that was
   deleted and created again, whose clients return with old positions: it begins above all ids that there ever were. The deletion
   queue does not have the largest id, as that ledger may be deleted already. The record of a new chain is created before its first
   ledger, empty: the id is requested after everything that had the topic's name before is deleted.
6. Too few writable bookies for a new ledger do not keep a topic closed: its entries can be read and acknowledged. The chain is
   taken over all the same, so the previous owner is shut out for good. A topic that never had a ledger is opened empty: consumers
   that start before any producer subscribe, and wait for its first message. Each failed attempt to add a ledger is followed by
   a check of the chain's version, since no bookie can tell such an owner that it was deposed. A topic whose last ledger cannot be
   recovered is not opened: its end is not known then, and entries read from it might not be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cepheid_ledger import LedgerClient, LedgerError, LedgerWriter, NoSuchLedgerError, NotEnoughBookiesError
from cepheid_managed_ledger.chain_edits import without
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.conditional_write import CONFLICTS
from cepheid_managed_ledger.errors import ChainDamagedError, ManagedLedgerFencedError
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.settings import ManagedLedgerConfig
from cepheid_metadata import Chain, ChainLedger, MetadataError, Op, ValueTooLargeError
from cepheid_ports import Ports, TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_INCARNATION_BITS = 64


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The result of an opening besides the chain."""

    writer: LedgerWriter | None
    """The writer of the new ledger; None: the topic is terminated, or there are too few bookies."""
    lacking: NotEnoughBookiesError | None = None
    """Why there is no new ledger yet."""


def custom_fields(topic: TopicName, chain: Chain, use: str) -> dict[str, str]:
    """Return what a ledger's record stores about the opening that creates it. `use` is "entries" or "cursors"."""
    return {"topic": str(topic), "use": use, "incarnation": chain.incarnation, "epoch": str(chain.epoch)}


async def take_over_chain(
    topic: TopicName,
    keeper: ChainKeeper,
    client: LedgerClient,
    config: ManagedLedgerConfig,
    tasks: TaskOwner,
    unfinished: dict[TopicName, asyncio.Future[None]],
    ports: Ports,
) -> TakenOver:
    """Recover what the previous owner left, and take the chain over. `tasks` outlives the caller.

    `unfinished` are openings of this process that were cancelled and still run to their end: waiting for them avoids a conflict
    with them. Raises ChainDamagedError, ManagedLedgerFencedError, LedgerError, MetadataError. Nothing is left half open.
    """
    while topic in unfinished:
        await asyncio.wait([unfinished[topic]])
    found = await keeper.load()
    before = found or Chain(incarnation=f"{ports.random.getrandbits(_INCARNATION_BITS):016x}")
    ended = await _ended(topic, before.ledgers, client, ports)
    writer: LedgerWriter | None = None
    is_wanted = True

    async def take_over() -> TakenOver:
        nonlocal writer, ended
        apart = False
        done = unfinished[topic] = asyncio.get_running_loop().create_future()
        try:
            while True:
                try:
                    taken_over = await _take_over(topic, before, ended, keeper, client, config, apart=apart)
                    break
                except CONFLICTS as error:  # of a ledger's record (rule 2)
                    log.info("managed_ledger.ledger_changed", extra={"topic": str(topic), "error": str(error)})
                except ValueTooLargeError as error:
                    if apart:
                        raise
                    log.info("managed_ledger.written_apart", extra={"topic": str(topic), "error": str(error)})
                    apart = True
                ended = await _ended(topic, before.ledgers, client, ports, alone=True)
            writer = taken_over.writer
            if writer is not None and not is_wanted:
                await writer.aclose()
            return taken_over
        finally:
            del unfinished[topic]
            done.set_result(None)

    try:
        return await finish(tasks, take_over(), name="take-over")
    except asyncio.CancelledError:  # the chain names the new ledger, or will; the next opening closes it
        is_wanted = False
        if writer is not None:
            await writer.aclose()
        raise


async def create_ledger(topic: TopicName, chain: Chain, client: LedgerClient, config: ManagedLedgerConfig) -> LedgerWriter:
    """Create the next ledger of a chain. Raises LedgerError, MetadataError."""
    return await client.create(**_next_ledger(topic, chain, config))


def _next_ledger(topic: TopicName, chain: Chain, config: ManagedLedgerConfig) -> dict[str, Any]:
    """Return the arguments of `LedgerClient.create` and `prepare`."""
    return {
        "ensemble_size": config.ensemble_size,
        "write_quorum": config.write_quorum,
        "ack_quorum": config.ack_quorum,
        "custom": custom_fields(topic, chain, "entries"),
        "above": max([ledger.ledger_id for ledger in chain.ledgers] + list(chain.deletions)) if chain.ledgers else None,  # rule 5
    }


async def start_late(topic: TopicName, keeper: ChainKeeper, client: LedgerClient, config: ManagedLedgerConfig) -> LedgerWriter:
    """Add the ledger that an opening could not create (rule 6). The chain names it when this returns.

    Raises LedgerError, MetadataError: nothing was recorded, try again later. Raises ManagedLedgerError: this opening has ended.
    """
    writer = await create_ledger(topic, keeper.chain, client, config)

    def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
        assert not any(ledger.is_open for ledger in chain.ledgers[-1:]), f"{topic} has an open ledger already: {chain.ledgers[-1]}"
        return chain.replace(ledgers=(*chain.ledgers, ChainLedger(ledger_id=writer.ledger_id))), ()

    return await _link(writer, client, keeper.commit(plan))


async def delete_unlinked(client: LedgerClient, writer: LedgerWriter) -> bool:
    """Delete a ledger that certainly no record names. False: it could not be deleted; its custom fields identify its topic."""
    await writer.aclose()
    try:
        await client.delete(writer.ledger_id)
    except (LedgerError, MetadataError, TimeoutError) as error:
        log.warning("ledger.orphaned", extra={"ledger_id": writer.ledger_id, "error": str(error)})
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Ended:
    """The chain's ledgers with every end known. `writes` record the ends that are not in the ledgers' own records yet."""

    ledgers: tuple[ChainLedger, ...]
    writes: tuple[Op, ...]


async def _ended(
    topic: TopicName, ledgers: Sequence[ChainLedger], client: LedgerClient, ports: Ports, *, alone: bool = False
) -> _Ended:
    """Fence the last ledger if it has no recorded end, and find its end. `alone`: write the end at once."""
    ended: list[ChainLedger] = []
    writes: list[Op] = []
    for ledger in ledgers:
        if ledger.is_open:
            try:
                if alone:
                    end = await client.recover(ledger.ledger_id)
                else:
                    end, closing, checks = await client.find_end(ledger.ledger_id)
                    writes += [] if closing is None else [closing, *checks]
            except NoSuchLedgerError as error:
                message = f"{topic}: its chain names ledger {ledger.ledger_id}, which has no metadata"
                raise ChainDamagedError(message, topic=str(topic), ledger_id=ledger.ledger_id) from error
            ledger = ChainLedger(
                ledger_id=ledger.ledger_id,
                entries=end.last_entry_id + 1,
                size_bytes=end.length,
                closed_at_ms=ports.wall_ms(),
            )
        ended.append(ledger)
    return _Ended(tuple(ended), tuple(writes))


async def _take_over(
    topic: TopicName,
    before: Chain,
    ended: _Ended,
    keeper: ChainKeeper,
    client: LedgerClient,
    config: ManagedLedgerConfig,
    *,
    apart: bool,
) -> TakenOver:
    """Write the chain with the ends and the next ledger; `apart`: create the ledger before that, in a write of its own.

    Raises one of CONFLICTS if another process has changed the record of a ledger, and ValueTooLargeError: nothing was written.
    """
    chain = before.replace(epoch=before.epoch + 1, ledgers=ended.ledgers)
    if chain.terminated_at is not None:
        await keeper.take_over(chain, ended.writes)
        return TakenOver(None)
    if keeper.is_new:
        await keeper.begin(chain.replace(epoch=0))
    try:
        new = await (client.create if apart else client.prepare)(**_next_ledger(topic, chain, config))
    except NotEnoughBookiesError as error:
        last_id = chain.ledgers[-1].ledger_id if chain.ledgers else None
        await keeper.take_over(_without_empty(chain, but=last_id), ended.writes)
        log.warning("managed_ledger.without_open_ledger", extra={"topic": str(topic), "error": str(error), "hint": error.hint})
        return TakenOver(None, error)
    chain = _without_empty(chain)
    ledger_id = new.ledger_id if isinstance(new, LedgerWriter) else new.record.ledger_id
    chain = chain.replace(ledgers=(*chain.ledgers, ChainLedger(ledger_id=ledger_id)))
    if isinstance(new, LedgerWriter):
        return TakenOver(await _link(new, client, keeper.take_over(chain, ended.writes)))
    await keeper.take_over(chain, (*ended.writes, new.op))
    return TakenOver(client.begin(new))


def _without_empty(chain: Chain, but: int | None = None) -> Chain:
    """Return the chain with its empty ledgers moved to the deletion queue, except for `but` (rule 4)."""
    gone = [ledger.ledger_id for ledger in chain.ledgers if not ledger.entries and ledger.ledger_id != but]
    return without(chain, gone) if gone else chain


async def _link(writer: LedgerWriter, client: LedgerClient, record: Coroutine[Any, Any, None]) -> LedgerWriter:
    """Await `record`, the write that adds the writer's ledger to the chain. If it fails, no writer is left open."""
    try:
        await record
    except (ManagedLedgerFencedError, MetadataError):  # certainly the chain does not name it
        await delete_unlinked(client, writer)
        raise
    except BaseException:  # the chain may name it
        await writer.aclose()
        raise
    return writer
