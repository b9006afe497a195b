"""The subscription that retains what an export has still to read: retention respects it, and its backlog is the export's lag.

It is at the last exported entry, not after it, so the ledger of that entry stays in the topic until a later one is
exported: the export can always distinguish "nothing new" from "something was trimmed". It has no consumers and no expiry. To
end an export for good, delete the subscription.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from cepheid_decode import AdminRefusedError, MessagePosition, PlanSource, ScanError
from cepheid_scan.admin_http import AdminHttp
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_EARLIEST = {"ledgerId": -1, "entryId": -1}


class Hold:
    """Creates and moves the subscription. `close` once. Raises AdminRefusedError and PlanUnavailableError."""

    def __init__(self, source: PlanSource, subscription: str) -> None:
        self.subscription = subscription
        self._http = AdminHttp(source)

    def __repr__(self) -> str:
        return f"<Hold {self.subscription}>"

    def close(self) -> None:
        self._http.close()

    def make(self, topics: Mapping[str, MessagePosition | None]) -> None:
        """Create the subscription where it is missing, at the position, or at the topic's first message if it is None."""
        for topic, position in topics.items():
            body = _EARLIEST if position is None else _body(position)
            try:
                self._http.request("PUT", self._path(topic), body=body)
            except AdminRefusedError as error:
                if error.status == HTTPStatus.PRECONDITION_FAILED and position is not None:  # its ledger is no longer kept
                    self.make({topic: None})
                elif error.status != HTTPStatus.CONFLICT:
                    raise

    def move(self, topics: Mapping[str, MessagePosition]) -> None:
        """Release everything before these entries. A failure is logged; it retains more than needed until the next move."""
        for topic, position in topics.items():
            try:
                self._http.request("POST", f"{self._path(topic)}/resetcursor", body=_body(position))
            except ScanError as error:
                facts = {"topic": topic, "subscription": self.subscription, "position": str(position)}
                log.warning("lake.hold_not_moved: %s", error, extra=facts)

    def _path(self, topic: str) -> str:
        name = TopicName.parse(topic)
        local, subscription = quote(name.local_name, safe=""), quote(self.subscription, safe="")
        return f"/admin/v2/persistent/{name.namespace}/{local}/subscription/{subscription}"


def _body(position: MessagePosition) -> dict[str, int]:
    return {"ledgerId": position.ledger_id, "entryId": max(0, position.entry_id)}
