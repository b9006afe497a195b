"""Limit the share of a broker that offloading takes, over all its topics.

Rules:
1. At most `offload_uploads` ledgers are uploaded at a time. A topic queues again after each ledger, so that a topic with a long
   history does not keep the others waiting.
2. Over time no more than `offload_bytes_per_s` are read from the bookies for uploads; 0: no limit.
3. Publishing and dispatching come first. Before each part is read, one turn of the event loop is timed. If the turn is long,
   other work is waiting for the loop, and the upload pauses `_YIELD` times as long as the turn took. So offloading takes a small
   share of the loop on a busy broker, and is not slowed down on an idle one.
"""

from __future__ import annotations

import asyncio

_BUSY_TURN_S = 0.002
_YIELD = 4
_MAX_YIELD_S = 1.0
_BURST_S = 0.1


class OffloadPool:
    """The turns and the read rate that all uploads of a broker share."""

    def __init__(self, uploads: int, bytes_per_s: int) -> None:
        self.turns = asyncio.Semaphore(uploads)
        """Held during each upload. Waiting topics get it in order."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.read_bytes = 0
        self.yielded_s = 0.0
        """Time for which uploads paused because the loop was busy."""

    def __repr__(self) -> str:
        return f"<OffloadPool {self.read_bytes} B read, yielded for {self.yielded_s:.3f} s>"

    async def pace(self, size_bytes: int) -> None:
        """Wait until the next part may be read; `size_bytes` is the size of the last one."""
        self.read_bytes += size_bytes
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(0)
        now = loop.time()
        pause_s = 0.0
        if now - began > _BUSY_TURN_S:
            pause_s = min(_MAX_YIELD_S, _YIELD * (now - began))
            self.yielded_s += pause_s
        if self._bytes_per_s:
            self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._bytes_per_s
            pause_s = max(pause_s, self._free_at - now)
        if pause_s > 0:
            await asyncio.sleep(pause_s)
