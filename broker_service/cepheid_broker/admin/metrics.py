"""`/metrics`: counters pulled from where they are counted, at the moment of the scrape (docs/admin.md has the list)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import Response

from cepheid_broker.admin.broker_metrics import broker_families, closed_topic_families, offload_families, ownership_families
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.pulsar_metrics import backlog_families, pulsar_families
from cepheid_ports.process_metrics import process_families
from cepheid_ports.prometheus import CONTENT_TYPE, Family, encode

if TYPE_CHECKING:
    from collections.abc import Iterable


def metrics(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def scrape() -> Response:
        """Prometheus text, see below"""
        return Response(encode(_families(context)), media_type=CONTENT_TYPE)

    return router


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
