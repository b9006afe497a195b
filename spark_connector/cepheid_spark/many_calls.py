"""One call for each of many topics, some at a time: they are questions to brokers, and mostly waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 8


def call_all(calls: Sequence[Callable[[], None]], at_once: int = AT_ONCE) -> list[Exception]:
    """Every call is made, whatever becomes of the others; what failed, in the order of the calls."""

    def attempt(call: Callable[[], None]) -> Exception | None:
        try:
            call()
        except Exception as error:
            return error
        return None

    if at_once == 1 or len(calls) <= 1:
        outcomes = [attempt(call) for call in calls]
    else:
        with ThreadPoolExecutor(min(at_once, len(calls)), thread_name_prefix="cepheid-lease-call") as threads:
            outcomes = list(threads.map(attempt, calls))
    return [error for error in outcomes if error is not None]
