"""Log lines of a server: time, level, event, then its fields as key=value."""

from __future__ import annotations

import logging
import re
import sys
import time

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NEEDS_QUOTES = re.compile(r"\s|^$").search


class EventFormatter(logging.Formatter):
    """Format `2026-01-31 12:00:00,000 INFO rollover.done topic=x ledger_id=7`: the message is the event's fixed name."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._second, self._shown = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Format like the base class, which does all of this for every line: topics that open by the thousand have a line each."""
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", self.converter(record.created))
        return f"{self._shown},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_value(value)}" for name, value in record.__dict__.items() if name not in _OWN]
        return " ".join([f"{record.asctime} {record.levelname} {record.message}", *fields])


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if _NEEDS_QUOTES(text) else text


def start_logging(level: int = logging.INFO) -> None:
    """Write event lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not in the lines, but looked up for each
    for chatty in ("grpc", "asyncio", "uvicorn", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
