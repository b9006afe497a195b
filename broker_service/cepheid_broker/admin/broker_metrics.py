"""Metrics of the broker and the layers below it: topics, tail cache, ledger client.

Topics are summed by namespace: with a label per topic, each name would have ten thousand series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cepheid_broker.topics import PersistentTopic
from cepheid_ports.prometheus import Family, Sample, counter, gauge

if TYPE_CHECKING:
    from cepheid_broker.broker import Broker
    from cepheid_broker.broker_segments import SegmentStatistics
    from cepheid_ledger import BookieStates, ChannelStatistics, EnsembleChangeStatistics
    from cepheid_managed_ledger import TailCacheStatistics, UnderReplicatedFigures
    from cepheid_security.audit import AuditFigures
    from cepheid_security.connection_limits import PortStatistics


def broker_families(broker: Broker) -> Iterator[Family]:
    figures = broker.statistics()
    yield gauge("cepheid_broker_connections", "Open client connections.", figures.connections)
    yield counter("cepheid_broker_connections_accepted_total", "Connections accepted.", figures.connections_accepted)
    yield counter(
        "cepheid_broker_connections_refused_total", "Connections refused: too many at one time.", figures.connections_refused
    )
    yield gauge(
        "cepheid_broker_connections_unauthenticated",
        "Connections in the TLS handshake, or whose CONNECT was not answered yet.",
        figures.connections_unauthenticated,
    )
    yield counter("cepheid_broker_tls_handshakes_failed_total", "TLS handshakes of clients that failed.", figures.handshakes_failed)
    yield counter(
        "cepheid_broker_authentications_failed_total",
        "Connections and admin calls refused because of their credentials.",
        figures.authentications_failed,
    )
    yield gauge("cepheid_broker_topics", "Open topics.", figures.topics_open)
    yield counter("cepheid_broker_topic_failures_total", "Topics that failed and were opened again.", figures.topic_failures)
    for way, traffic in (("published", figures.published), ("delivered", figures.delivered)):
        yield counter(f"cepheid_broker_{way}_entries_total", f"Entries {way}.", traffic.entries)
        yield counter(f"cepheid_broker_{way}_messages_total", f"Messages {way}.", traffic.messages)
        yield counter(f"cepheid_broker_{way}_bytes_total", f"Bytes of entries {way}.", traffic.size_bytes)
    yield counter(
        "cepheid_broker_repeated_entries_total", "Entries sent again that deduplication did not store.", figures.repeated_entries
    )
    yield gauge("cepheid_broker_publish_buffer_bytes", "Bytes published and not yet answered.", figures.publish_buffer_bytes)
    yield counter(
        "cepheid_broker_publish_pauses_total",
        "Times that reading from producers stopped as the publish buffer was full.",
        figures.publish_pauses,
    )
    yield gauge("cepheid_broker_read_ahead_bytes", "Bytes read for consumers and not yet sent.", figures.read_ahead_bytes)
    yield counter(
        "cepheid_broker_catch_up_paused_seconds_total",
        "Pauses of subscriptions that catch up while clients publish.",
        figures.catch_up_paused_s,
    )
    yield gauge(
        "cepheid_broker_subscriptions_unreadable",
        "Subscriptions that wait for an entry that has no valid copy on any bookie.",
        figures.subscriptions_unreadable,
    )
    authorizer = broker.authorizer
    yield counter(
        "cepheid_broker_authorization_denied_total",
        "Requests denied for lack of permission.",
        0 if authorizer is None else authorizer.denied,
    )
    yield gauge(
        "cepheid_broker_permissions_out_of_date",
        "Tenants and namespaces whose permissions could not be read for too long, so that clients are denied.",
        0 if authorizer is None else authorizer.out_of_date,
    )
    yield gauge("cepheid_broker_policy_watches", "Records watched for the policies of open topics.", broker.policies.watches)
    yield counter("cepheid_broker_schemas_registered_total", "Versions of schemas added.", broker.schemas.registered)
    yield counter(
        "cepheid_broker_schemas_refused_total",
        "Malformed or incompatible schemas, and clients refused for having none.",
        broker.schemas.refused,
    )
    yield gauge("cepheid_broker_leases", "Leases: expiring subscriptions that retain what Spark reads.", broker.leases.leases)
    yield counter("cepheid_broker_leases_expired_total", "Spark leases dropped after they expired.", broker.leases.expired)
    yield gauge("cepheid_broker_requests_running", "Requests and other tasks in progress.", figures.requests_running)


def ownership_families(broker: Broker) -> Iterator[Family]:
    """Yield the metrics of a broker that shares topics with others."""
    if (figures := broker.ownership.statistics()) is None:
        return
    yield gauge("cepheid_broker_brokers_known", "Registered brokers, including this one.", figures.brokers)
    yield gauge("cepheid_broker_bundles_owned", "Bundles whose topics this broker serves.", figures.bundles_owned)
    yield counter("cepheid_broker_bundles_acquired_total", "Bundles that this broker acquired.", figures.bundles_acquired)
    yield counter(
        "cepheid_broker_bundles_lost_total",
        "Bundles lost without a release, to an expired session or another broker.",
        figures.bundles_lost,
    )
    yield counter("cepheid_broker_bundles_released_total", "Bundles that this broker released in order.", figures.bundles_released)
    yield counter("cepheid_broker_sessions_lost_total", "Sessions with the metadata store that expired.", figures.sessions_lost)
    yield counter(
        "cepheid_broker_topics_moved_total",
        "Open topics that this broker handed over to others, with their clients.",
        figures.topics_moved,
    )
    yield counter(
        "cepheid_broker_hand_overs_failed_total",
        "Hand-overs of bundles that failed, so that the topics left were closed.",
        figures.hand_overs_failed,
    )
    yield gauge(
        "cepheid_broker_lookups_waiting",
        "Lookups now waiting for a reachable owner of their bundle.",
        figures.lookups_waiting,
    )
    yield counter("cepheid_broker_lookups_waited_total", "Lookups that waited for an owner.", figures.lookups_waited)
    yield gauge("cepheid_broker_peers_heard", "Other brokers that answer this one's PINGs.", figures.peers_heard)
    yield counter(
        "cepheid_broker_peers_challenged_total",
        "Challenges sent to brokers that did not answer PINGs.",
        figures.peers_challenged,
    )
    yield counter("cepheid_broker_peers_gone_total", "Challenges that other brokers did not answer.", figures.peers_gone)
    yield counter("cepheid_broker_peer_calls_total", "Admin calls made to other brokers.", broker.peers.made)
    yield counter("cepheid_broker_peer_calls_failed_total", "Admin calls to other brokers that failed.", broker.peers.failed)
    if (balancer := broker.balancer) is not None:
        yield gauge("cepheid_broker_balance_leader", "1: this broker balances the load of the cluster.", balancer.is_leader)
        yield counter("cepheid_broker_balance_moves_total", "Bundles that this broker had moved as the leader.", balancer.moves)
        yield counter("cepheid_broker_balance_splits_total", "Bundles that this broker had split as the leader.", balancer.splits)
        yield counter(
            "cepheid_broker_balance_refused_total",
            "Moves and splits that this broker ordered as the leader and that were not carried out.",
            balancer.refused,
        )


def admin_server_families(server: PortStatistics) -> Iterator[Family]:
    yield gauge("cepheid_broker_admin_connections", "Open connections to the admin port.", server.connections)
    yield counter(
        "cepheid_broker_admin_connections_limited_total",
        "Connections to the admin port above a limit: only probes were answered.",
        server.limited,
    )
    yield counter(
        "cepheid_broker_admin_timeouts_total",
        "Requests to the admin port that arrived too slowly, and answers that were not read.",
        server.timed_out,
    )


def audit_families(audit: AuditFigures) -> Iterator[Family]:
    yield counter("cepheid_broker_audit_lines_total", "Lines written to the audit log.", audit.written)
    yield counter(
        "cepheid_broker_audit_lines_lost_total",
        "Lines of the audit log that could not be written: the disk failed, or too many waited.",
        audit.lost,
    )
    yield counter(
        "cepheid_broker_audit_lines_suppressed_total",
        "Denials and failures that the audit log only counts, because one address caused too many.",
        audit.suppressed,
    )
    yield gauge("cepheid_broker_audit_waiting_lines", "Lines of the audit log that wait to be written.", audit.waiting)


def tail_cache_families(cache: TailCacheStatistics) -> Iterator[Family]:
    yield gauge("cepheid_broker_tail_cache_bytes", "Bytes of recent entries in memory.", cache.used_bytes)
    yield gauge("cepheid_broker_tail_cache_limit_bytes", "Configured limit of the tail cache in bytes.", cache.limit_bytes)
    yield gauge("cepheid_broker_tail_cache_groups", "Groups of entries in the tail cache.", cache.groups)
    yield counter("cepheid_broker_tail_cache_hits_total", "Reads answered from the tail cache.", cache.hits)
    yield counter("cepheid_broker_tail_cache_misses_total", "Reads that the tail cache could not answer.", cache.misses)
    yield Family(
        "cepheid_broker_tail_cache_evicted_groups_total",
        "counter",
        "Groups evicted from the tail cache, by reason: size or age.",
        (Sample(cache.evicted_by_size, {"reason": "size"}), Sample(cache.evicted_by_age, {"reason": "age"})),
    )


def segment_families(segments: SegmentStatistics) -> Iterator[Family]:
    """Object stores as this process uses them."""
    yield counter("cepheid_offload_ledgers_total", "Ledgers uploaded to object stores.", segments.uploads)
    yield counter("cepheid_offload_bytes_total", "Bytes of entries uploaded to object stores.", segments.uploaded_bytes)
    yield counter("cepheid_offload_object_bytes_total", "Bytes of the objects that were uploaded.", segments.object_bytes)
    yield Family(
        "cepheid_offload_failures_total",
        "counter",
        "Requests to object stores that failed, by kind.",
        tuple(Sample(count, {"kind": kind}) for kind, count in segments.failures.items()),
    )
    yield counter("cepheid_offload_reads_total", "Reads that were answered from objects.", segments.reads)
    yield counter("cepheid_offload_read_bytes_total", "Bytes of entries read from objects.", segments.read_bytes)
    yield counter("cepheid_offload_deletions_total", "Objects deleted.", segments.deletions)
    yield gauge(
        "cepheid_offload_cache_bytes", "Bytes of entries in the cache of what was read from objects.", segments.cached_bytes
    )


def offload_families(broker: Broker) -> Iterator[Family]:
    """Topics whose ledgers are, or are to be, in object stores: the open ones as of now, closed ones as of the last pass."""
    found = [topic.ledger.offload_statistics() for topic in broker.topics.loaded() if isinstance(topic, PersistentTopic)]
    closed = broker.closed_topics.figures()
    oldest_ms = max((figures.oldest_due_age_ms or 0 for figures in found), default=0)
    oldest_ms = max(oldest_ms, closed.oldest_due_age_ms)
    yield gauge(
        "cepheid_offload_due_ledgers",
        "Ledgers that are due to be offloaded and are not.",
        sum(each.due_ledgers for each in found) + closed.due_ledgers,
    )
    yield gauge(
        "cepheid_offload_oldest_due_seconds",
        "Time since the oldest ledger ended that is due to be offloaded and is not.",
        oldest_ms / 1000,
    )
    yield gauge(
        "cepheid_offload_failing_topics",
        "Topics whose last attempt to offload failed.",
        sum(each.last_error is not None for each in found) + closed.failing,
    )
    yield gauge(
        "cepheid_offload_refused_ledgers",
        "Ledgers of open topics that cannot be offloaded, for a reason that does not pass by itself.",
        sum(each.refused_ledgers for each in found),
    )
    yield gauge(
        "cepheid_offload_not_held_ledgers",
        "Ledgers of open topics whose offload has failed for so long that retention no longer waits for them.",
        sum(each.not_held_ledgers for each in found),
    )
    yield gauge(
        "cepheid_offload_waiting_deletions",
        "Objects of removed ledgers that wait to be deleted.",
        sum(each.waiting_object_deletions for each in found),
    )


def closed_topic_families(broker: Broker) -> Iterator[Family]:
    """Yield metrics of topics that no client has open and that have ledgers to offload or trim, or expired messages."""
    figures = broker.closed_topics.figures()
    yield counter("cepheid_closed_topic_passes_total", "Passes over closed topics that were completed.", figures.passes)
    yield gauge("cepheid_closed_topics_waiting", "Closed topics with work due, as of the last pass.", figures.waiting)
    yield counter("cepheid_closed_topics_opened_total", "Closed topics that were opened for work that was due.", figures.opened)
    yield counter("cepheid_closed_topics_failed_total", "Closed topics whose work failed or was not finished.", figures.failed)


def ledger_client_families(channels: Mapping[str, ChannelStatistics]) -> Iterator[Family]:
    for bookie, channel in channels.items():
        yield gauge(
            "cepheid_ledger_channel_waiting_bytes",
            "Add bytes queued for a bookie or unanswered.",
            channel.waiting_bytes,
            bookie=bookie,
        )
        yield gauge("cepheid_ledger_channel_lanes", "Ledgers written to a bookie.", channel.lanes, bookie=bookie)
        yield counter(
            "cepheid_ledger_channel_requests_total", "Groups of entries sent to a bookie.", channel.requests_sent, bookie=bookie
        )
        yield counter(
            "cepheid_ledger_channel_streams_broken_total",
            "Times that the stream to a bookie broke.",
            channel.streams_broken,
            bookie=bookie,
        )
        yield counter(
            "cepheid_ledger_channel_lanes_failed_total", "Ledgers that gave up a bookie.", channel.lanes_failed, bookie=bookie
        )


def ensemble_change_families(changes: EnsembleChangeStatistics) -> Iterator[Family]:
    yield counter("cepheid_ledger_ensemble_changes_total", "Open ledgers whose failed bookies were replaced.", changes.changed)
    yield counter(
        "cepheid_ledger_ensemble_changes_put_off_total",
        "Ensemble changes retried for lack of a spare bookie or of metadata.",
        changes.refused,
    )
    yield gauge("cepheid_ledger_newcomer_kept_bytes", "Confirmed bytes that wait for new bookies of ensembles.", changes.kept_bytes)
    yield counter(
        "cepheid_ledger_newcomer_overflows_total",
        "New bookies of ensembles given up because too many bytes waited for them.",
        changes.kept_overflows,
    )


def bookie_state_families(bookies: BookieStates) -> Iterator[Family]:
    yield gauge("cepheid_bookies_known", "Bookies that should run: those with a cookie in metadata.", len(bookies.expected()))
    yield gauge("cepheid_bookies_registered", "Bookies that run, writable or not.", len(bookies.registered()))
    yield gauge("cepheid_bookies_writable", "Bookies that take new ledgers.", len(bookies.writable()))


def under_replicated_families(ledgers: UnderReplicatedFigures) -> Iterator[Family]:
    yield gauge(
        "cepheid_ledger_under_replicated",
        "Ledgers of open topics that lack a registered bookie in their ensemble.",
        ledgers.ledgers,
    )
    yield gauge(
        "cepheid_ledger_bookies_unknown",
        "Ledgers of open topics whose bookies were not looked up yet, while a bookie is not registered.",
        ledgers.not_looked_up,
    )
