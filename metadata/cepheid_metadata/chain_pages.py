"""A chain that is too long for one record: the newest ledgers in the record, older ones in pages below its key.

    /chains/…/topic      record: ledgers 7,001 … 8,400; pages 3, 5, 6
    /chains/…/topic/3    ledgers    40 … 1,000        page 0 had 1 … 1,000; ledgers 1 … 39 were trimmed since
    /chains/…/topic/5    ledgers 1,001 … 2,000
    …

    chain ──split──► record + pages ──changes──► Put record, Create new pages, Delete old ones, in one multi
    record + pages ──assemble──► chain

Rules:
1. A page is never changed. A change is written as a new page with a higher number, and the old page is deleted, in the
   write that changes the record. So the record's version stands for the chain as a whole, and pages need no versions.
2. A number may be used again only after every ledger that was in the page of that number has left the chain. The record says
   which ledgers each page has, and a page says to which incarnation of its topic it belongs. So a page that matches the record is
   the intended one. A page that is missing, or does not match, means that the record was changed since it was read.
3. The record always has the chain's last ledger, the one that is written to.
4. Message counts that become known after a page was written are not added until it is written for another reason. They can be
   counted again, and writing all pages because a client asked for exact figures would cost more.
5. A chain without offloaded ledgers moves to pages late (`plain_ledgers`), because older releases read only the one record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from cepheid_metadata import keys
from cepheid_metadata.errors import CorruptRecordError, MetadataError
from cepheid_metadata.repositories import Found, chain_records
from cepheid_metadata.store import MAX_REQUEST_BYTES, Create, Delete, MetadataStore, Op, Put, Versioned
from cepheid_metadata.topic_records import Chain, ChainLedger, ChainPage, ChainPageRef, OffloadedLedger
from cepheid_wire import TopicName

T = TypeVar("T")

_TRIES = 20
_PAUSE_S = 0.01
_PAGES_AT_ONCE = 16
_HEADROOM_BYTES = 20_000  # of one write, for its other content: checks, keys, a cursor

MAX_CHANGE_BYTES = MAX_REQUEST_BYTES - _HEADROOM_BYTES
"""Limit of the record and the pages that one write changes."""


class ChainUnsettledError(MetadataError):
    """A chain is changed more often than it can be read."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "try again; if it persists, find out why this topic gets new ledgers or is opened so often"


class ChainTooLargeError(MetadataError):
    """A change of a chain needs more bytes than one write may have. Nothing was written."""

    hint: ClassVar[str] = "wait until ledgers and objects that left the topic are deleted, or shorten the topic's retention"


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How a chain is cut. Smaller limits are for tests: readers accept any."""

    record_ledgers: int = 1_000
    """The record keeps at least this many ledgers. It may have one page's ledgers more before the oldest move to a page."""
    page_ledgers: int = 1_000
    plain_ledgers: int = 5_000
    """Limit of the ledgers in the record of a chain that an older release can read (rule 5)."""
    record_bytes: int = 400_000
    """Limit of the ledgers in the record. If they need more, the oldest move to a page, however few they are."""
    page_bytes: int = 200_000
    """Limit of a page, unless one ledger alone needs more."""
    most_ledgers: int = 100_000
    """Limit of a chain. At this number appends continue in the last ledger when it is full."""


