"""How long producers waited for their answers, and after what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.history.events import Event


@dataclass(frozen=True, slots=True)
class Wait:
    """One send: from when it was asked for until its answer was here."""

    uid: str
    asked_at_s: float
    wait_s: float


def waits(events: Sequence[Event]) -> Iterator[Wait]:
    """In the order of the answers; what was never answered is left out (H1 does not speak of it either)."""
    asked_at_s: dict[str, float] = {}
    for event in events:
        if event.kind == "send":
            asked_at_s[event.uid] = event.at_s
        elif event.kind == "sent" and event.uid in asked_at_s:
            yield Wait(event.uid, asked_at_s[event.uid], event.at_s - asked_at_s.pop(event.uid))


def longest_waits(events: Sequence[Event]) -> dict[str, float]:
    """The longest wait in seconds for each fault or restart, by what it was; "" is for what none of them touched.

    A wait belongs to the first thing that happened while it lasted; if nothing did, to the last thing that happened before. That a
    restart is over makes nobody wait: a send that was asked for during the restart waits because of the restart.
    """
    marks = [(0.0, "")] + [(event.at_s, _name(event)) for event in events if event.kind in ("fault", "restart")]
    longest = dict.fromkeys((name for _, name in marks), 0.0)
    for wait in waits(events):
        meanwhile = [name for at_s, name in marks if wait.asked_at_s <= at_s <= wait.asked_at_s + wait.wait_s]
        name = meanwhile[0] if meanwhile else [name for at_s, name in marks if at_s <= wait.asked_at_s][-1]
        longest[name] = max(longest[name], wait.wait_s)
    return longest


def _name(event: Event) -> str:
    return str(event.details.get("what", event.kind))
