"""Lookups: partitions of a topic, the broker that serves it, topics of a namespace.

Errors are sent in the reply of the same kind: C++ clients ignore a general ERROR here and wait until their timeout (protocol.md
§5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from google.protobuf.message import Message

from cepheid_broker.errors import NamespaceNotFoundError, NotAllowedError
from cepheid_broker.ownership import KEEPS_CONNECTION, Here, There
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.access import Access
from cepheid_broker.protocol.advertised import check_listener, service_urls
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.settings import FRAME_PADDING_BYTES
from cepheid_broker.topics import TopicPattern, topics_hash
from cepheid_ports import CepheidError
from cepheid_wire import NON_PERSISTENT, PERSISTENT, CommandType, NamespaceName, ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb

_DOMAINS: Mapping[int, tuple[str, ...]] = {
    pb.CommandGetTopicsOfNamespace.PERSISTENT: (PERSISTENT,),
    pb.CommandGetTopicsOfNamespace.NON_PERSISTENT: (NON_PERSISTENT,),
    pb.CommandGetTopicsOfNamespace.ALL: (PERSISTENT, NON_PERSISTENT),
}


class LookupCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests, access: Access) -> None:
        self._access = access
        self._peer = peer
        self._services = services
        self._requests = requests
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.PARTITIONED_METADATA: self._on_partitioned_metadata,
            CommandType.LOOKUP: self._on_lookup,
            CommandType.GET_TOPICS_OF_NAMESPACE: self._on_get_topics,
        }

    def _on_partitioned_metadata(self, ask: pb.CommandPartitionedTopicMetadata) -> None:
        self._requests.start(self._answer_partitions(ask), name="partitions")

    async def _answer_partitions(self, ask: pb.CommandPartitionedTopicMetadata) -> None:
        answer = pb.CommandPartitionedTopicMetadataResponse(request_id=ask.request_id)
        try:
            topic = self._access.topic_named(CommandType.PARTITIONED_METADATA, ask.topic)
            await self._access.require(CommandType.PARTITIONED_METADATA, topic)
            # An absent field means yes: only newer clients can ask without creating (protocol.md §7.1).
            may_create = ask.metadata_auto_creation_enabled and self._access.may_create(CommandType.PARTITIONED_METADATA, topic)
            answer.partitions = await self._services.catalog.partitions_or_create(topic, may_create=may_create)
            answer.response = pb.CommandPartitionedTopicMetadataResponse.Success
        except Exception as error:  # answer every request, even after an internal error
            answer.response = pb.CommandPartitionedTopicMetadataResponse.Failed
            code = server_error_of(error)
            answer.error = cast(Any, int(code))
            answer.message = error_text(error)
            if code is ServerError.SERVICE_NOT_READY:
                answer.message += f" ({KEEPS_CONNECTION})"
        self._peer.send(answer)

    def _on_lookup(self, ask: pb.CommandLookupTopic) -> None:
        answer = pb.CommandLookupTopicResponse(request_id=ask.request_id)
        try:
            topic = self._access.topic_named(CommandType.LOOKUP, ask.topic)
            check_listener(ask.advertised_listener_name)
        except CepheidError as error:
            self._fail_lookup(answer, error)
        else:
            # Usually answered at once: a reconnecting client asks for each of its topics.
            if self._services.ownership.owns(topic) and self._access.allows_now(CommandType.LOOKUP, topic):
                self._connect_here(answer)
            else:
                self._requests.start(self._answer_lookup(topic, answer, authoritative=ask.authoritative), name="lookup")

    async def _answer_lookup(self, topic: TopicName, answer: pb.CommandLookupTopicResponse, *, authoritative: bool) -> None:
        try:
            await self._access.require(CommandType.LOOKUP, topic)
            location = await self._services.ownership.locate(topic, authoritative=authoritative)
        except Exception as error:  # answer every request, even after an internal error
            self._fail_lookup(answer, error)
            return
        match location:
            case Here():
                self._connect_here(answer)
            case There(addresses=addresses, chosen=chosen):
                answer.response = pb.CommandLookupTopicResponse.Redirect
                self._set_urls(answer, {scheme: f"{scheme}://{address}" for scheme, address in addresses.items()})
                answer.authoritative = chosen  # whether that broker may take an unowned bundle
                self._peer.send(answer)

    def _connect_here(self, answer: pb.CommandLookupTopicResponse) -> None:
        answer.response = pb.CommandLookupTopicResponse.Connect
        self._set_urls(answer, self.service_urls())
        answer.authoritative = True
        self._peer.send(answer)

    def _fail_lookup(self, answer: pb.CommandLookupTopicResponse, error: BaseException) -> None:
        answer.response = pb.CommandLookupTopicResponse.Failed
        answer.error = cast(Any, int(server_error_of(error)))
        answer.message = error_text(error)
        self._peer.send(answer)

    @staticmethod
    def _set_urls(answer: pb.CommandLookupTopicResponse, urls: Mapping[str, str]) -> None:
        """Set the URLs; a client uses the one of its own connection's scheme."""
        if (plain := urls.get("pulsar")) is not None:
            answer.brokerServiceUrl = plain
        if (over_tls := urls.get("pulsar+ssl")) is not None:
            answer.brokerServiceUrlTls = over_tls

    def service_urls(self) -> dict[str, str]:
        """Return this broker's URLs by scheme, for the ports that are open."""
        services = self._services
        return service_urls(services.settings, services.listening_port(), services.tls_port(), self._peer.reached_host)

    def _on_get_topics(self, ask: pb.CommandGetTopicsOfNamespace) -> None:
        self._requests.start(self._answer_topics(ask), name="topics-of-namespace")

    async def _answer_topics(self, ask: pb.CommandGetTopicsOfNamespace) -> None:
        answer = pb.CommandGetTopicsOfNamespaceResponse(request_id=ask.request_id, filtered=False, changed=True)
        try:
            pattern = TopicPattern(ask.topics_pattern) if ask.topics_pattern else None
            namespace = self._access.namespace_named(CommandType.GET_TOPICS_OF_NAMESPACE, ask.namespace)
            await self._access.require(CommandType.GET_TOPICS_OF_NAMESPACE, namespace)
            for domain in _DOMAINS[ask.mode]:
                found = self._access.visible(await self._topics_of(namespace, domain), namespace)
                if pattern is not None:
                    found = [topic for topic in found if pattern.matches(topic)]
                    answer.filtered = True
                answer.topics.extend(sorted(map(str, found)))
            answer.topics_hash = topics_hash(answer.topics)
            if ask.topics_hash == answer.topics_hash:
                answer.changed = False
                del answer.topics[:]
            check_frame(answer, ask.namespace, self._services.settings.max_frame_bytes)
        except Exception as error:  # answer every request, even after an internal error
            self._peer.send_error(ask.request_id, server_error_of(error), error_text(error))
        else:
            self._peer.send(answer)

    async def _topics_of(self, namespace: NamespaceName, domain: str) -> list[TopicName]:
        """Return the topics of a namespace, none if it does not exist: a pattern subscription may be created before it, and an
        error would end it (protocol.md §21)."""
        try:
            return await self._services.catalog.shown_topics_of(namespace, domain)
        except NamespaceNotFoundError:
            return []


def check_frame(answer: Message, namespace: str, limit_bytes: int) -> None:
    """Raise NotAllowedError if the answer exceeds a frame: Java and Go clients would reconnect and ask again endlessly
    (protocol.md §1.3)."""
    if (size_bytes := answer.ByteSize()) > limit_bytes - FRAME_PADDING_BYTES:
        text = f"the list of topics of namespace {namespace} has {size_bytes} bytes, a frame has {limit_bytes}"
        raise NotAllowedError(f"{text}: ask with a pattern, or raise the broker's setting max_message_bytes", namespace=namespace)
