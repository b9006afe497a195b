"""Lookup over HTTP: which broker serves a topic, for clients with an http:// address."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from cepheid_broker.admin.brokers import admin_urls
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.path_names import AnyTopicPath
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.ownership import There, bundle_of, division_of
from cepheid_broker.protocol import check_listener, service_urls
from cepheid_wire import TopicName


def lookup(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}")

    @router.get("", response_model=dict[str, str])
    async def broker_of_topic(topic: AnyTopicPath, request: Request, authoritative: str = "", listenerName: str = "") -> Any:
        """Return the broker that serves a topic, creating nothing; 307 to another broker. `authoritative`: this one takes an
        unowned bundle"""
        check_listener(listenerName or request.headers.get("X-Pulsar-ListenerName", ""))
        await _require_usable(context, topic)
        broker = context.broker
        location = await broker.ownership.locate(topic, authoritative=authoritative == "true")
        if isinstance(location, There):
            given = {"authoritative": json.dumps(location.chosen)} | ({"listenerName": listenerName} if listenerName else {})
            target = f"{location.admin_url(over_tls=request.scope['scheme'] == 'https')}{request.scope['path']}?{urlencode(given)}"
            return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": target})
        reached_host, _ = request.scope["server"]
        urls = service_urls(broker.settings, broker.port, broker.tls_port, reached_host)
        admin = admin_urls(context, request)
        # C++ fails if neither TLS key exists; all values are strings (docs/reference/shapes.md §6).
        return {
            "brokerUrl": urls.get("pulsar", ""),
            "brokerUrlTls": urls.get("pulsar+ssl", ""),
            "httpUrl": admin.get("http", ""),
            "httpUrlTls": admin.get("https", ""),
            "nativeUrl": urls.get("pulsar", ""),
            "brokerUrlSsl": urls.get("pulsar+ssl", ""),
        }

    @router.get("/bundle")
    async def bundle_of_topic(topic: AnyTopicPath) -> PlainTextResponse:
        """Return the bundle of a topic as plain text"""
        record = (await context.require_namespace(topic.namespace)).record
        return PlainTextResponse(bundle_of(topic, division_of(record)).range)

    return router


async def _require_usable(context: AdminContext, topic: TopicName) -> None:
    """Check that the topic exists, or that a connecting client may create it; creates nothing itself."""
    if await context.broker.catalog.partitions(topic) is None:
        creation = await context.broker.catalog.creation_in(topic.namespace)
        if not creation.allowed:
            raise TopicNotFoundError(f"Topic {topic} does not exist, and creating topics by using them is off", topic=str(topic))
