"""Log lines of a server: time, level, event, then its fields as key=value."""

from __future__ import annotations

import logging
import sys

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class EventFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO ledger.fenced ledger_id=7 lac=41`: the message is the event's fixed name."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_value(value)}" for name, value in vars(record).items() if name not in _OWN]
        return " ".join([super().formatMessage(record), *fields])


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(character.isspace() for character in text) else text


def start_logging(level: int = logging.INFO) -> None:
    """Event lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("grpc", "asyncio", "uvicorn", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
