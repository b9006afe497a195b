"""Looks up the broker of a topic, its number of partitions, the topics of a namespace, and schemas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cepheid.backoff import Backoff
from cepheid.connection import Connection, ConnectionPool
from cepheid.errors import ConnectError, Error, RefusedError, TimedOutError, is_transient, refused
from cepheid.service_url import Address, parse_service_url
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb

T = TypeVar("T")

MAX_REDIRECTS = 20
_NO_SCHEMA = ServerError.TOPIC_NOT_FOUND


async def retrying(work: Callable[[], Awaitable[T]], what: str, timeout_s: float | None) -> T:
    """Return what `work` returns; repeat it with back-off while it fails temporarily.

    Raises TimedOutError, which names the last failure, after `timeout_s`; None: no limit.
    """
    backoff = Backoff(limit_s=2.0)
    last: Error | None = None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while True:
                try:
                    return await work()
                except (ConnectError, RefusedError) as error:
                    if not is_transient(error):
                        raise
                    last = error
                await asyncio.sleep(backoff.next_s())
    except TimeoutError as error:
        if isinstance(error, Error) or not limit.expired():
            raise
        why = f"the last attempt failed: {last.args[0]}" if last else "no answer arrived"
        raise TimedOutError(f"{what}: gave up after {timeout_s} s; {why}") from None


class Lookup:
    """Queries the brokers of the service URL in turn: the next one after a failure, a temporary refusal, or silence."""

    def __init__(self, addresses: Sequence[Address], pool: ConnectionPool, timeout_s: float) -> None:
        self._addresses = addresses
        self._pool = pool
        self._timeout_s = timeout_s
        # Each of several addresses can be silent for its share, and one share is left for the brokers that they name.
        self._answer_limit_s = timeout_s / (len(addresses) + 1) if len(addresses) > 1 else timeout_s
        self._turn = 0
        self.over_tls = any(address.over_tls for address in addresses)

    def __repr__(self) -> str:
        return f"<Lookup {', '.join(map(str, self._addresses))}>"

    @property
    def _kind(self) -> str:
        return "with" if self.over_tls else "without"

    async def any_broker(self) -> Connection:
        """Return a connection to the first address that answers. Raises ConnectError if none does, and RefusedError."""
        failures: list[ConnectError | RefusedError] = []
        for _ in self._addresses:
            address = self._addresses[self._turn % len(self._addresses)]
            try:
                return await self._pool.get(address)
            except (ConnectError, RefusedError) as error:
                if isinstance(error, RefusedError) and not is_transient(error):
                    raise
                failures.append(error)
                self._pass_over(address)
        if len(failures) == 1:
            raise failures[0]
        raise ConnectError(f"none of {len(failures)} addresses answers: " + "; ".join(str(e.args[0]) for e in failures))

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[Connection]:
        """Yield what `any_broker` returns. If the block fails temporarily, the next caller gets another address."""
        connection = await self.any_broker()
        try:
            yield connection
        except (ConnectError, RefusedError) as error:
            if is_transient(error):
                self._pass_over(connection.address)
            raise

    def _pass_over(self, address: Address) -> None:
        """Begin with the next address from now on. If calls fail at one address at the same time, only the first moves on."""
        if self._addresses[self._turn % len(self._addresses)] == address:
            self._turn += 1

    async def broker_of(self, topic: str) -> Connection:
        """Return a connection to the broker that serves the topic: one attempt, following redirects."""
        async with self._in_turn() as connection:
            return await self._follow(connection, topic)

    async def _follow(self, connection: Connection, topic: str) -> Connection:
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            what = f"lookup of {topic}"
            ask = pb.CommandLookupTopic(topic=topic, authoritative=authoritative)
            answer = await self._ask(connection, ask, what)
            if answer.response == pb.CommandLookupTopicResponse.Failed:
                raise refused(answer.error, answer.message, what)
            url = answer.brokerServiceUrlTls if connection.address.over_tls else answer.brokerServiceUrl
            if not url:
                kind = "with" if connection.address.over_tls else "without"
                raise ConnectError(f"{what}: {connection.address} named a broker without an address for clients {kind} TLS")
            (broker, *_) = parse_service_url(url)
            if connection.address.over_tls and not broker.over_tls:  # credentials and messages would be sent unencrypted
                raise ConnectError(f"{what}: {connection.address} named {url}, which has no TLS")
            if answer.proxy_through_service_url and broker != connection.address:  # a standalone server names itself with that flag
                connection = await self._pool.get(connection.address, proxy_to=broker)
            else:
                connection = await self._pool.get(broker)
            if answer.response == pb.CommandLookupTopicResponse.Connect:
                return connection
            authoritative = answer.authoritative
        raise ConnectError(f"lookup of {topic}: more than {MAX_REDIRECTS} redirects; the brokers do not agree who serves it")

    async def at(self, broker_url: str) -> Connection:
        """Return a connection to the broker of a URL from another broker."""
        (address, *_) = parse_service_url(broker_url)
        if self.over_tls and not address.over_tls:  # credentials and messages would be sent unencrypted
            raise ConnectError(f"a broker named {broker_url}, which has no TLS")
        return await self._pool.get(address)

    async def partitions(self, topic: str, *, may_create: bool = True) -> int:
        """Return the number of partitions, 0 for an unpartitioned topic. Creates the topic if the broker's policy says so."""
        what = f"partitions of {topic}"

        async def ask() -> int:
            async with self._in_turn() as connection:
                answer = await self._ask(
                    connection, pb.CommandPartitionedTopicMetadata(topic=topic, metadata_auto_creation_enabled=may_create), what
                )
                if answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed:
                    raise refused(answer.error, answer.message, what)
                return int(answer.partitions)

        return await retrying(ask, what, self._timeout_s)

    async def topics(self, namespace: str) -> list[str]:
        """Return the full names of the persistent topics of `tenant/namespace`; partitions are listed separately."""
        what = f"topics of {namespace}"

        async def ask() -> list[str]:
            async with self._in_turn() as connection:
                answer = await self._ask(connection, pb.CommandGetTopicsOfNamespace(namespace=namespace), what)
                return list(answer.topics)

        return await retrying(ask, what, self._timeout_s)

    async def schema(self, topic: str, version: bytes | None = None) -> pb.Schema | None:
        """Return a schema of the topic, the latest without `version`; None if there is none."""
        what = f"schema of {topic}"

        async def ask() -> pb.Schema | None:
            async with self._in_turn() as connection:
                answer = await self._ask(connection, pb.CommandGetSchema(topic=topic, schema_version=version), what)
                if answer.HasField("error_code"):
                    if answer.error_code == _NO_SCHEMA:
                        return None
                    raise refused(answer.error_code, answer.error_message, what)
                return pb.Schema.FromString(answer.schema.SerializeToString())

        return await retrying(ask, what, self._timeout_s)

    async def _ask(self, connection: Connection, body: Any, what: str) -> Any:
        try:
            return await connection.request(body, what, self._answer_limit_s)
        except TimedOutError as error:
            if self._answer_limit_s == self._timeout_s:
                raise
            raise ConnectError(str(error.args[0])) from None  # another address may answer
