"""Where a process runs: `region/rack`, or a rack without a region (no slash)."""

from __future__ import annotations

from typing import Final

RACK_PATTERN = r"^[^/]{1,200}(/[^/]{1,200})?$"
"""A rack as settings accept it. Records may hold any text, because earlier releases accepted any."""

SAME_RACK: Final = 0
SAME_REGION: Final = 1
ELSEWHERE: Final = 2


def region_of(rack: str) -> str:
    """Return the region of a rack, which is empty for a rack without a region."""
    return rack.partition("/")[0] if "/" in rack else ""


def rack_distance(own: str | None, other: str | None) -> int:
    """Return SAME_RACK, SAME_REGION or ELSEWHERE. An unknown rack is elsewhere."""
    if own is None or other is None:
        return ELSEWHERE
    if own == other:
        return SAME_RACK
    region = region_of(own)
    return SAME_REGION if region and region == region_of(other) else ELSEWHERE