LIMITS = PageLimits()


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A chain as it is stored. `pages` are those that `record.pages` names, in the same order."""

    chain: Chain
    """The whole chain."""
    record: Chain
    pages: tuple[ChainPage, ...] = ()

    @property
    def refs(self) -> tuple[ChainPageRef, ...]:
        return self.record.pages or ()


def assemble(record: Chain, pages: Sequence[ChainPage], key: str) -> StoredChain:
    """Return the chain of a record and its pages. Raises CorruptRecordError if they contradict each other."""
    if not record.pages:
        return StoredChain(record, record)
    ledgers: list[ChainLedger] = []
    messages: dict[int, int] = {}
    offloaded: dict[int, OffloadedLedger] = {}
    parts: list[ChainPage | Chain] = [*pages, record]
    for part in parts:
        ledgers += part.ledgers
        messages |= part.messages or {}
        offloaded |= part.offloaded or {}
    try:
        chain = record.replace(ledgers=tuple(ledgers), messages=messages or None, offloaded=offloaded or None, pages=None)
    except ValueError as error:
        raise CorruptRecordError(f"{key} and its pages make no chain: {error}", key=key, record=Chain.NAME) from None
    return StoredChain(chain, record, tuple(pages))


def split(chain: Chain, before: StoredChain | None = None, limits: PageLimits = LIMITS) -> StoredChain:
    """Return how `chain` is stored from now on. `before`: how it is stored now; unchanged pages are kept."""
    pages: list[tuple[ChainPageRef, ChainPage]] = []
    number = 1 + max((ref.number for ref in before.refs), default=-1) if before is not None else 0
    start = 0
    if before is not None and before.pages:
        same_offloads = (chain.offloaded or {}) == (before.chain.offloaded or {})
        for ref, page in zip(before.refs, before.pages, strict=True):
            end = start + len(page.ledgers)
            if chain.ledgers[start:end] != page.ledgers:
                end = _end_of(page, chain.ledgers, start)
            part = chain.ledgers[start:end]
            start = end
            if part == page.ledgers and (same_offloads or _of(chain.offloaded, part) == (page.offloaded or {})):
                pages.append((ref, page))
                continue
            for new in _cut(chain, part, limits):
                pages.append((new.ref(number), new))
                number += 1
    rest = chain.ledgers[start:]
    is_plain = not pages and not chain.offloaded and not chain.object_deletions
    excess = _excess(chain, rest, is_plain=is_plain, limits=limits)
    for new in _cut(chain, rest[:excess], limits):
        pages.append((new.ref(number), new))
        number += 1
    if not pages:
        return StoredChain(chain, chain)
    rest = rest[excess:]
    messages, offloaded = _of(chain.messages, rest) or None, _of(chain.offloaded, rest) or None
    record = chain.replace(ledgers=rest, messages=messages, offloaded=offloaded, pages=tuple(ref for ref, _ in pages))
    return StoredChain(chain, record, tuple(page for _, page in pages))


def changes(key: str, version: int, before: StoredChain, after: StoredChain) -> list[Op]:
    """Return the operations that change `before` to `after`, the record's first. Raises ChainTooLargeError."""
    ops = _changes(key, version, before, after)
    if size_bytes_of(ops) > MAX_CHANGE_BYTES:  # the long record of an older release, which becomes pages at once
        pages = tuple(page if page in before.pages else page.replace(messages=None) for page in after.pages)
        ops = _changes(key, version, before, replace(after, pages=pages))
    if (size_bytes := size_bytes_of(ops)) > MAX_CHANGE_BYTES:
        created = sum(isinstance(op, Create) for op in ops)
        chain = after.chain
        message = (
            f"{key}: a change needs {size_bytes} bytes in one write, the limit is {MAX_CHANGE_BYTES}: {created} "
            f"pages, {len(after.record.ledgers)} ledgers in the record, {len(chain.deletions)} ledgers and "
            f"{len(chain.object_deletions or ())} objects that wait to be deleted"
        )
        raise ChainTooLargeError(message, key=key, size_bytes=size_bytes)
    return ops


