"""Names out of path segments: decoded and checked once, where they enter. A bad name is 412 (docs/reference/behaviours.md §1, §3).

All dependencies are coroutines: the framework would run plain functions in threads of its own.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Request

from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.raw_path import decode_once, decode_twice
from cepheid_broker.errors import NotAllowedError
from cepheid_broker.protocol import check_subscription_name
from cepheid_wire import NON_PERSISTENT, PATH_STEPS, PERSISTENT, NamespaceName, TopicName

_NAME = re.compile(r"[-=:.\w]+", re.ASCII)
MAX_NAME_BYTES = 255  # of a tenant, namespace or cluster; each is one key segment in metadata


def check_name(kind: str, name: str) -> str:
    """`name` if it may name a cluster, tenant or namespace."""
    if not _NAME.fullmatch(name):
        raise PreconditionError(f"{name[:200]!r} cannot name a {kind}: use letters, digits and -=:._ only")
    if name in PATH_STEPS:
        raise PreconditionError(f"{name!r} cannot name a {kind}: paths with it lead elsewhere, choose another name")
    if len(name) > MAX_NAME_BYTES:
        raise PreconditionError(f"the name of the {kind} has {len(name)} bytes, {MAX_NAME_BYTES} are possible")
    return name


async def _cluster(cluster: str) -> str:
    return check_name("cluster", decode_once(cluster))


async def _tenant(tenant: str) -> str:
    return check_name("tenant", decode_once(tenant))


async def _namespace(tenant: Annotated[str, Depends(_tenant)], namespace: str) -> NamespaceName:
    return NamespaceName(tenant, check_name("namespace", decode_once(namespace)))


async def _domain(request: Request) -> str:
    """That of the route: /admin/v2/persistent/… or /admin/v2/non-persistent/…"""
    return NON_PERSISTENT if request.scope["path"].startswith(f"/admin/v2/{NON_PERSISTENT}/") else PERSISTENT


DomainPath = Annotated[str, Depends(_domain)]


async def _topic(domain: DomainPath, tenant: str, namespace: str, topic: str) -> TopicName:
    return _topic_name(domain, tenant, namespace, topic)


async def _twice_decoded_topic(tenant: str, namespace: str, topic: str) -> TopicName:
    return TopicName.parse(f"{PERSISTENT}://{decode_once(tenant)}/{decode_once(namespace)}/{decode_twice(topic)}")


async def _schema_topic(tenant: str, namespace: str, topic: str) -> TopicName:
    # The domain is not named: both share a schema.
    return (await _twice_decoded_topic(tenant, namespace, topic)).base


async def _any_topic(domain: str, tenant: str, namespace: str, topic: str) -> TopicName:
    if domain not in (PERSISTENT, NON_PERSISTENT):
        raise PreconditionError(f"{domain!r} is no domain of topics: {PERSISTENT} or {NON_PERSISTENT}")
    return _topic_name(domain, tenant, namespace, topic)


async def _subscription(sub: str) -> str:
    name = decode_twice(sub)
    try:
        check_subscription_name(name)
    except NotAllowedError as error:
        raise PreconditionError(str(error)) from None
    return name


def _topic_name(domain: str, tenant: str, namespace: str, topic: str) -> TopicName:
    # Parsing checks each part; a name with a slash in it is refused there, as it has no full name.
    return TopicName.parse(f"{domain}://{decode_once(tenant)}/{decode_once(namespace)}/{decode_once(topic)}")


ClusterPath = Annotated[str, Depends(_cluster)]
TenantPath = Annotated[str, Depends(_tenant)]
NamespacePath = Annotated[NamespaceName, Depends(_namespace)]
TopicPath = Annotated[TopicName, Depends(_topic)]
TwiceDecodedTopicPath = Annotated[TopicName, Depends(_twice_decoded_topic)]
SchemaPath = Annotated[TopicName, Depends(_schema_topic)]
AnyTopicPath = Annotated[TopicName, Depends(_any_topic)]
SubscriptionPath = Annotated[str, Depends(_subscription)]
