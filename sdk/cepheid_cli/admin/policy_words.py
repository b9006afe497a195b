"""Policies on the command line: how a value is parsed, and which call sets it.

    ttl 15m ──► POST …/messageTTL 900         retention 7d,100GB ──► POST …/retention {"retentionTimeInMinutes": …}
Namespaces and topics use the same words; if the API's path differs between the two, `topic_path` has the topic's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cepheid.admin.exchange import namespace_path, topic_path
from cepheid.admin.sync import Admin
from cepheid_cli.admin.offload_words import offload_body, shown_offload
from cepheid_cli.admin.units import BadValueError, duration_s, size_bytes, switch

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class PolicyWord:
    path: str
    form: str
    read: Callable[[str], Any]
    topic_path: str = ""
    in_query: str = ""
    """Query parameter of the value at topic level, where it is not in the body."""
    query: Mapping[str, str] | None = None
    show_path: str = ""
    set_method: str = "POST"
    show: Callable[[Any], str] | None = None
    """Converts the API's value to the value for `set`. None: it is shown as JSON."""
    namespace_unset_path: str = ""
    """Path of DELETE on a namespace, if not `path`."""
    namespace_unset: Any = None
    """Value that resets it on a namespace where the API has no DELETE for it."""

    def path_for(self, *, of_topic: bool) -> str:
        return (self.topic_path or self.path) if of_topic else self.path