async def create_chain(store: MetadataStore, topic: TopicName, chain: Chain, limits: PageLimits = LIMITS) -> int:
    """Create a chain that may be too long for one write, and return its record's version. Raises KeyExistsError.

    It grows in steps from its oldest ledgers on, each with its pages, so that a crash leaves a beginning of the chain. The mark of
    its incarnation is up to the caller. For chains from elsewhere: a keeper's chain grows by a few ledgers at a time.
    """
    key = keys.chain_key(topic)
    first = chain.replace(ledgers=(), messages=None, offloaded=None, terminated_at=None, deletions=())
    await chain_records(store).create(topic, first)
    stored, version, end = StoredChain(first, first), 0, 0
    while stored.chain != chain:
        size_bytes = 0
        while end < len(chain.ledgers) and size_bytes < limits.page_bytes:
            size_bytes += _cost_bytes(chain, chain.ledgers[end])
            end += 1
        part = chain.ledgers[:end]
        grown = chain.replace(
            ledgers=part,
            messages=_of(chain.messages, part) or None,
            offloaded=_of(chain.offloaded, part) or None,
            deletions=chain.deletions if end == len(chain.ledgers) else (),
        )
        after = split(chain if end == len(chain.ledgers) else grown, stored, limits)
        await store.multi(changes(key, version, stored, after))
        stored, version = after, version + 1
    return version


def page_deletes(key: str, stored: StoredChain) -> list[Op]:
    """Return the operations that delete all pages."""
    return [Delete(keys.chain_page_key(key, ref.number), 0) for ref in stored.refs]


async def read_chain(store: MetadataStore, topic: TopicName) -> Found[Chain] | None:
    """Return the whole chain of a topic and its record's version; None: it has none (certain).

    Raises NewerFormatError, CorruptRecordError; ChainUnsettledError if it changes all the time.
    """
    found = await read_stored_chain(store, topic)
    return None if found is None else Found(found[0].chain, found[1])


async def read_stored_chain(store: MetadataStore, topic: TopicName) -> tuple[StoredChain, int] | None:
    """Return the whole chain as `read_chain` does, with its record and pages, and the record's version."""
    key = keys.chain_key(topic)
    for _ in range(_TRIES):
        found = await chain_records(store).get(topic)
        if found is None:
            return None
        pages = await _read_pages(store, found.record, key)
        if pages is not None:
            return assemble(found.record, pages, key), found.version
        if await chain_records(store).get(topic) == found:
            raise missing_page(found.record, key)
        await asyncio.sleep(_PAUSE_S)
    raise ChainUnsettledError(f"{key} was changed {_TRIES} times while it and its pages were read", key=key)


async def _read_pages(store: MetadataStore, record: Chain, key: str) -> list[ChainPage] | None:
    pages: list[ChainPage] = []
    refs = record.pages or ()
    for start in range(0, len(refs), _PAGES_AT_ONCE):
        group = refs[start : start + _PAGES_AT_ONCE]
        for ref, found in zip(group, await _values(store, key, group), strict=True):
            page = _page_of(record, key, ref, None if found is None else found.value)
            if page is None:
                return None
            pages.append(page)
            await asyncio.sleep(0)  # a page takes milliseconds to decode, and a chain may have a hundred
    return pages


async def _values(store: MetadataStore, key: str, refs: Sequence[ChainPageRef]) -> list[Versioned | None]:
    return await asyncio.gather(*(store.get(keys.chain_page_key(key, ref.number)) for ref in refs))


def page_keys(record: Chain, key: str) -> list[str]:
    """Return the keys of the pages in this record of the chain with this key."""
    return [keys.chain_page_key(key, ref.number) for ref in record.pages or ()]


def pages_of(record: Chain, key: str, values: Sequence[bytes | None]) -> list[ChainPage] | None:
    """Return the pages of a record from the values at `page_keys`; None: the record was changed since it was read (rule 2)."""
    pages: list[ChainPage] = []
    for ref, value in zip(record.pages or (), values, strict=True):
        page = _page_of(record, key, ref, value)
        if page is None:
            return None
        pages.append(page)
    return pages


def _page_of(record: Chain, key: str, ref: ChainPageRef, value: bytes | None) -> ChainPage | None:
    """Return the page that the record means by `ref`; None: this is a different one."""
    if value is None:
        return None
    page = ChainPage.decode(value, keys.chain_page_key(key, ref.number))
    return page if page.incarnation == record.incarnation and page.ref(ref.number) == ref else None


