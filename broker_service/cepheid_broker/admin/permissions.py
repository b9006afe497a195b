"""Permissions, while there are no users to give them to: nobody has any of their own, and none can be granted.

Reading and revoking say so truthfully; granting is not served (501, as Pulsar answers while authorization is off).
"""

from __future__ import annotations

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.path_names import NamespacePath, TopicPath
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.admin.topic_access import parts_of

NO_CONTENT = 204


_NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}/permissions"
_TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions"


def permissions(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get(_NAMESPACE)
    @router.get(f"{_NAMESPACE}/subscription")
    async def granted_in_namespace(namespace: NamespacePath) -> dict[str, list[str]]:
        """None: everybody may do everything while there are no users"""
        await context.require_namespace(namespace)
        return {}

    @router.delete(f"{_NAMESPACE}/{{role}}", status_code=NO_CONTENT)
    async def revoke_in_namespace(namespace: NamespacePath, role: str) -> None:
        """Of a role that has none: success"""
        await context.require_namespace(namespace)

    @router.get(_TOPIC)
    async def granted_on_topic(topic: TopicPath) -> dict[str, list[str]]:
        """None: everybody may do everything while there are no users"""
        await parts_of(context, topic)
        return {}

    @router.delete(f"{_TOPIC}/{{role}}", status_code=NO_CONTENT)
    async def revoke_on_topic(topic: TopicPath, role: str) -> None:
        """412: nothing was granted"""
        await parts_of(context, topic)
        raise PreconditionError(f"Role {decode_once(role)!r} was granted nothing on {topic}", topic=str(topic))

    return router
