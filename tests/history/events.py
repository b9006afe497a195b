"""What clients of a server saw, one event after the other: lines of JSON that can be kept, sent and judged later.

    send ──► resend … sent   asked to publish, again after a reconnect (noted by clients that know); answered with an id or an error
    open ──► opened ──► received, ack, nack, sought ──► close   a consumer's life: asked for, answered, …
    restart, restarted       somebody broke the server, and it serves again
    fault                    a part of it was broken of which clients may notice nothing but that it takes longer (`details`)
    moved                    an administrator moved a subscription: what it had not delivered may be gone
                             (histories that are noted at servers have more kinds: rules_served.py)
    audit                    what a reader found in the topic when all was quiet, in order

The order of lines is the order in which this process saw things. Nothing here knows our code: any client can write such lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Position = tuple[int, int, int]
"""Ledger id, entry id, index in the batch (-1: no batch)."""


@dataclass(frozen=True, slots=True)
class Event:
    """`uid` names one message for ever: the application's own, in its payload. What does not apply is left at its default."""

    kind: str
    at_s: float = 0.0
    actor: str = ""
    """A producer's or consumer's name: unique per opening of it."""
    uid: str = ""
    key: str = ""
    position: Position | None = None
    subscription: str = ""
    type: str = ""
    sequence_id: int = -1
    redelivery_count: int = 0
    cumulative: bool = False
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.at_s:9.4f} {self.kind:9} {self.actor}"]
        parts += [
            f"{name}={value}" for name, value in asdict(self).items() if name not in ("kind", "at_s", "actor") and _said(value)
        ]
        return " ".join(parts)


def save(events: Iterable[Event], path: Path) -> None:
    with path.open("w") as file:
        for event in events:
            file.write(json.dumps({name: value for name, value in asdict(event).items() if _said(value)}) + "\n")


def load(path: Path) -> list[Event]:
    """Raises ValueError that names the line."""
    events = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            if (position := fields.get("position")) is not None:
                fields["position"] = tuple(position)
            events.append(Event(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return events


def _said(value: Any) -> bool:
    return value not in ("", None, False, {}, -1) or (value == 0 and value is not False)
