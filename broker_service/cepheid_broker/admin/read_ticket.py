"""The unsigned ticket of a cluster without security, where bookies believe every ticket.

ct0.BASE64URL(JSON)          {"topic", "subject", "until_ms"}          readers pass it on as it is

Readers of older releases demand one. Where clients authenticate there are signed ones instead, one for each ledger
(`cepheid_security.read_tickets`).
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
