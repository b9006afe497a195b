"""The ASGI application: routers over the broker and its records, and refusals in the format that clients read.

A path of Pulsar's API that is not served answers 501 with a text, never a wrong success.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from cepheid_broker.admin.access import CallAccess, call_of, guard
from cepheid_broker.admin.backlog_quotas import namespace_backlog_quotas, topic_backlog_quotas
from cepheid_broker.admin.bookies import bookies
from cepheid_broker.admin.brokers import brokers
from cepheid_broker.admin.bundle_splits import bundle_splits
from cepheid_broker.admin.clusters_tenants import clusters, tenants
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.cursor_operations import cursor_operations
from cepheid_broker.admin.drains import drains
from cepheid_broker.admin.errors import http_status_of, is_bad_name
from cepheid_broker.admin.health import health
from cepheid_broker.admin.isolation import isolation
from cepheid_broker.admin.ledgers import ledgers
from cepheid_broker.admin.load_balance import load_balance
from cepheid_broker.admin.lookup import lookup
from cepheid_broker.admin.messages import messages
from cepheid_broker.admin.metadata import metadata
from cepheid_broker.admin.metrics import metrics
from cepheid_broker.admin.namespace_properties import namespace_properties
from cepheid_broker.admin.namespace_topics import namespace_topics
from cepheid_broker.admin.namespaces import namespaces
from cepheid_broker.admin.non_persistent import non_persistent_partitions, non_persistent_stats, non_persistent_topics
from cepheid_broker.admin.offload_calls import offload_calls
from cepheid_broker.admin.offload_thresholds import offload_thresholds
from cepheid_broker.admin.openapi import complete, routes_of
from cepheid_broker.admin.partitions import partitions
from cepheid_broker.admin.permissions import permissions
from cepheid_broker.admin.plan import plan
from cepheid_broker.admin.policy_routes import namespace_policies, topic_policies
from cepheid_broker.admin.raw_path import RawPathMiddleware
from cepheid_broker.admin.repair import repair
from cepheid_broker.admin.replication_clusters import replication_clusters
from cepheid_broker.admin.revocations import revocations
from cepheid_broker.admin.schemas import schemas
from cepheid_broker.admin.security import security
from cepheid_broker.admin.stats import stats
from cepheid_broker.admin.subscriptions import subscriptions
from cepheid_broker.admin.tiered import tiered
from cepheid_broker.admin.topic_ends import topic_ends
from cepheid_broker.admin.topic_properties import topic_properties
from cepheid_broker.admin.topics import topics
from cepheid_broker.admin.unserved import non_persistent_refusal, unserved
from cepheid_broker.admin.unset_policies import unset_namespace_policies, unset_topic_policies
from cepheid_broker.admin.upgrade import upgrade
from cepheid_broker.admin.why import why
from cepheid_broker.ownership import NotOwnerError
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger(__name__)

ROUTERS = (
    # Routes are matched in this order: the most frequent first, the hundred routes of policies last.
    health,
    metrics,
    stats,
    lookup,
    subscriptions,
    cursor_operations,
    messages,
    topics,
    partitions,
    topic_properties,
    topic_ends,
    offload_calls,
    schemas,
    non_persistent_topics,
    non_persistent_partitions,
    non_persistent_stats,
    plan,
    ledgers,
    metadata,
    repair,
    security,
    upgrade,
    revocations,
    why,
    tiered,
    load_balance,
    drains,
    brokers,  # after health: {cluster} would take its names
    bookies,
    clusters,
    isolation,
    tenants,
    namespaces,
    permissions,
    replication_clusters,
    namespace_policies,
    namespace_backlog_quotas,
    offload_thresholds,
    namespace_properties,
    bundle_splits,
    namespace_topics,  # its {bundle} would take the names of policies
    topic_policies,
    topic_backlog_quotas,
    unset_namespace_policies,
    unset_topic_policies,
)

_PULSAR_PATHS = ("/admin/", "/lookup/", "/topics/")
_NON_PERSISTENT = re.compile(r"/admin/v2/non-persistent/([^/]+/[^/]+/[^/]+(/.+))")


def create_app(context: AdminContext) -> ASGIApp:
    routers = [router(context) for router in ROUTERS]
    allowed = Depends(guard(context, chain.from_iterable(map(routes_of, routers))))
    app = FastAPI(
        title="Cepheid admin API",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[allowed],
    )
    for router in routers:
        app.include_router(router)
    described = app.openapi
    app.openapi = cache(lambda: complete(described(), routers))  # type: ignore[method-assign]
    app.add_exception_handler(CepheidError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _broken_off)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _unexpected)
    return CallAccess(RawPathMiddleware(app), context)


def _reason(status: int, text: str) -> JSONResponse:
    return JSONResponse({"reason": text}, status_code=status)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CepheidError)
    if is_bad_name(error):
        call_of(request).invalid_name = str(error)
    if isinstance(error, NotOwnerError):
        admin_url = error.there.admin_url(over_tls=request.scope["scheme"] == "https")
        if admin_url is not None:
            return _elsewhere(request, error, admin_url)
    status = http_status_of(error)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        log.warning("admin.failed", extra={"path": request.url.path, "error": repr(error), **error.facts})
    return _reason(status, str(error))


def _elsewhere(request: Request, error: NotOwnerError, admin_url: str) -> JSONResponse:
    """Redirect to the owner: clients keep method and body (docs/reference/behaviours.md §2). Nothing was done here."""
    query = request.scope["query_string"].decode("ascii", errors="replace")
    target = f"{admin_url}{request.scope['path']}{'?' if query else ''}{query}"
    return JSONResponse({"reason": str(error)}, status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": target})


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _reason(HTTPStatus.BAD_REQUEST, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


async def _broken_off(_request: Request, _error: Exception) -> Response:
    """Answer a client that left, or was too slow, before its body was complete: nothing was done, and no answer reaches it."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _not_routed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) or not path.startswith(_PULSAR_PATHS):
        return _reason(error.status_code, str(error.detail))
    call = f"{request.method} {path}"
    if (below := _NON_PERSISTENT.fullmatch(path)) is not None and _is_served(request, f"/admin/v2/persistent/{below[1]}"):
        status, reason = non_persistent_refusal(below[2])
        return _reason(status, f"{call} makes no sense for a non-persistent topic: {reason}")
    reason = unserved(path) or "docs/admin.md lists what is"
    return _reason(HTTPStatus.NOT_IMPLEMENTED, f"{call} is not served by this broker: {reason}")


def _is_served(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("admin.unexpected", extra={"path": request.url.path, "error": repr(error)}, exc_info=error)
    return _reason(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error ({type(error).__name__}); the broker's log has the details")
