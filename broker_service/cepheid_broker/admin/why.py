"""Why a subscription is not delivering, from its dispatcher's state, with the event that ends it; and skipping unreadable entries.

Cepheid's own calls, not Pulsar's.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.path_names import AnyTopicPath, SubscriptionPath
from cepheid_broker.admin.topic_access import open_plain, subscription_of
from cepheid_broker.dispatch import Idle, Why
from cepheid_broker.topics import PersistentTopic, Subscription, Topic


def why(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1/topics/{domain}/{tenant}/{namespace}/{topic}")

    @router.get("/subscription/{sub}/why")
    async def why_not_delivering(topic: AnyTopicPath, sub: SubscriptionPath) -> dict[str, Any]:
        """Return what holds delivery up, for which consumer, since when, and the event that ends it"""
        opened = await open_plain(context, topic)
        return answer(opened, subscription_of(opened, sub))

    @router.post("/subscription/{sub}/skip_unreadable")
    async def skip_unreadable(topic: AnyTopicPath, sub: SubscriptionPath) -> dict[str, Any]:
        """Skip entries that certainly have no valid copy, where delivery waits for them. `more`: ask again"""
        opened = await open_plain(context, topic)
        found = await subscription_of(opened, sub).skip_unreadable()
        skipped = [{"first": str(first), "last": str(last), "reason": reason} for first, last, reason in found.runs()]
        return {"skipped": skipped, "entries": len(found.positions), "more": found.may_be_more}

    return router


def answer(topic: Topic, subscription: Subscription) -> dict[str, Any]:
    reasons = subscription.why()
    if topic.publish_blocked is not None and any(each.idle is Idle.AT_END for each in reasons):
        reasons = (*reasons, Why(Idle.PUBLISH_BLOCKED, details=_quotas(topic)))
    ledger = topic.ledger if isinstance(topic, PersistentTopic) else None
    if ledger is not None and ledger.lacking is not None and any(each.idle is Idle.AT_END for each in reasons):
        reasons = (*reasons, Why(Idle.NO_OPEN_LEDGER, details=str(ledger.lacking)))
    figures = subscription.figures()
    return {
        "topic": str(topic.name),
        "subscription": subscription.name,
        "type": figures.type_name,
        "delivering": not reasons,
        "reasons": [_reason(each) for each in reasons],
        "backlog_entries": figures.backlog_entries,
        "not_saving": None if ledger is None or ledger.not_saving is None else str(ledger.not_saving),
        "consumers": [
            {
                "name": consumer.name,
                "permits": consumer.permits,
                "unacked_messages": consumer.unacked_messages,
                "blocked": consumer.is_blocked,
            }
            for consumer in figures.consumers
        ],
    }


def _quotas(topic: Topic) -> str:
    assert topic.publish_blocked is not None
    size, age = topic.policies.size_quota, topic.policies.age_quota
    limits = [f"{size.limit} bytes"] if size is not None else []
    limits += [f"{age.limit} s of age"] if age is not None else []
    return f"the policy is {topic.publish_blocked.value}, the limit {' and '.join(limits) or 'was just removed'}"


def _reason(why: Why) -> dict[str, Any]:
    return {
        "reason": why.idle.reason,
        "consumer": why.consumer,
        "key": why.key,
        "message_id": None if why.position is None else str(why.position),
        "until": why.until,
        "since_s": why.since_s,
        "details": why.details,
    }
