"""`/metrics`: counters, read at the moment of the scrape (docs/admin.md has the list)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cepheid_broker.admin.access import call_of, may
from cepheid_broker.admin.broker_metrics import broker_families, closed_topic_families, offload_families, ownership_families
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.pulsar_metrics import backlog_families, pulsar_families
from cepheid_ports.process_metrics import process_families
from cepheid_ports.prometheus import CONTENT_TYPE, Family, Sample, encode
from cepheid_security import Need
from cepheid_wire import NamespaceName, TopicName


def metrics(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def scrape(request: Request) -> Response:
        """Return metrics as Prometheus text. Samples of a namespace or topic only for roles that may use it"""
        families: Iterable[Family] = _families(context)
        if not await _sees_all(context, request):
            families = await _visible(context, request, families)
        return Response(encode(families), media_type=CONTENT_TYPE)

    return router


async def _sees_all(context: AdminContext, request: Request) -> bool:
    principal = call_of(request).principal
    roles = context.broker.settings.authorization.monitoring_roles
    if principal is not None and principal.original_role is None and principal.role in roles:
        return True
    return await may(context, request, Need.SUPER_USER)


async def _visible(context: AdminContext, request: Request, families: Iterable[Family]) -> list[Family]:
    """Omit the samples of namespaces and topics that the caller may not use."""
    known: dict[str, bool] = {}

    async def is_visible(sample: Sample) -> bool:
        topic, namespace = sample.labels.get("topic"), sample.labels.get("namespace")
        name = topic or namespace
        if name is None:
            return True
        if name not in known:
            known[name] = await (
                may(context, request, Need.NAMESPACE_READ, NamespaceName.parse(name))
                if topic is None
                else may(context, request, Need.PRODUCE_OR_CONSUME, TopicName.parse(topic))
            )
        return known[name]

    return [replace(family, samples=[each for each in family.samples if await is_visible(each)]) for family in families]


def _families(context: AdminContext) -> Iterator[Family]:
    sources: Iterable[Iterable[Family]] = (families() for families in context.families)
    broker = context.broker
    return chain(
        process_families(),
        broker_families(broker),
        ownership_families(broker),
        offload_families(broker),
        closed_topic_families(broker),
        backlog_families(broker),
        pulsar_families(broker),
        *sources,
    )
