"""Positions that have a meaning of their own on the wire (Pulsar protocol, start of a subscription)."""

from __future__ import annotations

from cepheid_metadata import Position

EARLIEST = Position(-1, -1)
LATEST = Position((1 << 63) - 1, (1 << 63) - 1)

__all__ = ["EARLIEST", "LATEST", "Position"]