def _retention(text: str) -> dict[str, int]:
    time_text, comma, size_text = text.partition(",")
    if not comma:
        raise BadValueError(
            f"{text!r} is not a retention; write TIME,SIZE, such as 7d,100GB; each may be unlimited, or both 0 (0s,0)"
        )
    seconds, size = duration_s(time_text), size_bytes(size_text)
    minutes = -1 if seconds < 0 else -(-seconds // 60)
    megabytes = -1 if size < 0 else -(-size // _MB)
    return {"retentionTimeInMinutes": minutes, "retentionSizeInMB": megabytes}


_ACTIONS = {"hold": "producer_request_hold", "refuse": "producer_exception", "evict": "consumer_backlog_eviction"}


def _quota(limit: str, text: str) -> dict[str, Any]:
    value, colon, action = text.partition(":")
    if not colon or action not in _ACTIONS:
        raise BadValueError(f"{text!r} is not a quota; write LIMIT:ACTION, where ACTION is one of {', '.join(_ACTIONS)}")
    size, seconds = (size_bytes(value), -1) if limit == "size" else (-1, duration_s(value))
    return {"limitSize": size, "limitTime": seconds, "policy": _ACTIONS[action]}


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise BadValueError(f"{text!r} is not a number; write 0 (no limit) or more")
    return int(text)


def _persistence(text: str) -> dict[str, Any]:
    sizes = text.split("/")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        raise BadValueError(f"{text!r} is not an ensemble; write ENSEMBLE/WRITE_QUORUM/ACK_QUORUM, such as 3/3/2")
    ensemble, write, ack = map(int, sizes)
    return {
        "bookkeeperEnsemble": ensemble,
        "bookkeeperWriteQuorum": write,
        "bookkeeperAckQuorum": ack,
        "managedLedgerMaxMarkDeleteRate": 0.0,
    }


_INACTIVE = {"no-subscriptions": "delete_when_no_subscriptions", "caught-up": "delete_when_subscriptions_caught_up"}


def _inactive(text: str) -> dict[str, Any]:
    after, colon, when = text.partition(":")
    if not colon or when not in _INACTIVE:
        raise BadValueError(f"{text!r} is not a rule; write TIME:WHEN, where WHEN is one of {', '.join(_INACTIVE)}")
    return {
        "inactiveTopicDeleteMode": _INACTIVE[when],
        "maxInactiveDurationSeconds": duration_s(after),
        "deleteWhileInactive": True,
    }


_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")


def _types(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in _TYPES]:
        raise BadValueError(f"{unknown[0]!r} is not a subscription type; write some of {', '.join(_TYPES)}, separated by commas")
    return names


def _creation(text: str) -> dict[str, bool]:
    return {"allowAutoSubscriptionCreation": switch(text)}


def _delayed(text: str) -> dict[str, Any]:
    return {"active": switch(text), "tickTime": 1000}


def _compatibility(text: str) -> str:
    return text.upper().replace("-", "_")


WORDS: Mapping[str, PolicyWord] = {
    "retention": PolicyWord("retention", "TIME,SIZE: 7d,100GB", _retention),
    "ttl": PolicyWord("messageTTL", "TIME: 15m", duration_s, in_query="messageTTL"),
    "size-quota": PolicyWord(
        "backlogQuota",
        "SIZE:hold|refuse|evict",
        lambda text: _quota("size", text),
        query={"backlogQuotaType": "destination_storage"},
        show_path="backlogQuotaMap",
    ),
    "age-quota": PolicyWord(
        "backlogQuota",
        "TIME:hold|refuse|evict",
        lambda text: _quota("age", text),
        query={"backlogQuotaType": "message_age"},
        show_path="backlogQuotaMap",
    ),
    "dedup": PolicyWord("deduplication", "on|off", switch, topic_path="deduplicationEnabled"),
    "persistence": PolicyWord("persistence", "E/Qw/Qa: 3/3/2", _persistence),
    "inactive": PolicyWord("inactiveTopicPolicies", "TIME:no-subscriptions|caught-up", _inactive),
    "max-unacked-per-consumer": PolicyWord(
        "maxUnackedMessagesPerConsumer", "NUMBER", _whole, topic_path="maxUnackedMessagesOnConsumer"
    ),
    "max-unacked-per-subscription": PolicyWord(
        "maxUnackedMessagesPerSubscription", "NUMBER", _whole, topic_path="maxUnackedMessagesOnSubscription"
    ),
    "max-producers": PolicyWord("maxProducersPerTopic", "NUMBER", _whole, topic_path="maxProducers"),
    "max-consumers": PolicyWord("maxConsumersPerTopic", "NUMBER", _whole, topic_path="maxConsumers"),
    "max-consumers-per-subscription": PolicyWord("maxConsumersPerSubscription", "NUMBER", _whole),
    "max-subscriptions": PolicyWord("maxSubscriptionsPerTopic", "NUMBER", _whole),
    "subscription-types": PolicyWord("subscriptionTypesEnabled", "Shared,Key_Shared", _types),
    "create-subscriptions": PolicyWord("autoSubscriptionCreation", "on|off", _creation),
    "delayed": PolicyWord("delayedDelivery", "on|off", _delayed),
    "offload": PolicyWord(
        "offloadPolicies",
        "URL,after-size=SIZE,after-age=TIME,keep=TIME,read-from=bookies|objects: s3://bucket/prefix,after-age=1d,keep=1h",
        offload_body,
        show=shown_offload,
        namespace_unset_path="removeOffloadPolicies",
    ),
    "schema-compatibility": PolicyWord(
        "schemaCompatibilityStrategy", "full|backward|…", _compatibility, set_method="PUT", namespace_unset="UNDEFINED"
    ),
}


def namespace_base(namespace: str) -> str:
    """Return the path of a namespace's policies. Raises UsageError."""
    return f"/admin/v2/namespaces/{namespace_path(namespace)}"


def topic_base(topic: str) -> str:
    """Return the path of a topic's policies. Raises UsageError."""
    return f"/admin/v2/{topic_path(topic)}"


def word(name: str) -> PolicyWord:
    """Return the policy of this name. Raises BadValueError with the known ones."""
    if (found := WORDS.get(name)) is None:
        raise BadValueError(f"{name!r} is not a policy; there are {', '.join(WORDS)}")
    return found


def set_policy(admin: Admin, base_path: str, name: str, value: str, *, of_topic: bool) -> None:
    policy = word(name)
    path, query, body = f"{base_path}/{policy.path_for(of_topic=of_topic)}", dict(policy.query or {}), policy.read(value)
    if of_topic and policy.in_query:
        query, body = {**query, policy.in_query: body}, None
    admin.call(policy.set_method, path, query, body)


def unset_policy(admin: Admin, base_path: str, name: str, *, of_topic: bool) -> None:
    policy = word(name)
    path = f"{base_path}/{policy.path_for(of_topic=of_topic)}"
    if policy.namespace_unset is not None and not of_topic:
        admin.call(policy.set_method, path, {}, policy.namespace_unset)
    else:
        if policy.namespace_unset_path and not of_topic:
            path = f"{base_path}/{policy.namespace_unset_path}"
        admin.call("DELETE", path, policy.query or {})


def shown_policy(admin: Admin, base_path: str, name: str, *, of_topic: bool, in_force: bool = False) -> str | None:
    """Return the value that is set, in the form for `set` if there is one, otherwise as JSON. None: it is not set there."""
    policy = word(name)
    query = {"applied": True} if in_force else {}
    value = admin.call("GET", f"{base_path}/{policy.show_path or policy.path_for(of_topic=of_topic)}", query)
    if policy.query is not None and isinstance(value, dict):
        value = value.get(policy.query["backlogQuotaType"])
    if value is None:
        return None
    return json.dumps(value, indent=2) if policy.show is None else policy.show(value)


def shown_policies(admin: Admin, base_path: str, *, of_topic: bool) -> dict[str, Any]:
    """Return the policies that are set, in the API's form; for a topic those in force."""
    found: dict[str, Any] = {}
    query = {"applied": True} if of_topic else {}
    for name, policy in WORDS.items():
        value = admin.call("GET", f"{base_path}/{policy.show_path or policy.path_for(of_topic=of_topic)}", query)
        if policy.query is not None and isinstance(value, dict):
            value = value.get(policy.query["backlogQuotaType"])
        if value is not None:
            found[name] = value
    return found
