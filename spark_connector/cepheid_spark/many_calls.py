"""One call for each of many topics, some at a time: they are questions to brokers, and mostly waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 8


def call_all(
    calls: Sequence[Callable[[], None]], at_once: int = AT_ONCE, *, until: type[Exception] | None = None
) -> list[Exception]:
    """What failed, in the order of the calls. Every one is made, whatever becomes of the others, but for `until`: none is begun
    behind one that failed so. Each that finds nobody waits for as long as readers are patient."""
    ended = threading.Event()

    def attempt(call: Callable[[], None]) -> Exception | None:
        if ended.is_set():
            return None
        try:
            call()
        except Exception as error:
            if until is not None and isinstance(error, until):
                ended.set()
            return error
        return None

    if at_once == 1 or len(calls) <= 1:
        outcomes = [attempt(call) for call in calls]
    else:
        with ThreadPoolExecutor(min(at_once, len(calls)), thread_name_prefix="cepheid-lease-call") as threads:
            outcomes = list(threads.map(attempt, calls))
    return [error for error in outcomes if error is not None]
