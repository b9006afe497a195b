"""Which query holds a lease: a mark in the subscription's property cepheid-lease-holder, written anew with each renewal.

    {"host": "spark-1", "id": "6f0c…", "pid": 4711, "seen_ms": …, "since_ms": …}

Rules
1. A query is a process of the driver, for as long as it runs: Spark tells a source neither the query's name nor its checkpoint.
2. A holder lives until nothing was heard of it for three renewals, or its process is not there any more, where that can be seen.
3. A query that begins leaves the name to a holder that lives. One that goes on from its checkpoint takes it, since most often the
   holder is its own process of before; if it is another query, that one hears of it with its next renewal, and ends.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from cepheid_ports import CepheidError

HOLDER_PROPERTY = "cepheid-lease-holder"
SILENCE_MS = 180_000  # as the broker waits for a renewal, too (lease_silence_s)


class LeaseTakenError(CepheidError):
    """Two streaming queries, one name of a lease: each would let go what the other has still to read."""

    hint = "give each query a subscription of its own (option subscription), or none: then a name is made"


def wall_ms() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class Holder:
    holder_id: str
    host: str
    pid: int
    since_ms: int
    seen_ms: int

    @classmethod
    def this_process(cls, now_ms: int) -> Self:
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), now_ms, now_ms)

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """None: nobody's, or not written by us."""
        try:
            fields = json.loads(text or "")
            numbers = (int(fields["pid"]), int(fields["since_ms"]), int(fields["seen_ms"]))
            return cls(str(fields["id"]), str(fields["host"]), *numbers)
        except (KeyError, TypeError, ValueError):
            return None

    def text(self, now_ms: int) -> str:
        fields = {"host": self.host, "id": self.holder_id, "pid": self.pid, "seen_ms": now_ms, "since_ms": self.since_ms}
        return json.dumps(fields, separators=(",", ":"))

    def lives(self, now_ms: int) -> bool:
        """Rule 2."""
        if now_ms - self.seen_ms >= SILENCE_MS:
            return False
        return self.host != socket.gethostname() or (self.pid != os.getpid() and _runs(self.pid))  # one query a process

    def taken(self, name: str, topic: str, now_ms: int) -> LeaseTakenError:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds")
        heard_s = max(0, now_ms - self.seen_ms) // 1000
        return LeaseTakenError(
            f"subscription {name!r} of {topic} is the lease of another streaming query: process {self.pid} on {self.host}, which "
            f"has it since {since} and was heard of {heard_s} s ago (if it has ended: wait until it is silent for "
            f"{SILENCE_MS // 1000} s)",
            topic=topic,
            subscription=name,
        )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
