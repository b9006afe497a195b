"""The log of the code under test: into the trace, and an eye on what only the log would tell.

An exception that the code caught, logged and went on from is a defect when it is none of the expected kinds: a broken
assertion in a callback must not pass unseen, nor a call with arguments that nobody takes (a mutant of yesterday's code).
"""

from __future__ import annotations

import builtins
import logging
from types import TracebackType

from cepheid_ports import CepheidError
from tests.simulation.checks.history import History
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.virtual_loop import SimulationError, VirtualLoop

_EXPECTED = (CepheidError, OSError, TimeoutError, NodeCrashed)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogWatch(logging.Handler):
    def __init__(self, history: History, loop: VirtualLoop) -> None:
        super().__init__(logging.INFO)
        self._history = history
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, _EXPECTED):
            self._fail(SimulationError(f"{record.getMessage()}: {error!r}", type(error).__name__), error)
        elif error is None and (unexpected := _unexpected(told := vars(record).get("error"))):
            self._fail(SimulationError(f"{record.getMessage()}: {told}", unexpected), None)
        if self._history.trace is not None:
            fields = " ".join(f"{key}={value}" for key, value in vars(record).items() if key not in _STANDARD)
            self._history.note(f"  log {record.getMessage()} {fields}")

    def _fail(self, failure: SimulationError, cause: BaseException | None) -> None:
        if self._loop.failure is None:
            self._loop.failure = failure
            failure.__cause__ = cause

    def __enter__(self) -> LogWatch:
        root = logging.getLogger()
        self._before = root.level, root.handlers[:]
        root.handlers[:] = [self]
        root.setLevel(logging.INFO if self._history.trace is not None else logging.WARNING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        root = logging.getLogger()
        root.setLevel(self._before[0])
        root.handlers[:] = self._before[1]


def _unexpected(told: object) -> str:
    """The class of an exception of Python's own, whose `repr` was told, if it is none of the expected kinds; else ""."""
    kind = getattr(builtins, str(told).partition("(")[0], None) if told is not None else None
    unexpected = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _EXPECTED)
    return kind.__name__ if unexpected else ""
