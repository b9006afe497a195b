"""Ledgers in object stores (T1-T4): at each commit of a chain, each object that is stored or deleted, each read of an object.

An object is read here by pyarrow alone, and compared with what was sent: not with what the product makes of it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from cepheid_metadata import Chain
from cepheid_rpc import HEADER_BYTES, EntryGroup
from tests.simulation.checks.history import History

_SLACK_S = 6.0
"""Clocks of machines are wrong by seconds, and a ledger may leave as much too early by the clock of another owner."""


class OffloadChecks:
    """Looks at each commit of a chain record."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._complete_since_s: dict[str, float] = {}  # by URL

    def on_chain(self, key: str, before: Chain | None, chain: Chain, process: str) -> None:
        known = {} if before is None else before.offloaded or {}
        for ledger_id, found in (chain.offloaded or {}).items():
            was = known.get(ledger_id)
            is_news = was is None or was.url != found.url
            if found.complete and (is_news or not was.complete):
                self._check_complete(ledger_id, found.url, chain, process)
            if not found.on_bookies and (is_news or was.on_bookies):
                self._check_left(key, ledger_id, found.url, is_complete=not is_news and was.complete, chain=chain, process=process)
        if before is not None and before.incarnation == chain.incarnation:
            self._check_forgotten(key, before, chain, process)

    def _check_complete(self, ledger_id: int, url: str, chain: Chain, process: str) -> None:
        """T1."""
        history = self._history
        history.did("offload a ledger")
        entries = next(ledger.entries or 0 for ledger in chain.ledgers if ledger.ledger_id == ledger_id)
        self._complete_since_s[url] = history.now_s
        stored, sent = payloads_of(history.objects.get(url)), history.sent[ledger_id][:entries]
        history.check(
            "T1",
            stored == sent,
            lambda: f"{process} records {url} as complete: it has {_count(stored)} of the {entries} entries of ledger {ledger_id}",
        )

    def _check_left(self, key: str, ledger_id: int, url: str, *, is_complete: bool, chain: Chain, process: str) -> None:
        """T2: it was complete in the record before, and for so long as the topic's policy says, by a right clock."""
        history, topic = self._history, self._history.topics.get(key)
        history.did("leave the bookies")
        history.check("T2", is_complete, lambda: f"{process} lets ledger {ledger_id} leave the bookies before {url} is complete")
        if topic is not None and (process, chain.epoch) in topic.timely:
            since_s = history.now_s - self._complete_since_s.get(url, 0.0)
            history.check(
                "T2",
                since_s + _SLACK_S >= topic.keeps_on_bookies_ms / 1_000,
                lambda: f"{process} lets ledger {ledger_id} leave the bookies {since_s:.3f} s after {url} was complete",
            )

    def _check_forgotten(self, key: str, before: Chain, chain: Chain, process: str) -> None:
        """T3: what a record does not name any more is not in the store."""
        history, named = self._history, urls_of(chain)
        for url in urls_of(before):
            if url not in named:
                there = url in history.objects and url not in history.late_objects
                history.check("T3", not there, lambda url=url: f"{process} takes {url} out of {key}, and the object is there")


def urls_of(chain: Chain) -> dict[str, None]:
    """All objects that a chain names."""
    offloaded = [found.url for found in (chain.offloaded or {}).values()]
    return dict.fromkeys((*offloaded, *(chain.object_deletions or ())))


def check_stored_object(history: History, url: str) -> None:
    """T3: an object is stored only under a URL that a record names."""
    named = any(url in urls_of(chain) for chain in history.chains.values())
    history.check("T3", named, lambda: f"{url} is stored, and no record names it")


def check_deleted_object(history: History, url: str) -> None:
    """T2: the object of a ledger that is in a chain, and complete, stays."""
    for key, chain in history.chains.items():
        needed = any(found.url == url and found.complete for found in (chain.offloaded or {}).values())
        history.check("T2", not needed, lambda key=key: f"{url} is deleted, and its ledger is in {key}")


def check_read(history: History, ledger_id: int, first: int, last: int, groups: Sequence[EntryGroup]) -> None:
    """T4: what is read from an object is what was sent, from the entry that was asked for on."""
    read = [bytes(payload) for group in groups for payload in group.payloads()]
    right = (
        bool(groups)
        and first + len(read) - 1 <= last
        and read == history.sent[ledger_id][first : first + len(read)]
        and next((group.ledger_id, group.first_entry_id) for group in groups) == (ledger_id, first)
    )
    history.check("T4", right, lambda: f"{first}..{last} of ledger {ledger_id} is read from its object as {list(groups)}")


def payloads_of(data: bytes | None) -> list[bytes] | None:
    """The entries in the bytes of an object, without their headers; None: it is no such object."""
    if data is None:
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = ["entry_id", "raw_entry", "value_follows", "value"]
        rows = pq.read_table(io.BytesIO(data), columns=columns, use_threads=False).to_pylist()
    except (pa.ArrowInvalid, OSError):
        return None
    entries: dict[int, bytes] = {}
    for row in rows:
        value = row["value"] if row["value_follows"] else None
        entries[row["entry_id"]] = entries.get(row["entry_id"], b"") + (row["raw_entry"] or b"") + (value or b"")
    return [entry[HEADER_BYTES:] for entry in entries.values()]


def _count(stored: list[bytes] | None) -> str:
    return "none" if stored is None else str(len(stored))
