"""Reads of policies that cannot be set yet: they are unset everywhere, so that tools which read all policies work.

A row contains Pulsar's answer for an unset policy, and the value in force then (`applied=true`). Writes stay 501 (unserved.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.policy_level import NEVER, Level, namespace_level, topic_level

NO_CONTENT = 204

_NO_DISPATCH_RATE = {
    "dispatchThrottlingRateInMsg": -1,
    "dispatchThrottlingRateInByte": -1,
    "relativeToPublishRate": False,
    "ratePeriodInSecond": 1,
}
_NO_PUBLISH_RATE = {"publishThrottlingRateInMsg": -1, "publishThrottlingRateInByte": -1}
_NO_SUBSCRIBE_RATE = {"subscribeThrottlingRatePerConsumer": -1, "ratePeriodInSecond": 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsetPolicy:
    """A policy that is never set. `unset` None: 204 without body, which clients read as "not set"."""

    word: str
    unset: Any = None
    in_force: Any = None
    """Value that applies to a topic; shown for topics only."""
    kind: dict[str, Any] | None = None
    """JSON schema of a value, if neither `unset` nor `in_force` is one."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its values, for the description of the API."""
        if self.kind is not None:
            return self.kind
        return _schema_of(self.unset if self.in_force is None else self.in_force, _title_of(self.word))


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _schema_of(value: Any, title: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"title": title, "type": "object", "properties": {name: _schema_of(each, "") for name, each in value.items()}}
    return {"type": _JSON_TYPES[type(value)]}


def _title_of(word: str) -> str:
    """Return the policy's name as an object name; dispatch rates of topics, subscriptions and replicators share one."""
    name = word.rpartition("/")[2]
    return "DispatchRate" if name.lower().endswith("dispatchrate") else name[:1].upper() + name[1:]


_OF_BOTH = (
    UnsetPolicy(word="dispatchRate", in_force=_NO_DISPATCH_RATE),
    UnsetPolicy(word="subscriptionDispatchRate", in_force=_NO_DISPATCH_RATE),
    UnsetPolicy(word="replicatorDispatchRate", in_force=_NO_DISPATCH_RATE),
    UnsetPolicy(word="subscribeRate", in_force=_NO_SUBSCRIBE_RATE),
    UnsetPolicy(word="publishRate", in_force=_NO_PUBLISH_RATE),
    UnsetPolicy(word="subscriptionExpirationTime", in_force=0),
    UnsetPolicy(word="compactionThreshold", in_force=0),
    UnsetPolicy(word="entryFilters", in_force={"entryFilterNames": ""}),
    UnsetPolicy(word="replicateSubscriptionState", in_force=False),
    UnsetPolicy(word="dispatcherPauseOnAckStatePersistent", unset=False, in_force=False),
)
OF_NAMESPACES = (
    *_OF_BOTH,
    UnsetPolicy(word="antiAffinity", kind=_TEXT),
    UnsetPolicy(word="persistence/bookieAffinity", kind={"type": "object"}),
    UnsetPolicy(word="schemaAutoUpdateCompatibilityStrategy", kind=_TEXT),
    UnsetPolicy(word="allowedClusters", unset=[], kind=_TEXTS),
    UnsetPolicy(word="allowedTopicPropertyKeysForMetrics", unset=[], kind=_TEXTS),
    UnsetPolicy(word="resourcegroup", kind=_TEXT),
)
OF_TOPICS = (
    *_OF_BOTH,
    UnsetPolicy(word="{sub}/dispatchRate", in_force=_NO_DISPATCH_RATE),
    UnsetPolicy(word="shadowTopics", kind=_TEXTS),
    UnsetPolicy(word="resourceGroup", kind=_TEXT),
)
"""Values as in docs/reference/shapes.md §3 and docs/reference/behaviours.md §7."""


def unset_namespace_policies(context: AdminContext) -> APIRouter:
    return _routes("/admin/v2/namespaces/{tenant}/{namespace}", namespace_level(context), OF_NAMESPACES)


def unset_topic_policies(context: AdminContext) -> APIRouter:
    return _routes("/admin/v2/persistent/{tenant}/{namespace}/{topic}", topic_level(context), OF_TOPICS)


def _routes(prefix: str, level: Level, policies: tuple[UnsetPolicy, ...]) -> APIRouter:
    router = APIRouter(prefix=prefix)
    for policy in policies:
        _add_read(router, level, policy)
    return router


def _add_read(router: APIRouter, level: Level, policy: UnsetPolicy) -> None:
    applied_of: Any = Query(False) if level.what == "topic" else NEVER

    async def read(noun: Any = level.noun, is_global: bool = level.is_global, applied: bool = applied_of) -> Response:
        await level.record(noun)
        value = policy.in_force if applied and not is_global else policy.unset
        return Response(status_code=NO_CONTENT) if value is None else JSONResponse(value)

    router.add_api_route(
        f"/{policy.word}",
        read,
        methods=["GET"],
        name=f"get_{level.what}_{policy.word}",
        summary=f"Read of a {level.what}",
        description="Never set: only reading is served",
        response_class=JSONResponse,
        responses={
            200: {"content": {"application/json": {"schema": policy.schema}}},
            **({NO_CONTENT: {"description": "not set"}} if policy.unset is None else {}),
        },
    )
