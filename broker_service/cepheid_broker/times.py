"""Points in time as people and clients read them."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(at_ms: int) -> str:
    """`2026-09-27T12:00:00.000Z`: the form of `connectedSince` and its like (docs/reference/shapes.md §4)."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
