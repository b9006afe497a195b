"""What the plan service hands out with a plan, and bookies are shown with every read past the brokers.

ct0.BASE64URL(JSON)          {"topic", "subject", "until_ms"}          readers pass it on as it is

Bookies know no users yet, so they believe every ticket and this one is not signed. Readers carry it already, so that nothing
but the two ends changes when they do.
"""

from __future__ import annotations

import base64
import json

from cepheid_wire import TopicName

LIFE_MS = 24 * 3_600_000
_PREFIX = "ct0."
_ANYBODY = "anybody"


def issue_ticket(topic: TopicName, now_ms: int) -> str:
    """For one topic with all its partitions."""
    fields = {"topic": str(topic), "subject": _ANYBODY, "until_ms": now_ms + LIFE_MS}
    return _PREFIX + base64.urlsafe_b64encode(json.dumps(fields, separators=(",", ":")).encode()).rstrip(b"=").decode()
