"""Single numbers of a namespace's offload policy, which Pulsar had before there was a policy: two thresholds and a time.

They are fields of the one policy here, so both ways to read it always agree. A threshold has no DELETE: -1 switches it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.offload_values import MAX_MS, is_empty, keep_s, threshold
from cepheid_broker.admin.path_names import NamespacePath
from cepheid_broker.admin.policy_change import change_namespace
from cepheid_broker.admin.policy_values import Long
from cepheid_metadata import NamespaceRecord, OffloadPolicy
from cepheid_wire import NamespaceName

NO_CONTENT = 204

LongBody = Annotated[int, json_body(Long)]

_LONG = TypeAdapter(Long)


@dataclass(frozen=True, slots=True)
class _OldMember:
    """A number of the policy that the whole-namespace object has beside the policy."""

    field: str
    per_unit: int = 1
    when_not_set: int | None = None

    def decode(self, value: int) -> int | None:
        if self.per_unit > 1:
            return keep_s(value)
        return threshold(value, most=MAX_MS // 1000 if self.field == "after_s" else float("inf"))

    def encode(self, policy: OffloadPolicy | None) -> int | None:
        value = None if policy is None else getattr(policy, self.field)
        return self.when_not_set if value is None else value * self.per_unit


OLD_MEMBERS: Mapping[str, _OldMember] = {
    "offload_threshold": _OldMember("after_bytes", when_not_set=-1),
    "offload_threshold_in_seconds": _OldMember("after_s", when_not_set=-1),
    "offload_deletion_lag_ms": _OldMember("keep_s", per_unit=1000),
}


def offload_thresholds(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces/{tenant}/{namespace}")

    async def policy_of(namespace: NamespaceName) -> OffloadPolicy | None:
        return (await context.require_namespace(namespace)).record.offload

    async def change(namespace: NamespaceName, field: str, value: int | None) -> None:
        def plan(record: NamespaceRecord) -> dict[str, Any]:
            policy = (record.offload or OffloadPolicy()).replace(**{field: value})
            return {"offload": None if is_empty(policy) else policy}

        await change_namespace(context, namespace, plan)

    @router.get("/offloadThreshold")
    async def get_threshold(namespace: NamespacePath) -> int:
        """Bytes of the newest ledgers that stay on bookies alone, -1 = off"""
        return OLD_MEMBERS["offload_threshold"].encode(await policy_of(namespace)) or 0

    @router.put("/offloadThreshold", status_code=NO_CONTENT)
    async def put_threshold(namespace: NamespacePath, size_bytes: LongBody) -> None:
        await change(namespace, "after_bytes", OLD_MEMBERS["offload_threshold"].decode(size_bytes))

    @router.get("/offloadThresholdInSeconds")
    async def get_threshold_s(namespace: NamespacePath) -> int:
        """Age of a ledger's end from which it is offloaded, -1 = off"""
        return OLD_MEMBERS["offload_threshold_in_seconds"].encode(await policy_of(namespace)) or 0

    @router.put("/offloadThresholdInSeconds", status_code=NO_CONTENT)
    async def put_threshold_s(namespace: NamespacePath, age_s: LongBody) -> None:
        await change(namespace, "after_s", OLD_MEMBERS["offload_threshold_in_seconds"].decode(age_s))

    @router.get("/offloadDeletionLagMs", response_class=JSONResponse, responses={NO_CONTENT: {"description": "not set"}})
    async def get_deletion_lag(namespace: NamespacePath) -> Response:
        """Time for which bookies keep an offloaded ledger; whole seconds"""
        value_ms = OLD_MEMBERS["offload_deletion_lag_ms"].encode(await policy_of(namespace))
        return Response(status_code=NO_CONTENT) if value_ms is None else JSONResponse(value_ms)

    @router.put("/offloadDeletionLagMs", status_code=NO_CONTENT)
    async def put_deletion_lag(namespace: NamespacePath, lag_ms: LongBody) -> None:
        await change(namespace, "keep_s", OLD_MEMBERS["offload_deletion_lag_ms"].decode(lag_ms))

    @router.delete("/offloadDeletionLagMs", status_code=NO_CONTENT)
    async def delete_deletion_lag(namespace: NamespacePath) -> None:
        await change(namespace, "keep_s", None)

    return router


def old_members(policy: OffloadPolicy | None) -> dict[str, int]:
    """Return the numbers that the whole-namespace object has beside the policy."""
    found = {name: member.encode(policy) for name, member in OLD_MEMBERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def with_old_members(policy: OffloadPolicy | None, body: Mapping[str, Any]) -> OffloadPolicy | None:
    """Return the policy with the numbers beside it in a whole-namespace body. Raises BadRequestError, PreconditionError."""
    changes: dict[str, int | None] = {}
    for name, member in OLD_MEMBERS.items():
        if (given := body.get(name)) is None or given == member.when_not_set:
            continue
        try:
            value = member.decode(_LONG.validate_python(given))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise BadRequestError(f"body.{name}: {first['msg']}") from None
        if policy is not None and (said := getattr(policy, member.field)) not in (None, value):
            raise PreconditionError(f"{name} and offload_policies differ: {given} and {said * member.per_unit}")
        changes[member.field] = value
    return (policy or OffloadPolicy()).replace(**changes) if changes else policy
