"""Which faults a run has, how often, and how many of each kind there were.

`Faults` is what a run may suffer; `FaultPlan` draws from the seed, counts what it deals out, and deals out nothing any more
once the world has been healed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from tests.simulation.world.sim_clock import MachineClocks


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities are per message, per disk operation, or per session request; 0 switches a fault off."""

    # network, per message
    delay_s: tuple[float, float] = (0.0002, 0.002)
    late: float = 0.004  # so late that timeouts may strike first
    late_s: tuple[float, float] = (0.05, 4.0)
    loss: float = 0.002  # the message is lost, and the connection with it: found out after `silence_s`
    silence_s: float = 3.0
    reset: float = 0.002  # the connection breaks at once, before or after the server acted
    duplicate: float = 0.01  # an add message or call is delivered a second time, late
    corrupt: float = 0.001  # a bit of an add message flips on its way
    corrupt_answer: float = 0.001  # … or of what a bookie has read
    # sockets, per read of a process
    slow_receiver: float = 0.001  # it reads nothing for so long
    slow_receiver_s: tuple[float, float] = (0.1, 3.0)
    pieces: float = 0.01  # what was written at once is read in two pieces
    # disk, per operation of a bookie
    disk_delay_s: tuple[float, float] = (0.0, 0.002)
    slow_sync: float = 0.003
    slow_sync_s: tuple[float, float] = (0.5, 5.0)
    stuck_sync: float = 0.0001
    stuck_sync_s: tuple[float, float] = (10.0, 30.0)
    sync_error: float = 0.0008
    write_error: float = 0.0005  # a prefix of it is there
    read_error: float = 0.002
    index_error: float = 0.002  # per write, and per look, of the block index
    crash_at_disk: float = 0.001
    pause_at_disk: float = 0.0003  # the process stops in the middle of a disk's work, and goes on later
    pause_s: tuple[float, ...] = (0.001, 0.02, 0.3, 2.0, 9.0)  # up to three times a session
    # clocks of machines
    clock_skew_s: float = 2.0
    clock_drift: float = 0.01
    # object stores, per request
    object_delay_s: tuple[float, float] = (0.001, 0.02)
    object_slow: float = 0.02
    object_slow_s: tuple[float, float] = (0.5, 4.0)
    object_refused: float = 0.03
    object_answer_lost: float = 0.02
    object_cut: float = 0.03  # per object: half of it is kept, and nobody is told
    # metadata, per request
    metadata_delay_s: tuple[float, float] = (0.0, 0.003)
    lost_answer: float = 0.01  # the write happened, the caller hears "unknown"
    refused: float = 0.01  # nothing happened, the caller hears "unreachable"
    stale_read: float = 0.03  # a follower answers that is so far behind
    stale_read_s: tuple[float, float] = (0.005, 1.0)
    late_watch: float = 0.02  # what it tells comes late, together with what happens meanwhile
    late_watch_s: tuple[float, float] = (0.1, 3.0)
    missed_watch: float = 0.003  # the connection breaks under it: heard of when there is a new one
    missed_watch_s: tuple[float, float] = (0.5, 4.0)

    def without(self, *names: str) -> Faults:
        return replace(self, **dict.fromkeys(names, 0.0))


CALM = Faults().without(
    "late", "loss", "reset", "duplicate", "corrupt", "corrupt_answer", "slow_receiver", "pieces", "slow_sync", "stuck_sync",
    "sync_error", "write_error", "read_error", "index_error", "crash_at_disk", "pause_at_disk", "clock_skew_s", "clock_drift",
    "lost_answer", "refused", "stale_read", "late_watch", "missed_watch",
    "object_slow", "object_refused", "object_answer_lost", "object_cut",
)  # fmt: skip


class FaultPlan:
    def __init__(self, seed: str, faults: Faults, *, suppressed: frozenset[int] = frozenset()) -> None:
        self.random = random.Random(seed)  # a str seeds by its bytes, not by its hash: the same in every process
        self.faults = faults
        self.suppressed = suppressed  # ordinals of faults that are drawn and left out: how a failing run is shrunk
        self.dealt = 0
        self.counts: dict[str, int] = {}
        self.active = True
        self.ends_s = 0.0  # loop time at which the last of the lasting ones has ended
        self.clocks = MachineClocks(seed, faults.clock_skew_s, faults.clock_drift)
        self._seed = seed

    def __repr__(self) -> str:
        return f"<FaultPlan {'active' if self.active else 'healed'}: {self.counts}>"

    def strikes(self, kind: str, probability: float) -> bool:
        """Draws once; a hit is counted."""
        if not self.active or not probability or self.random.random() >= probability:
            return False
        return self.deals(kind)

    def deals(self, kind: str) -> bool:
        """Gives a fault its ordinal and counts it, right before it happens. False: it is suppressed, and must not happen."""
        begins = self.begins()
        if begins:
            self.saw(kind)
        return begins

    def begins(self) -> bool:
        """As `deals`, for what takes long and may be cut off: `saw` counts it when it is done."""
        ordinal, self.dealt = self.dealt, self.dealt + 1
        return ordinal not in self.suppressed

    def saw(self, kind: str) -> None:
        """Counts what is done, or came along with another fault: bytes that a power loss tore, messages that a pause made late."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def stream(self, name: str) -> random.Random:
        """Randomness of its own for one purpose: what others draw does not change its course."""
        return random.Random(f"{self._seed}/{name}")

    def total(self) -> int:
        return sum(self.counts.values())

    def between(self, bounds: tuple[float, float]) -> float:
        low, high = bounds
        return low + (high - low) * self.random.random()  # `uniform`, without a call: this runs for every message

    def lasting(self, bounds: tuple[float, float]) -> float:
        """As `between`, for what goes on so long after it was dealt: peace is not before its end."""
        lasts_s = self.random.uniform(*bounds)
        self.ends_s = max(self.ends_s, asyncio.get_running_loop().time() + lasts_s)
        return lasts_s

    def heal(self) -> None:
        self.active = False
