"""Deletes objects of ledgers that left a chain, and of attempts to offload that failed.

    chain.object_deletions ──► delete each ──► one write without those that are deleted
                                    └──the store fails──► the queue stays; retried after a pause, which grows

Rules:
1. An object is deleted only after a committed record says that its ledger left the chain, or that its upload was given up.
2. Deleting is repeated until it succeeds; "no such object" is success.
3. The object of an upload that has not stopped yet is not deleted: the upload could write it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ManagedLedgerError
from cepheid_metadata import Chain, MetadataError
from cepheid_ports import CepheidError
from cepheid_tiered import SegmentStore
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_AT_ONCE = 16
_TIMEOUT_S = 30.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 300.0


class ObjectDeletions:
    """The queue of one open topic."""

    def __init__(self, topic: TopicName, keeper: ChainKeeper, store: SegmentStore | None) -> None:
        self._topic = topic
        self._keeper = keeper
        self._store = store
        self.is_uploading: Callable[[str], bool] = lambda _: False
        """Whether an upload is at this URL (rule 3)."""
        self._working = asyncio.Lock()
        self._failures = 0
        self._retry_at = 0.0
        self.last_error: str | None = None
        """Why objects could not be deleted at the last attempt; None: they were deleted."""

    def __repr__(self) -> str:
        return f"<ObjectDeletions of {self._topic}: {len(self.waiting)} waiting>"

    @property
    def waiting(self) -> Sequence[str]:
        return self._keeper.chain.object_deletions or ()

    @property
    def is_due(self) -> bool:
        """Whether `run` would do something now."""
        has_work = any(not self.is_uploading(url) for url in self.waiting)
        return has_work and self._store is not None and asyncio.get_running_loop().time() >= self._retry_at

    async def run(self) -> None:
        """Delete what waits, as far as possible now. A failure of the store is logged and sets the time of the next attempt.

        Raises ManagedLedgerError, MetadataError if the record cannot be written.
        """
        if self._store is None:
            return
        async with self._working:
            urls = [url for url in self.waiting if not self.is_uploading(url)]
            left = await delete_objects(self._store, urls)
            gone = dict.fromkeys(url for url in urls if url not in left)
            self._note(left)
            if gone:
                await self._keeper.commit(lambda chain: (_without_urls(chain, gone), ()))

    async def run_quietly(self) -> None:
        """Do the work of `run`, but leave a record that cannot be written now to the next attempt."""
        try:
            await self.run()
        except (ManagedLedgerError, MetadataError, TimeoutError) as error:
            log.info("segments.deletion_not_recorded", extra={"topic": str(self._topic), "error": str(error)})
            self._wait()

    def _note(self, left: dict[str, Exception]) -> None:
        if not left:
            self._failures, self._retry_at, self.last_error = 0, 0.0, None
            return
        url, error = next(iter(left.items()))
        self.last_error = f"{url} cannot be deleted: {error}"
        self._wait()
        fields = {"topic": str(self._topic), "objects": len(left), "url": url, "error": str(error)}
        log.warning("segments.delete_failed", extra=fields)

    def _wait(self) -> None:
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._retry_at = asyncio.get_running_loop().time() + pause_s


async def delete_objects(store: SegmentStore, urls: Sequence[str]) -> dict[str, Exception]:
    """Delete these objects, several at a time. Return those that could not be deleted, with the reason."""
    left: dict[str, Exception] = {}

    async def delete(url: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await store.delete(url)
        except (CepheidError, TimeoutError) as error:
            left[url] = error

    for start in range(0, len(urls), _AT_ONCE):
        if len(left) >= _AT_ONCE:  # the store is unavailable: the rest would fail as well
            left.update(dict.fromkeys(urls[start:], next(iter(left.values()))))
            break
        await asyncio.gather(*map(delete, urls[start : start + _AT_ONCE]))
    return left


async def delete_objects_or_leave(topic: TopicName, store: SegmentStore | None, urls: Sequence[str], patience_s: float) -> None:
    """Delete the objects of a topic that is being deleted. What cannot be deleted within `patience_s` is left, and logged."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    left: dict[str, Exception] = dict.fromkeys(urls, CepheidError("no object store is installed: pip install cepheid[tiered]"))
    pause_s = _FIRST_PAUSE_S / 2
    while store is not None and left:
        before = len(left)
        left = await delete_objects(store, list(left))
        if len(left) < before:  # the limit is for a store that does not answer, not for a long list
            deadline = loop.time() + patience_s
        elif loop.time() + pause_s > deadline:
            break
        else:
            await asyncio.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)
    if left:
        url, error = next(iter(left.items()))
        fields = {
            "topic": str(topic),
            "objects": len(left),
            "url": url,
            "error": str(error),
            "hint": "the topic is deleted; `cepheid tiered sweep` deletes its remaining objects",
        }
        log.warning("segments.left_behind", extra=fields)


def _without_urls(chain: Chain, gone: dict[str, None]) -> Chain:
    return chain.replace(object_deletions=tuple(url for url in chain.object_deletions or () if url not in gone) or None)
