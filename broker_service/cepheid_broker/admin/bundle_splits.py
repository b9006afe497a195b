"""Splitting the bundles of a namespace, and the hashes of their topics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from cepheid_broker.admin.bundle_calls import BundlePath, require_bundle, require_owner
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import NamespacePath
from cepheid_broker.admin.policy_change import TRIES, contended
from cepheid_broker.balancing import by_load, by_topics, middle
from cepheid_broker.ownership import Bundle, check_may_split, divided, topic_hash
from cepheid_metadata import BadVersionError
from cepheid_wire import NON_PERSISTENT, TopicName

NO_CONTENT = 204
ALGORITHMS = (
    "range_equally_divide",
    "topic_count_equally_divide",
    "flow_or_qps_equally_divide",
    "specified_positions_divide",
)

Positions = Annotated[list[int] | None, json_body(list[int] | None)]


def bundle_splits(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces/{tenant}/{namespace}/{bundle}")

    @router.put("/split", status_code=NO_CONTENT)
    async def split_bundle(
        namespace: NamespacePath,
        bundle: BundlePath,
        positions: Positions,
        unload: bool = False,
        splitAlgorithmName: str = ALGORITHMS[0],
    ) -> None:
        """Split a bundle while its topics stay open: in the middle, at equal numbers of topics, by load, or at the hashes in the
        body. `unload`: the parts then move to other brokers"""
        found = await require_bundle(context, namespace, bundle)
        await require_owner(context, found)
        starts = await _starts(context, found, splitAlgorithmName, positions)
        ownership = context.broker.ownership
        if ownership.is_shared:
            parts = await ownership.split(found, starts)
        else:
            parts = await _split_alone(context, found, starts)
        if unload:
            for part in parts:
                await ownership.release(part)

    @router.get("/topicHashPositions")
    async def topic_hash_positions(
        namespace: NamespacePath, bundle: BundlePath, topics: Annotated[list[str] | None, Query()] = None
    ) -> dict[str, Any]:
        """Return the hashes of its topics, or of those in `topics`, between which it can be split"""
        found = await require_bundle(context, namespace, bundle)
        wanted = None if not topics else dict.fromkeys(topics)
        positions = {
            str(topic): topic_hash(topic) for topic in await _topics_of(context, found) if wanted is None or str(topic) in wanted
        }
        return {"namespace": str(namespace), "bundle": found.range, "topicHashPositions": positions}

    return router


async def _starts(context: AdminContext, bundle: Bundle, algorithm: str, positions: Sequence[int] | None) -> list[int]:
    """Return the hashes at which to split the bundle. Raises PreconditionError."""
    if algorithm not in ALGORITHMS:
        raise PreconditionError(f"splitAlgorithmName {algorithm[:100]!r} is not one of {', '.join(ALGORITHMS)}")
    if algorithm == "specified_positions_divide":
        if not positions:
            raise PreconditionError(
                "specified_positions_divide needs a body: the hashes at which new bundles begin, as [1073741824]"
            )
        return sorted(set(positions))
    if algorithm == "range_equally_divide":
        return _found(bundle, middle(bundle.first, bundle.last), "it has one hash")
    if algorithm == "flow_or_qps_equally_divide" and len(loads := context.broker.own_load.topic_loads(bundle)) > 1:
        return _found(bundle, by_load(loads), "its load is that of one topic")
    hashes = [topic_hash(topic) for topic in await _topics_of(context, bundle)]
    return _found(bundle, by_topics(hashes), f"it has {len(hashes)} topics")


def _found(bundle: Bundle, cut: int | None, why: str) -> list[int]:
    if cut is None:
        raise PreconditionError(f"bundle {bundle} cannot be split between topics: {why}")
    return [cut]


async def _topics_of(context: AdminContext, bundle: Bundle) -> Iterable[TopicName]:
    catalog, namespace = context.broker.catalog, bundle.namespace
    topics = [*await catalog.topics_of(namespace), *await catalog.topics_of(namespace, NON_PERSISTENT)]
    return [topic for topic in topics if bundle.holds(topic)]


async def _split_alone(context: AdminContext, bundle: Bundle, starts: Sequence[int]) -> list[Bundle]:
    """Split a bundle if there is one broker: no bundle has a record of its own. Raises SplitRefusedError, ConflictError."""
    await check_may_split(context.store)
    noun = (bundle.namespace.tenant, bundle.namespace.local_name)
    for _ in range(TRIES):
        found = await context.require_namespace(bundle.namespace)
        try:
            await context.namespaces.replace(noun, divided(found.record, bundle, starts), found.version)
            return bundle.parts(starts)
        except BadVersionError:
            continue
    raise contended(bundle.namespace)
