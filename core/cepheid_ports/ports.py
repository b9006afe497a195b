"""What the outside world gives a process: wall clock, randomness, threads. The simulator gives its own.

Loop time (`asyncio.get_running_loop().time()`) serves deadlines; `wall_ms` serves people and records.
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
    """Injected at the top, handed down to whoever needs one of them."""

    wall_ms: Callable[[], int] = _system_wall_ms
    random: random.Random = field(default_factory=random.SystemRandom)
    new_worker: Callable[[str, int], Worker] = _new_thread_worker
