"""Lookup over the admin API, for networks in which clients know only its port: `cepheid.connect("http://broker:8080")`.

The calls are those of Java's HTTP lookup, so that the same ports and permissions suffice. Messages use the binary protocol.
"""

from __future__ import annotations

from typing import Any

from cepheid.admin.connection import AsyncCalls
from cepheid.admin.exchange import namespace_path, parse_admin_url, topic_path
from cepheid.connection import Connection, ConnectionPool
from cepheid.credentials import Security
from cepheid.errors import ConnectError, NotFoundError, RefusedError
from cepheid.lookup import Lookup, retrying
from cepheid.schemas import protobuf_schema_of
from cepheid.service_url import Address, parse_service_url
from cepheid_wire import pulsar_api_pb2 as pb

_MAY_PASS = (429, 500, 502, 503, 504)


class HttpLookup(Lookup):
    """A Lookup over HTTP. Redirects are followed to the broker that has the answer."""

    def __init__(self, url: str, security: Security, pool: ConnectionPool, timeout_s: float) -> None:
        super().__init__((), pool, timeout_s)
        self.over_tls = url.startswith("https://")
        self._url = url
        self._calls = AsyncCalls(parse_admin_url(url), security, request_timeout_s=timeout_s)
        self._last: Address | None = None

    def __repr__(self) -> str:
        return f"<HttpLookup {self._url}>"

    async def any_broker(self) -> Connection:
        """Return a connection to the last broker that was found. Raises ConnectError."""
        if self._last is None:
            raise ConnectError(f"{self._url} was not asked for a topic yet: no broker is known")
        return await self._pool.get(self._last)

    async def broker_of(self, topic: str) -> Connection:
        found = await self._get(f"/lookup/v2/topic/{topic_path(topic)}")
        url = found.get("brokerUrlTls" if self.over_tls else "brokerUrl")
        if not url:
            raise ConnectError(f"lookup of {topic}: {self._url} named a broker without an address for clients {self._kind} TLS")
        (self._last, *_) = parse_service_url(url)
        return await self.at(url)

    async def partitions(self, topic: str, *, may_create: bool = True) -> int:
        path = f"/admin/v2/{topic_path(topic)}/partitions"

        async def ask() -> int:
            return int((await self._get(path, {"checkAllowAutoCreation": may_create}))["partitions"])

        return await retrying(ask, f"partitions of {topic}", self._timeout_s)

    async def topics(self, namespace: str) -> list[str]:
        path = f"/admin/v2/namespaces/{namespace_path(namespace)}/topics"

        async def ask() -> list[str]:
            return list(await self._get(path, {"mode": "PERSISTENT"}))

        return await retrying(ask, f"topics of {namespace}", self._timeout_s)

    async def schema(self, topic: str, version: bytes | None = None) -> pb.Schema | None:
        path = f"/admin/v2/schemas/{topic_path(topic).partition('/')[2]}/schema"
        if version:
            path += f"/{int.from_bytes(version, 'big')}"

        async def ask() -> pb.Schema | None:
            try:
                found = await self._get(path)
            except NotFoundError:
                return None
            name = topic.rpartition("/")[2]
            return protobuf_schema_of(found["type"], name, found.get("data") or "", found.get("properties") or {})

        return await retrying(ask, f"schema of {topic}", self._timeout_s)

    async def _get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        try:
            return await self._calls.call("GET", path, query)
        except RefusedError as error:
            if error.status in _MAY_PASS:
                raise ConnectError(str(error.args[0])) from error
            raise
