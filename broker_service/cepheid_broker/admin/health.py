"""Health checks of load balancers, probes and people.

/health                 the process answers: cheap
/status.html, ready     the broker serves, and is registered: cheap; `/ready` also reports problems elsewhere, and stays 200:
                        restarting the broker, or sending clients elsewhere, would not help
brokers/health          one message is published to this broker's own topic, and read back
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from cepheid_broker.admin.authentication import STRANGER
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.cross_site import AdminHosts
from cepheid_broker.admin.errors import HealthCheckError, NotFoundError
from cepheid_broker.ownership import health_topic
from cepheid_metadata import KeyExistsError, Position
from cepheid_ports import CepheidError
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb


def health(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get("/status.html")
    async def status() -> PlainTextResponse:
        """Return `OK` once clients are served; for load balancers and probes"""
        if not context.is_ready():
            raise NotFoundError("The broker is starting or stopping")
        return PlainTextResponse("OK")

    @router.get("/health")
    async def alive() -> PlainTextResponse:
        """Return `ok` while the process answers at all; otherwise restart it"""
        return PlainTextResponse("ok")

    @router.get("/ready")
    async def serves(request: Request) -> PlainTextResponse:
        """Return `ok` once clients are served, then problems, under a known `Host` and to callers with credentials; else 503"""
        if not context.is_ready():
            return PlainTextResponse("starting or stopping", 503)
        # Under another name the reader may be a web page that resolved its own name to this address (cross_site.py).
        is_known = AdminHosts.of(context.broker.settings).accepts_header(request.headers.get("host", ""))
        problems = context.problems() if is_known and not request.scope.get(STRANGER) else ()
        return PlainTextResponse("\n".join(["ok", *problems]))

    @router.get("/admin/v2/brokers/ready")
    async def ready() -> PlainTextResponse:
        """Return `ok` once clients are served"""
        if not context.is_ready():
            raise HealthCheckError("The broker is starting or stopping")
        return PlainTextResponse("ok")

    @router.get("/admin/v2/brokers/health")
    async def check_health() -> PlainTextResponse:
        """Publish a message to `persistent://pulsar/system/__health-BROKER` and read it back; 500 if that fails or takes 10 s"""
        try:
            async with asyncio.timeout(context.settings.health_timeout_s):
                await _publish_and_read(context)
        except TimeoutError:
            problems = "".join(f"; {problem}" for problem in context.problems())
            raise HealthCheckError(f"No message came back within {context.settings.health_timeout_s:g} s{problems}") from None
        except CepheidError as error:
            raise HealthCheckError(f"A message could not be published and read back: {error}") from error
        return PlainTextResponse("ok")

    return router


async def _publish_and_read(context: AdminContext) -> None:
    broker = context.broker
    name = health_topic(broker.ownership.broker_id or str(broker.port))
    if await broker.catalog.partitions(name) is None:  # not created by use, which may be switched off
        try:
            await broker.catalog.create(name, 0)
        except KeyExistsError:  # created by a concurrent check
            pass
    topic = await broker.topics.get(name, may_create=False)
    now_ms = broker.ports.wall_ms()
    sent = encode_tail(pb.MessageMetadata(producer_name="health", sequence_id=now_ms, publish_time=now_ms), b"health")
    appended: asyncio.Future[Position] = asyncio.get_running_loop().create_future()

    def on_done(outcome: Position | CepheidError, count: int) -> None:
        if appended.cancelled():
            return
        if isinstance(outcome, Position):
            appended.set_result(outcome)
        else:
            appended.set_exception(outcome)

    topic.publish([sent], on_done)
    position = await appended
    groups = topic.ledger.read_cached(position, max_entries=1, max_bytes=1)
    if not groups:
        groups = await topic.ledger.read(position, max_entries=1, max_bytes=1)
    found = bytes(groups[0].payload(position.entry_id)) if groups else b""
    if found != sent:
        raise HealthCheckError(f"Entry {position} of {name} was stored with {len(sent)} bytes and read with {len(found)} others")
