"""What a process gets from the outside world: wall clock, randomness, threads. The simulator provides its own.

Use loop time (`asyncio.get_running_loop().time()`) for deadlines, and `wall_ms` for people and records.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cepheid_ports.worker import ThreadWorker, Worker


def _system_wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _new_thread_worker(name: str, threads: int) -> Worker:
    return ThreadWorker(name, threads)


@dataclass(frozen=True, slots=True)
class Ports:
    """Created at the top and passed to the code that needs one of them."""

    wall_ms: Callable[[], int] = _system_wall_ms
    random: random.Random = field(default_factory=random.SystemRandom)
    new_worker: Callable[[str, int], Worker] = _new_thread_worker
    seconds: Callable[[], float] = time.perf_counter
    """How long work takes within one turn of the loop: loop time stands still meanwhile."""
