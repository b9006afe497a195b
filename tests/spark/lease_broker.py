"""The admin calls that a lease makes, and what a broker makes of them: subscriptions with properties, in memory."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from cepheid_decode import AdminRefusedError, MessagePosition
from cepheid_spark.lease import LEASE_PROPERTY

SubscriptionKey = tuple[str, str]  # topic, name


class LeaseBroker:
    """In place of AdminHttp. Topics are there once `first_kept` knows them."""

    def __init__(self, *topics: str) -> None:
        self.first_kept = dict.fromkeys(topics, MessagePosition(7, 0))
        self.stands: dict[SubscriptionKey, MessagePosition] = {}
        self.properties: dict[SubscriptionKey, dict[str, str]] = {}
        self.calls = 0

    def request(self, method: str, path: str, *, body: Any = None) -> Any:
        self.calls += 1
        parts = path.removeprefix("/admin/v2/persistent/").split("/")
        topic = f"persistent://{parts[0]}/{parts[1]}/{unquote(parts[2])}"
        if topic not in self.first_kept:
            raise AdminRefusedError(f"{path}: no such topic", status=404)
        if parts[3] == "internalStats":
            places = {name: place for (of, name), place in self.stands.items() if of == topic}
            cursors = {name: {"markDeletePosition": f"{at.ledger_id}:{at.entry_id - 1}"} for name, at in places.items()}
            return {"cursors": cursors, "ledgers": [{"ledgerId": self.first_kept[topic].ledger_id}]}
        if parts[3] == "subscriptions":
            return [name for of, name in self.stands if of == topic]
        return self._of_subscription(method, (topic, unquote(parts[4])), parts[5:], body)

    def _of_subscription(self, method: str, key: SubscriptionKey, what: list[str], body: Any) -> Any:
        if method == "PUT" and not what:
            if key in self.stands:
                raise AdminRefusedError("it exists", status=409)
            place = MessagePosition(body["ledgerId"], body["entryId"])
            self.stands[key] = max(place, self.first_kept[key[0]])
            self.properties[key] = dict(body.get("properties") or {})
            return None
        if key not in self.stands:
            raise AdminRefusedError("no such subscription", status=404)
        if method == "DELETE":
            del self.stands[key], self.properties[key]
        elif what == ["resetcursor"]:
            self.stands[key] = max(MessagePosition(body["ledgerId"], body["entryId"]), self.first_kept[key[0]])
        elif method == "PUT":
            self.properties[key] = dict(body)
        else:
            return dict(self.properties[key])
        return None

    def drop_expired(self, now_ms: int) -> None:
        for key in [key for key, found in self.properties.items() if int(found.get(LEASE_PROPERTY, now_ms)) < now_ms]:
            del self.stands[key], self.properties[key]

    def close(self) -> None:
        pass
