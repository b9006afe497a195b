"""Stops the bookie after a failed sync outside journal and checkpoint, too: in log collection, deletion or scrubber.

The kernel may drop data after a failed sync and report success the next time (`disk.py`, rule 2). If the next pass
simply synced again, it would delete an entry log although the index on disk still refers to it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from cepheid_bookie.disk import SyncFailedError
from cepheid_ports import OnDone, Worker


class FailStopWorker(Worker):
    """Runs work in another worker. Calls `on_failed(error)` when a sync in it fails, and runs nothing once there is a `failure()`.

    A sync that fails because the disk is full does not stop the bookie: all callers then begin their work again from the start.
    """

    def __init__(
        self, worker: Worker, failure: Callable[[], BaseException | None], on_failed: Callable[[BaseException], None]
    ) -> None:
        self._worker = worker
        self._failure = failure
        self._on_failed = on_failed

    def __repr__(self) -> str:
        return f"<FailStopWorker of {self._worker!r}>"

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        if (failure := self._failure()) is not None:
            refusal = OSError(errno.EIO, f"the bookie has failed: {failure!r}")
            asyncio.get_running_loop().call_soon(on_done, None, refusal)
            return

        def on_finished(result: Any, error: BaseException | None) -> None:
            if isinstance(error, SyncFailedError) and error.errno != errno.ENOSPC:
                self._on_failed(error)
            on_done(result, error)

        self._worker.submit(work, on_finished)

    async def aclose(self) -> None:
        await self._worker.aclose()
