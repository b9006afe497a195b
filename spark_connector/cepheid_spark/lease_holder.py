"""The holder of a lease: a mark in the subscription's property cepheid-lease-holder, written with each renewal.

    {"host": "spark-1", "id": "6f0c…", "kernel": "3bd1…/4026531836", "pid": 4711, "seen_ms": …, "since_ms": …}

Rules
1. A query is a process of the driver, as long as it runs: Spark tells a source neither the query's name nor its checkpoint.
2. A holder lives until it missed three renewals, or its process no longer exists, if that can be seen:
   on the same host, by the same kernel, in the same namespace of process ids. Containers may have a host's name in common.
   If its clock is ahead of ours, its mark must stay unchanged for this long while we watch.
3. A new query leaves the name to a living holder. One that continues from its checkpoint takes it, since most often the
   holder is its own earlier process; if it is another query, that one notices it at its next renewal, and ends.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Self

from cepheid_ports import CepheidError

HOLDER_PROPERTY = "cepheid-lease-holder"
SILENCE_MS = 180_000  # the broker also waits this long for a renewal (lease_silence_s)


class LeaseTakenError(CepheidError):
    """Two streaming queries use one lease: each would release what the other has still to read."""

    hint = "give each query its own subscription (option subscription), or none: a name is then created"
    watch_s = 0.0
    """How long its mark must be watched to know whether it lives."""


def wall_ms() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class Holder:
    holder_id: str
    host: str
    pid: int
    since_ms: int
    seen_ms: int
    kernel: str = ""  # missing in earlier versions

    @classmethod
    def this_process(cls, now_ms: int) -> Self:
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), now_ms, now_ms, this_kernel())

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Return the holder; None: there is none, or not written by us."""
        try:
            fields = json.loads(text or "")
            numbers = (int(fields["pid"]), int(fields["since_ms"]), int(fields["seen_ms"]))
            return cls(str(fields["id"]), str(fields["host"]), *numbers, str(fields.get("kernel", "")))
        except (KeyError, TypeError, ValueError):
            return None

    def text(self, now_ms: int) -> str:
        who = {"host": self.host, "id": self.holder_id, "kernel": self.kernel, "pid": self.pid}
        return json.dumps({**who, "seen_ms": now_ms, "since_ms": self.since_ms}, separators=(",", ":"))

    def lives(self, now_ms: int) -> bool:
        """Rule 2."""
        if now_ms - self.seen_ms >= SILENCE_MS:
            return False
        if self.host != socket.gethostname() or self.kernel != this_kernel():
            return True
        return self.pid != os.getpid() and _runs(self.pid)  # one query per process

    def is_ahead(self, now_ms: int) -> bool:
        """Return whether its clock is ahead or ours is behind, so that `lives` means nothing."""
        return self.seen_ms - now_ms > SILENCE_MS

    def taken(self, name: str, topic: str, now_ms: int) -> LeaseTakenError:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds")
        ago_s = (now_ms - self.seen_ms) // 1000
        heard = f"and was last active {max(0, ago_s)} s ago"
        if self.is_ahead(now_ms):
            heard = f"and whose clock is {-ago_s} s ahead of the one here"
        error = LeaseTakenError(
            f"subscription {name!r} of {topic} is the lease of another streaming query: process {self.pid} on {self.host}, which "
            f"has held it since {since} {heard} (if it has ended: wait until it is silent for {SILENCE_MS // 1000} s)",
            topic=topic,
            subscription=name,
        )
        error.watch_s = SILENCE_MS / 1000 if self.is_ahead(now_ms) else 0.0
        return error


@cache
def this_kernel() -> str:
    """Return an id of the PID namespace: pids are comparable only where it is equal; empty if the host has just one."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
