"""What each command needs, and the checks of one connection: made once per request, and again when permissions change.

A command without a row here is not served. A row is checked where the command's topic is known, in the module of its family;
tests/broker/test_access.py sends each command with a role that has no permissions.
"""

from __future__ import annotations

from collections.abc import Mapping

from cepheid_broker.authorizer import Authorizer, refusal
from cepheid_broker.peer import Peer
from cepheid_security import Decision, Need
from cepheid_security.audit import AuditLog, Result
from cepheid_wire import CommandType, InvalidTopicNameError, NamespaceName, TopicName

_ON_WHAT_IS_OPEN = Need.AUTHENTICATED
"""For commands about a producer, consumer or watcher of this connection: PRODUCER, SUBSCRIBE or WATCH_TOPIC_LIST was checked
when it was opened, and it is closed when the permission is revoked."""

REFUSED_COMMANDS = (
    CommandType.TC_CLIENT_CONNECT_REQUEST,
    CommandType.NEW_TXN,
    CommandType.ADD_PARTITION_TO_TXN,
    CommandType.ADD_SUBSCRIPTION_TO_TXN,
    CommandType.END_TXN,
    CommandType.END_TXN_ON_PARTITION,
    CommandType.END_TXN_ON_SUBSCRIPTION,
    CommandType.SCALABLE_TOPIC_LOOKUP,
    CommandType.SCALABLE_TOPIC_SUBSCRIBE,
    CommandType.SCALABLE_TOPIC_CLOSE,
    CommandType.WATCH_SCALABLE_TOPICS,
    CommandType.WATCH_SCALABLE_TOPICS_CLOSE,
    CommandType.WATCH_TC_ASSIGNMENTS,
    CommandType.WATCH_TC_ASSIGNMENTS_CLOSE,
)
"""Commands that are not served yet (connection_unserved.py). One that becomes served gets a row of its own instead."""

COMMAND_NEEDS: Mapping[CommandType, Need] = {
    CommandType.CONNECT: Need.NOBODY_IN_PARTICULAR,
    CommandType.AUTH_RESPONSE: Need.NOBODY_IN_PARTICULAR,
    CommandType.PING: Need.AUTHENTICATED,
    CommandType.PONG: Need.AUTHENTICATED,
    CommandType.PARTITIONED_METADATA: Need.PRODUCE_OR_CONSUME,
    CommandType.LOOKUP: Need.PRODUCE_OR_CONSUME,
    CommandType.GET_TOPICS_OF_NAMESPACE: Need.NAMESPACE_READ,
    CommandType.WATCH_TOPIC_LIST: Need.NAMESPACE_READ,
    CommandType.WATCH_TOPIC_LIST_CLOSE: _ON_WHAT_IS_OPEN,
    CommandType.GET_SCHEMA: Need.PRODUCE_OR_CONSUME,
    CommandType.GET_OR_CREATE_SCHEMA: Need.PRODUCE,
    CommandType.PRODUCER: Need.PRODUCE,
    CommandType.SEND: _ON_WHAT_IS_OPEN,
    CommandType.CLOSE_PRODUCER: _ON_WHAT_IS_OPEN,
    CommandType.SUBSCRIBE: Need.CONSUME,
    CommandType.FLOW: _ON_WHAT_IS_OPEN,
    CommandType.ACK: _ON_WHAT_IS_OPEN,
    CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES: _ON_WHAT_IS_OPEN,
    CommandType.SEEK: _ON_WHAT_IS_OPEN,
    CommandType.GET_LAST_MESSAGE_ID: _ON_WHAT_IS_OPEN,
    CommandType.UNSUBSCRIBE: _ON_WHAT_IS_OPEN,
    CommandType.CLOSE_CONSUMER: _ON_WHAT_IS_OPEN,
    CommandType.CONSUMER_STATS: _ON_WHAT_IS_OPEN,
    **dict.fromkeys(REFUSED_COMMANDS, Need.AUTHENTICATED),
}

_DONE_BY: Mapping[Need, str] = {
    Need.PRODUCE: "publishing to",
    Need.CONSUME: "consuming from",
    Need.PRODUCE_OR_CONSUME: "using",
    Need.NAMESPACE_READ: "listing the topics of",
}


