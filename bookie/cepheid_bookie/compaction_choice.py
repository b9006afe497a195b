"""Choice of the entry logs that compaction copies together, and when. No I/O.

    share of a log = bytes that a copy of its live blocks would take / bytes that it takes now

    minor: share below `minor_share`      each pass: cheap, since little is copied for much space
    major: share below `major_share`      once an interval; at once while the disk has little space, or less than half is live

Logs with the lowest share come first. Several are copied into one new log, up to the size of a log. On a disk with little room
the log with the fewest live bytes comes first instead: the copy must fit before its space comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cepheid_bookie.entry_log import LOG_HEADER_BYTES

_MAJOR_BELOW = 0.5
"""Share of live bytes in all logs together below which a major compaction does not wait for its interval."""


class LogFigures(NamedTuple):
    """Size and live bytes of a closed log."""

    log_id: int
    size_bytes: int
    live_bytes: int
    """Bytes of the blocks that the index still refers to."""
    blocks: int

    @property
    def share(self) -> float:
        """Size of a copy of the live blocks as a share of the log."""
        return (LOG_HEADER_BYTES + self.live_bytes) / max(1, self.size_bytes)


def is_major_due(since_last_s: float, interval_s: float, *, low_space: bool, live_bytes: int, log_bytes: int) -> bool:
    """Return whether this pass should be a major one. `live_bytes` and `log_bytes` are sums over all logs."""
    return low_space or since_last_s >= interval_s or live_bytes < _MAJOR_BELOW * log_bytes


def sparse_logs(logs: Iterable[LogFigures], below_share: float) -> list[LogFigures]:
    """Return the logs that are worth copying, lowest share first, without dead ones, which are only deleted."""
    return sorted((log for log in logs if log.blocks and log.share < below_share), key=lambda log: (log.share, log.log_id))


def logs_of_round(logs: Sequence[LogFigures], most_blocks: int) -> list[LogFigures]:
    """Return the first of the logs (at least one), up to so many blocks: their locations are in memory together."""
    chosen: list[LogFigures] = []
    blocks = 0
    for log in logs:
        if chosen and blocks + log.blocks > most_blocks:
            break
        chosen.append(log)
        blocks += log.blocks
    return chosen


def logs_of_output(logs: Sequence[LogFigures], log_bytes: int, room_bytes: int) -> list[LogFigures]:
    """Return the logs to copy into the next new log of up to `log_bytes`, when the disk has room for `room_bytes`.

    Empty if not even the smallest copy fits.
    """
    chosen: list[LogFigures] = []
    size_bytes = LOG_HEADER_BYTES
    for log in logs:
        size_bytes += log.live_bytes
        if size_bytes > room_bytes or (chosen and size_bytes > log_bytes):
            break
        chosen.append(log)
    if not chosen and logs:
        smallest = min(logs, key=lambda log: (log.live_bytes, log.log_id))
        if LOG_HEADER_BYTES + smallest.live_bytes <= room_bytes:
            chosen.append(smallest)
    return chosen
