"""The admin API by paths, for tests about paths and bodies: `AdminClient(url).get("/admin/v2/tenants")`. Blocking.

Credentials come from the environment, as for the command line.
"""

from __future__ import annotations

from typing import Any

from cepheid.admin import exchange
from cepheid.admin.exchange import DEFAULT_URL, segment, twice
from cepheid.errors import ConnectError as AdminUnreachableError
from cepheid.errors import RefusedError as AdminError
from cepheid.errors import UsageError
from cepheid_cli.client_security import connect_admin

__all__ = [
    "AdminClient",
    "AdminError",
    "AdminUnreachableError",
    "UsageError",
    "namespace_path",
    "quoted",
    "subscription_path",
    "topic_path",
]

quoted = segment


class AdminClient:
    def __init__(self, url: str = DEFAULT_URL) -> None:
        self._admin = connect_admin(url)

    def call(self, method: str, path: str, query: dict[str, Any], body: Any = None) -> Any:
        return self._admin.call(method, path, query, body)

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, query)

    def put(self, path: str, body: Any = None, **query: Any) -> Any:
        return self.call("PUT", path, query, body)

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return self.call("POST", path, query, body)

    def delete(self, path: str, **query: Any) -> Any:
        return self.call("DELETE", path, query)


def topic_path(topic: str) -> str:
    return f"/admin/v2/{exchange.topic_path(topic)}"


def namespace_path(namespace: str) -> str:
    return f"/admin/v2/namespaces/{exchange.namespace_path(namespace)}"


def subscription_path(topic: str, subscription: str) -> str:
    return f"{topic_path(topic)}/subscription/{twice(subscription)}"