class Access:
    """Permissions of one connection's client. Without an authorizer everything is allowed."""

    def __init__(self, peer: Peer, authorizer: Authorizer | None, audit: AuditLog) -> None:
        self._peer = peer
        self._authorizer = authorizer
        self._audit = audit

    def topic_named(self, command: CommandType, name: str) -> TopicName:
        """Return the topic that a request names. Raises InvalidTopicNameError and records it, as no decision will be."""
        try:
            return TopicName.parse(name)
        except InvalidTopicNameError as error:
            self._record_invalid(command, name, error)
            raise

    def namespace_named(self, command: CommandType, name: str) -> NamespaceName:
        """Return the namespace that a request names. Raises InvalidTopicNameError, which is recorded."""
        try:
            return NamespaceName.parse(name)
        except InvalidTopicNameError as error:
            self._record_invalid(command, name, error)
            raise

    def _record_invalid(self, command: CommandType, name: str, error: InvalidTopicNameError) -> None:
        if self._authorizer is not None:
            self._record(command, name, "invalid", str(error))

    def _record(self, command: CommandType, what: str, result: Result, reason: str) -> None:
        principal = self._peer.principal
        original_role = "" if principal is None else principal.original_role or ""
        self._audit.record(principal, self._peer.address, command.name, what, result, reason, original_role=original_role)

    async def require(self, command: CommandType, what: TopicName | NamespaceName, subscription: str | None = None) -> None:
        """Check a permission. Raises AuthorizationError, PermissionsOutOfDateError; MetadataError if permissions cannot be read."""
        if self._authorizer is None:
            return
        principal, need = self._peer.principal, COMMAND_NEEDS[command]
        if isinstance(what, TopicName):
            decision = await self._authorizer.check(principal, need, topic=what, subscription=subscription)
        else:
            decision = await self._authorizer.check(principal, need, namespace=what)
        self._settle(command, what, decision)

    def require_still(self, command: CommandType, topic: TopicName, subscription: str | None = None) -> None:
        """Check a permission from memory, without awaiting, right before an earlier checked request takes effect. Raises as
        `require`."""
        if (refused := self._refused_now(command, topic, subscription)) is not None:
            self._settle(command, topic, refused)

    def allows_now(self, command: CommandType, topic: TopicName) -> bool:
        """Return whether the command is known to be allowed; if not, use `require`."""
        return self._refused_now(command, topic, None) is None

    def may_create(self, command: CommandType, topic: TopicName) -> bool:
        """Return whether a missing topic may be created for the client, which has passed `require` for it.

        A grant on `x` covers the partitions of `x` that the topic's record defines. There are two thousand million other names of
        partitions: creating one of those as a plain topic needs a grant on the namespace.
        two thousand million: creating one of those as a plain topic needs a grant on the namespace.
        """
        if self._authorizer is None or not topic.is_partition:
            return True
        decision = self._authorizer.check_now(self._peer.principal, COMMAND_NEEDS[command], namespace=topic.namespace)
        return decision is not None and decision.allowed

    def why_not_any_more(self, command: CommandType, topic: TopicName, subscription: str | None = None) -> str | None:
        """Return why an open producer or consumer must be closed; None if it may stay open."""
        refused = self._refused_now(command, topic, subscription)
        return None if refused is None else refused.rule

    def visible(self, topics: list[TopicName], namespace: NamespaceName) -> list[TopicName]:
        """Return the topics that the client may see."""
        return topics if self._authorizer is None else self._authorizer.visible(self._peer.principal, topics, namespace)

    def knows(self, namespace: NamespaceName) -> bool:
        """Return whether `visible` has an answer: False while the permissions there cannot be read."""
        if self._authorizer is None:
            return True
        decision = self._authorizer.check_now(self._peer.principal, Need.NAMESPACE_READ, namespace=namespace)
        return decision is not None and not decision.temporary

    def _refused_now(self, command: CommandType, topic: TopicName, subscription: str | None) -> Decision | None:
        if self._authorizer is None:
            return None
        need = COMMAND_NEEDS[command]
        decision = self._authorizer.check_now(self._peer.principal, need, topic=topic, subscription=subscription)
        if decision is None:  # the permission is gone; the client is checked again when it reconnects
            return Decision(False, "the permissions have changed", temporary=True)
        return None if decision.allowed else decision

    def _settle(self, command: CommandType, what: TopicName | NamespaceName, decision: Decision) -> None:
        if not decision.allowed:
            self._record(command, str(what), "denied", decision.rule)
            raise refusal(decision, f"{_DONE_BY[COMMAND_NEEDS[command]]} {what}")
