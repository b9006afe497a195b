"""The state of a session, and the subscribers to its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cepheid_metadata.store import SessionState

log = logging.getLogger(__name__)


class SessionEvents:
    """Calls subscribers in the order of subscription, inside the call that changes the state."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._subscribers: dict[int, Callable[[SessionState], None]] = {}
        self._last_id = 0

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        self._last_id += 1
        own_id = self._last_id
        self._subscribers[own_id] = on_session

        def unsubscribe() -> None:
            self._subscribers.pop(own_id, None)

        return unsubscribe

    def become(self, state: SessionState) -> None:
        if state is self.state:
            return
        log.info("metadata.session", extra={"state": state.value, "before": self.state.value})
        self.state = state
        for on_session in list(self._subscribers.values()):
            try:
                on_session(state)
            except Exception as error:  # one subscriber's bug must not stop the others, or the store
                report = {"message": f"{on_session!r} failed on {state}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(report)
