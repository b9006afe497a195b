"""Producers: access modes, SENDs gathered into groups, receipts in order, deduplication. README.md has the rules."""

from cepheid_broker.publishing.deduplication import sequence_ids_of
from cepheid_broker.publishing.producer import Producer, ProducerFigures, ProducerState
from cepheid_broker.publishing.producer_access import AccessMode
from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR, TopicDeduplication, claim_of
from cepheid_broker.publishing.topic_producers import TopicProducers

__all__ = [
    "DEDUP_CURSOR",
    "AccessMode",
    "Producer",
    "ProducerFigures",
    "ProducerState",
    "TopicDeduplication",
    "TopicProducers",
    "claim_of",
    "sequence_ids_of",
]
