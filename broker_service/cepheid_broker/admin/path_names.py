"""Names in path segments, decoded and checked once on entry. A bad name is 412 (docs/reference/behaviours.md §1, §3).

All dependencies are coroutines: the framework would run plain functions in its own threads.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant

from cepheid_broker.admin.errors import BadNameError
from cepheid_broker.admin.raw_path import decode_once, decode_twice
from cepheid_broker.errors import NotAllowedError
from cepheid_broker.protocol import check_subscription_name
from cepheid_wire import NON_PERSISTENT, PATH_STEPS, PERSISTENT, NamespaceName, TopicName

_NAME = re.compile(r"[-=:.\w]+", re.ASCII)
MAX_NAME_BYTES = 255  # for tenant, namespace and cluster, each a segment of a metadata key


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is valid for a cluster, tenant or namespace."""
    if not _NAME.fullmatch(name):
        raise BadNameError(f"{name[:200]!r} cannot name a {kind}: use letters, digits and -=:._ only")
    if name in PATH_STEPS:
        raise BadNameError(f"{name!r} cannot name a {kind}: paths with it lead elsewhere; choose another name")
    if len(name) > MAX_NAME_BYTES:
        raise BadNameError(f"the name of the {kind} has {len(name)} bytes, {MAX_NAME_BYTES} are possible")
    return name


async def _cluster(cluster: str) -> str:
    return check_name("cluster", decode_once(cluster))


async def _tenant(tenant: str) -> str:
    return check_name("tenant", decode_once(tenant))


async def _namespace(tenant: Annotated[str, Depends(_tenant)], namespace: str) -> NamespaceName:
    return NamespaceName(tenant, check_name("namespace", decode_once(namespace)))


async def _domain(request: Request) -> str:
    """Return the domain of the route: /admin/v2/persistent/… or /admin/v2/non-persistent/…"""
    return NON_PERSISTENT if request.scope["path"].startswith(f"/admin/v2/{NON_PERSISTENT}/") else PERSISTENT


DomainPath = Annotated[str, Depends(_domain)]


async def _topic(domain: DomainPath, tenant: str, namespace: str, topic: str) -> TopicName:
    return _topic_name(domain, tenant, namespace, topic)


async def _twice_decoded_topic(tenant: str, namespace: str, topic: str) -> TopicName:
    return TopicName.parse(f"{PERSISTENT}://{decode_once(tenant)}/{decode_once(namespace)}/{decode_twice(topic)}")


async def _schema_topic(tenant: str, namespace: str, topic: str) -> TopicName:
    # Without the domain: topics of both domains share a schema.
    return (await _twice_decoded_topic(tenant, namespace, topic)).base


async def _any_topic(domain: str, tenant: str, namespace: str, topic: str) -> TopicName:
    if domain not in (PERSISTENT, NON_PERSISTENT):
        raise BadNameError(f"{domain!r} is not a domain of topics: {PERSISTENT} or {NON_PERSISTENT}")
    return _topic_name(domain, tenant, namespace, topic)


async def _subscription(sub: str) -> str:
    name = decode_twice(sub)
    try:
        check_subscription_name(name)
    except NotAllowedError as error:
        raise BadNameError(str(error)) from None
    return name


def _topic_name(domain: str, tenant: str, namespace: str, topic: str) -> TopicName:
    # Parsing checks each part; a name that contains a slash is refused there.
    return TopicName.parse(f"{domain}://{decode_once(tenant)}/{decode_once(namespace)}/{decode_once(topic)}")


ClusterPath = Annotated[str, Depends(_cluster)]
TenantPath = Annotated[str, Depends(_tenant)]
NamespacePath = Annotated[NamespaceName, Depends(_namespace)]
TopicPath = Annotated[TopicName, Depends(_topic)]
TwiceDecodedTopicPath = Annotated[TopicName, Depends(_twice_decoded_topic)]
SchemaPath = Annotated[TopicName, Depends(_schema_topic)]
AnyTopicPath = Annotated[TopicName, Depends(_any_topic)]
SubscriptionPath = Annotated[str, Depends(_subscription)]

PathNoun = str | NamespaceName | TopicName
"""The subject of a call: a tenant, a namespace or a topic."""
NounReader = Callable[[Request], Awaitable[PathNoun]]


async def _tenant_in(request: Request) -> str:
    return await _tenant(request.path_params["tenant"])


async def _namespace_in(request: Request) -> NamespaceName:
    return await _namespace(await _tenant_in(request), request.path_params["namespace"])


async def _topic_in(request: Request) -> TopicName:
    return await _topic(await _domain(request), *_topic_segments(request))


async def _twice_decoded_topic_in(request: Request) -> TopicName:
    return await _twice_decoded_topic(*_topic_segments(request))


async def _schema_topic_in(request: Request) -> TopicName:
    return await _schema_topic(*_topic_segments(request))


async def _any_topic_in(request: Request) -> TopicName:
    return await _any_topic(request.path_params["domain"], *_topic_segments(request))


def _topic_segments(request: Request) -> tuple[str, str, str]:
    names = request.path_params
    return names["tenant"], names["namespace"], names["topic"]


_READERS: dict[Any, tuple[int, NounReader]] = {
    _tenant: (0, _tenant_in),
    _namespace: (1, _namespace_in),
    _topic: (2, _topic_in),
    _twice_decoded_topic: (2, _twice_decoded_topic_in),
    _schema_topic: (2, _schema_topic_in),
    _any_topic: (2, _any_topic_in),
}


def noun_reader(dependant: Dependant) -> NounReader | None:
    """Return a reader of the route's noun from a request, which reads it as the route itself does; None if it has none.

    Topics are decoded once or twice, depending on the route. Permissions must not be checked for another name than the one that the
    handler uses.
    """
    found: dict[NounReader, int] = {}
    pending = [dependant]
    while pending:
        each = pending.pop()
        pending += each.dependencies
        if each.call in _READERS:
            rank, reader = _READERS[each.call]
            found[reader] = rank
    if not found:
        return None
    highest = max(found.values())
    (reader,) = (reader for reader, rank in found.items() if rank == highest)
    return reader


async def subscription_in(request: Request) -> str:
    """Return the subscription named by `{sub}` of the route."""
    return await _subscription(request.path_params["sub"])