def missing_page(record: Chain, key: str) -> CorruptRecordError:
    """Return the error for a record whose pages are missing although it did not change."""
    numbers = ", ".join(str(ref.number) for ref in record.pages or ())
    message = f"{key} names pages {numbers}, and not all of them are there with the ledgers that it says"
    return CorruptRecordError(message, key=key, record=Chain.NAME)


def _excess(chain: Chain, ledgers: Sequence[ChainLedger], *, is_plain: bool, limits: PageLimits) -> int:
    """Return how many of the oldest of these ledgers move from the record to pages: as many as fill whole pages, never the last."""
    most = limits.record_ledgers + limits.page_ledgers
    if len(ledgers) <= (limits.plain_ledgers if is_plain else most) and _fits(chain, ledgers, is_plain, limits):
        return 0
    moved = 0
    for end in _page_ends(chain, ledgers[:-1], limits):
        moved = end
        if len(ledgers) - moved <= most and _fits(chain, ledgers[moved:], is_plain, limits):
            break
    return moved


def _fits(chain: Chain, ledgers: Sequence[ChainLedger], is_plain: bool, limits: PageLimits) -> bool:
    return is_plain or sum(_cost_bytes(chain, ledger) for ledger in ledgers) <= limits.record_bytes


def _page_ends(chain: Chain, ledgers: Sequence[ChainLedger], limits: PageLimits) -> Iterator[int]:
    """Yield the end of each page when all of these ledgers are cut into pages."""
    start = size_bytes = 0
    for index, ledger in enumerate(ledgers):
        cost_bytes = _cost_bytes(chain, ledger)
        if index - start == limits.page_ledgers or (index > start and size_bytes + cost_bytes > limits.page_bytes):
            yield index
            start, size_bytes = index, 0
        size_bytes += cost_bytes
    if ledgers:
        yield len(ledgers)


def _cut(chain: Chain, ledgers: Sequence[ChainLedger], limits: PageLimits) -> Iterator[ChainPage]:
    start = 0
    for end in _page_ends(chain, ledgers, limits):
        part = tuple(ledgers[start:end])
        messages, offloaded = _of(chain.messages, part) or None, _of(chain.offloaded, part) or None
        yield ChainPage(incarnation=chain.incarnation, ledgers=part, messages=messages, offloaded=offloaded)
        start = end


def _end_of(page: ChainPage, ledgers: Sequence[ChainLedger], start: int) -> int:
    """Return where the ledgers of a page end, some of which have left the chain."""
    named = {ledger.ledger_id for ledger in page.ledgers}
    while start < len(ledgers) and ledgers[start].ledger_id in named:
        start += 1
    return start


def _of(values: dict[int, T] | None, ledgers: Sequence[ChainLedger]) -> dict[int, T]:
    if not values:
        return {}
    return {ledger.ledger_id: values[ledger.ledger_id] for ledger in ledgers if ledger.ledger_id in values}


def _cost_bytes(chain: Chain, ledger: ChainLedger) -> int:
    """Return an upper limit of a ledger's bytes in the JSON of a record or page."""
    copy = (chain.offloaded or {}).get(ledger.ledger_id)
    return 150 if copy is None else 350 + len(copy.url.encode())


def _changes(key: str, version: int, before: StoredChain, after: StoredChain) -> list[Op]:
    old = {ref.number for ref in before.refs}
    new = {ref.number for ref in after.refs}
    return [
        Put(key, after.record.encode(), version),
        *(
            Create(keys.chain_page_key(key, ref.number), page.encode())
            for ref, page in zip(after.refs, after.pages, strict=True)
            if ref.number not in old
        ),
        *(Delete(keys.chain_page_key(key, ref.number), 0) for ref in before.refs if ref.number not in new),
    ]


def size_bytes_of(ops: Sequence[Op]) -> int:
    """Return how many bytes these operations take in a request."""
    return sum(len(op.key) + (len(op.value) if isinstance(op, Create | Put) else 0) for op in ops)
