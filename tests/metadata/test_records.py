"""Records: what is encoded comes back, what cannot be a record is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cepheid_metadata import (
    TOPIC_POLICIES,
    AutoTopicCreation,
    BadVersionError,
    BookieCookie,
    BookieLife,
    BookieRegistration,
    BookieReport,
    BrokerRegistration,
    BundleHistory,
    BundleOwner,
    Chain,
    ChainLedger,
    ClusterIdentity,
    ClusterRecord,
    CorruptRecordError,
    CursorRecord,
    DecommissionedBookie,
    DelayedDeliveryPolicy,
    Fragment,
    InactiveTopicsPolicy,
    KeyExistsError,
    LedgerIdCounter,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    NamespaceRecord,
    NewerFormatError,
    OffloadedLedger,
    OffloadPolicy,
    PersistencePolicy,
    Position,
    QuotaPolicy,
    Record,
    RestoredMetadata,
    RetentionPolicy,
    Revocation,
    RevocationList,
    TenantRecord,
    TopicChanges,
    TopicRecord,
    broker_records,
    chain_records,
    cluster_identity,
    cursor_records,
    keys,
    ledger_records,
)
from cepheid_metadata.policy_records import OTHER_QUOTA_LIMITS
from cepheid_wire import TopicName

LEDGER = LedgerMetadata(
    ledger_id=17,
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    state=LedgerState.OPEN,
    fragments=(Fragment(first_entry_id=0, ensemble=("a", "b", "c")), Fragment(first_entry_id=10, ensemble=("a", "d", "c"))),
    password=b"\x00\xff",
    creation_token=2**63 - 1,
    created_at_ms=1_700_000_000_000,
    custom={"topic": "persistent://t/n/ö"},
)
CHAIN = Chain(
    incarnation="c0ffee",
    epoch=3,
    ledgers=(ChainLedger(ledger_id=5, entries=3, size_bytes=40, closed_at_ms=9), ChainLedger(ledger_id=8)),
    deletions=(2, 3),
    properties={"k": "v"},
)
UPLOADED = OffloadedLedger(url="s3://b/5.parquet", started_at_ms=9, complete=True, completed_at_ms=10, object_bytes=20)
CURSOR = CursorRecord(
    chain_incarnation="c0ffee",
    chain_epoch=3,
    mark_delete=Position(5, -1),
    state=bytes(range(256)),
    properties={"seq": -1},
    created_at_ms=1,
)
EVERY_POLICY: dict[str, Any] = {
    "retention": RetentionPolicy(time_limit_min=10, size_limit_mb=-1),
    "persistence": PersistencePolicy(ensemble_size=2, write_quorum=2, ack_quorum=1),
    "message_ttl_s": 60,
    "size_quota": QuotaPolicy(limit=1 << 30, action="producer_exception"),
    "age_quota": QuotaPolicy(limit=-1, action="consumer_backlog_eviction"),
    "deduplication": True,
    "dedup_snapshot_s": 30,
    "max_unacked_per_consumer": 0,
    "max_unacked_per_subscription": 7,
    "max_producers": 1,
    "max_consumers": 2,
    "max_consumers_per_subscription": 3,
    "max_subscriptions": 4,
    "subscription_types": ("Key_Shared",),
    "auto_subscription_creation": False,
    "delayed_delivery": DelayedDeliveryPolicy(active=True),
    "schema_compatibility": "FORWARD",
    "schema_validation_enforced": True,
    "inactive_topics": InactiveTopicsPolicy(active=True, when="delete_when_no_subscriptions", after_s=60),
    "offload": OffloadPolicy(url="s3://bucket/prefix", after_bytes=1 << 30, after_s=-1, keep_s=3600, read_from="objects"),
}
RECORDS: list[Record] = [
    LEDGER,
    LEDGER.replace(state=LedgerState.CLOSED, last_entry_id=9, length_bytes=1_000),
    LedgerIdCounter(next_ledger_id=1_001),
    LedgerIdCounter(next_ledger_id=1_001, restored=True),
    CHAIN,
    CHAIN.replace(terminated_at=Position(8, -1)),
    CHAIN.replace(offloaded={5: UPLOADED.replace(on_bookies=False)}, object_deletions=("file:///o/4.parquet",)),
    CURSOR,
    CURSOR.replace(state=None, cursor_ledger_id=12),
    TopicRecord(partitions=4, created_at_ms=1),
    TenantRecord(admin_roles=("r",), allowed_clusters=("standalone",)),
    NamespaceRecord(
        retention=RetentionPolicy(time_limit_min=-1, size_limit_mb=0),
        persistence=PersistencePolicy(ensemble_size=3, write_quorum=3, ack_quorum=2),
        auto_topic_creation=AutoTopicCreation(allowed=True, topic_type="partitioned", partitions=3),
    ),
    NamespaceRecord(**EVERY_POLICY, schema_auto_update=False, encryption_required=True, max_topics=9),
    TopicRecord(**EVERY_POLICY, max_message_bytes=1000, created_at_ms=1),
    TopicRecord(**EVERY_POLICY, size_quota_time_s=60, age_quota_size_bytes=1 << 20, created_at_ms=1),
    ClusterRecord(service_url="http://localhost:8080"),
    ClusterIdentity(cluster_id="id", name="standalone", created_at_ms=1),
    BookieCookie(layout_version=1, bookie_id="b", incarnation="i", cluster_id="c", directories={"journal": ("/j",)}),
    BookieCookie(layout_version=2, bookie_id="b", incarnation="i", cluster_id="c", directories={}, limbo_below=1001),
    BookieLife(life=7),
    DecommissionedBookie(bookie_id="b", incarnation="i", at_ms=1),
    BookieRegistration(bookie_id="b", incarnation="i", addresses={"grpc": "localhost:3181"}),
    BookieRegistration(bookie_id="b", incarnation="i", addresses={"grpc": "localhost:3181"}, process="p", rack="east"),
    BookieRegistration(bookie_id="b", incarnation="i", addresses={}, free_bytes=1, total_bytes=2),
    BrokerRegistration(broker_id="b", addresses={"pulsar": "localhost:6650"}, started_at_ms=1),
    BundleOwner(broker_id="b", incarnation="i", epoch=3, addresses={"pulsar": "localhost:6650"}),
    BundleHistory(epoch=3, preferred="b"),
    TopicChanges(broker_id="b", at_ms=1),
    RestoredMetadata(backup_sha256="0a", backup_created_at_ms=1, restored_at_ms=2),
    RevocationList(
        entries=(
            Revocation(kind="digest", value="0a", until_ms=9, revoked_at_ms=1),
            Revocation(kind="role", value="app", issued_up_to_ms=5, revoked_at_ms=2, reason="lost"),
        )
    ),
    BookieReport(bookie_id="b", incarnation="i", largest_ledger_id=-1, ledgers=0, reported_at_ms=3),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.NAME)
def test_a_record_comes_back(record: Record) -> None:
    value = record.encode()
    assert type(record).decode(value, "/k") == record
    assert json.loads(value)["format"] == record.format <= record.FORMAT


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.NAME)
def test_a_newer_format_is_refused_by_name(record: Record) -> None:
    newer = record.FORMAT + 1
    same_fields = {**json.loads(record.encode()), "format": newer}
    for fields in (same_fields, {"format": newer, "shape": "unheard of"}):
        with pytest.raises(
            NewerFormatError,
            match=f"/k holds a {record.NAME} record of format {newer}; this release knows formats up to {record.FORMAT}",
        ):
            type(record).decode(json.dumps(fields).encode(), "/k")


FORMAT_1: list[tuple[Record, bytes]] = [
    (
        NamespaceRecord(
            replication_clusters=("standalone",),
            retention=RetentionPolicy(time_limit_min=-1, size_limit_mb=10),
            persistence=PersistencePolicy(ensemble_size=3, write_quorum=3, ack_quorum=2),
            auto_topic_creation=AutoTopicCreation(allowed=True, topic_type="partitioned", partitions=3),
            properties={"k": "v"},
        ),
        b'{"format":1,"bundles":4,"replication_clusters":["standalone"],"retention":{"time_limit_min":-1,"size_limit_mb":10},'
        b'"persistence":{"ensemble_size":3,"write_quorum":3,"ack_quorum":2,"max_mark_delete_rate_per_s":0.0},'
        b'"auto_topic_creation":{"allowed":true,"topic_type":"partitioned","partitions":3},"properties":{"k":"v"},"deleted":false}',
    ),
    (
        TopicRecord(partitions=4, properties={"k": "v"}, created_at_ms=17),
        b'{"format":1,"partitions":4,"properties":{"k":"v"},"created_at_ms":17}',
    ),
]
"""What the release before topic policies wrote: golden, never to be edited."""


@pytest.mark.parametrize(("record", "value"), FORMAT_1, ids=["namespace", "topic"])
def test_records_of_the_first_format_are_read_and_written_as_long_as_they_can_say_it(record: Record, value: bytes) -> None:
    assert type(record).decode(value, "/k") == record
    assert json.loads(record.encode()) == json.loads(value)
    changed = type(record).decode(value, "/k").replace(message_ttl_s=60)
    assert json.loads(changed.encode())["format"] == 2
    assert type(record).decode(changed.encode(), "/k") == changed
    assert json.loads(changed.replace(message_ttl_s=None).encode()) == json.loads(value)


@pytest.mark.parametrize("field", OTHER_QUOTA_LIMITS)
def test_only_a_quota_with_both_limits_needs_the_newest_format_of_its_record(field: str) -> None:
    for record in (NamespaceRecord(**EVERY_POLICY), TopicRecord(**EVERY_POLICY, created_at_ms=1)):
        before = json.loads(record.encode())
        assert before["format"] < record.FORMAT
        assert not set(OTHER_QUOTA_LIMITS) & set(before)
        changed = record.replace(**{field: 5})
        assert json.loads(changed.encode())["format"] == record.FORMAT
        assert type(record).decode(changed.encode(), "/k") == changed
        assert json.loads(changed.replace(**{field: None}).encode()) == before


def test_the_first_format_has_no_fields_of_the_second() -> None:
    for field in (b'"message_ttl_s":60', b'"message_ttl_s":null'):
        with pytest.raises(CorruptRecordError, match="format 1 has no field message_ttl_s"):
            TopicRecord.decode(b'{"format":1,"created_at_ms":17,%s}' % field, "/k")


def test_every_policy_of_a_topic_is_in_these_tests() -> None:
    assert tuple(EVERY_POLICY) == TOPIC_POLICIES


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"format": 1, "unknown": 1}', b'{"format": "x"}', b"1" * 5_000]
)
@pytest.mark.parametrize("record_type", [LedgerMetadata, Chain, CursorRecord, TopicRecord])
def test_garbage_is_refused_with_its_key(value: bytes, record_type: type[Record]) -> None:
    with pytest.raises(CorruptRecordError, match=f"/the/key does not hold a valid {record_type.NAME} record") as caught:
        record_type.decode(value, "/the/key")
    assert caught.value.facts["key"] == "/the/key"


@given(st.data())
def test_a_cut_or_changed_record_is_never_an_unexpected_exception(data: st.DataObject) -> None:
    value = bytearray(data.draw(st.sampled_from(RECORDS)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    del value[data.draw(st.integers(0, len(value))) :]
    for record_type in {type(record): None for record in RECORDS}:
        found = decoded_or_refused(record_type, bytes(value))
        if isinstance(found, Record):
            assert type(found) is record_type
            assert record_type.decode(found.encode(), "/k") == found, "what is accepted can be written and read again"
        else:
            assert found.facts["key"] == "/k"
            assert str(found).startswith("/k ")


def decoded_or_refused(record_type: type[Record], value: bytes) -> Record | CorruptRecordError | NewerFormatError:
    try:
        return record_type.decode(value, "/k")
    except (CorruptRecordError, NewerFormatError) as error:
        return error


BOOKIES = st.lists(st.text(min_size=1, max_size=8), min_size=3, max_size=3, unique=True)


@given(
    st.lists(BOOKIES, min_size=1, max_size=5), st.lists(st.integers(1, 10**6), max_size=4, unique=True), st.binary(), st.booleans()
)
def test_ledger_metadata_comes_back(ensembles: list[list[str]], firsts: list[int], password: bytes, closed: bool) -> None:
    starts = [0, *sorted(firsts)][: len(ensembles)]
    fragments = tuple(
        Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in zip(starts, ensembles, strict=False)
    )
    record = LEDGER.replace(fragments=fragments, password=password)
    if closed:
        record = record.replace(state=LedgerState.CLOSED, last_entry_id=starts[-1] - 1, length_bytes=0)
    assert LedgerMetadata.decode(record.encode(), "/k") == record
    for first, after in zip(starts, [*starts[1:], starts[-1] + 100], strict=True):
        assert record.fragment_of(first).first_entry_id == first
        assert record.fragment_of(after - 1).first_entry_id == first
    assert record.last_fragment.first_entry_id == starts[-1]


POSITIONS = st.builds(Position, st.integers(0, 2**63 - 1), st.integers(-1, 2**62))
STRINGS = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@given(
    POSITIONS,
    st.none() | st.binary(max_size=500),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
    STRINGS,
)
def test_a_cursor_comes_back(mark_delete: Position, state: bytes | None, numbers: dict[str, int], strings: dict[str, str]) -> None:
    record = CURSOR.replace(mark_delete=mark_delete, state=state, properties=numbers, subscription_properties=strings)
    found = CursorRecord.decode(record.encode(), "/k")
    assert found == record
    assert isinstance(found.mark_delete, Position)


@pytest.mark.parametrize(
    ("record", "changes", "problem"),
    [
        (LEDGER, {"ack_quorum": 4}, "E >= Qw >= Qa"),
        (LEDGER, {"ack_quorum": 0}, "E >= Qw >= Qa"),
        (LEDGER, {"ensemble_size": 2, "write_quorum": 2}, "2 distinct bookies"),
        (LEDGER, {"fragments": ()}, "does not start at entry 0"),
        (LEDGER, {"fragments": LEDGER.fragments[1:]}, "does not start at entry 0"),
        (LEDGER, {"fragments": (*LEDGER.fragments, LEDGER.fragments[1])}, "strictly increasing"),
        (LEDGER, {"fragments": (Fragment(first_entry_id=0, ensemble=("a", "b", "a")),)}, "3 distinct bookies"),
        (LEDGER, {"last_entry_id": 3}, "state OPEN has no last entry"),
        (LEDGER, {"state": LedgerState.IN_RECOVERY, "length_bytes": 3}, "state IN_RECOVERY has no last entry"),
        (LEDGER, {"state": LedgerState.CLOSED}, "needs its last entry id and length"),
        (LEDGER, {"state": LedgerState.CLOSED, "last_entry_id": 8, "length_bytes": 1}, "starts after the last entry, 8"),
        (CHAIN, {"ledgers": (ChainLedger(ledger_id=5), ChainLedger(ledger_id=8))}, "before the last has no recorded end"),
        (CHAIN, {"ledgers": (CHAIN.ledgers[0], CHAIN.ledgers[0])}, "twice"),
        (CHAIN, {"deletions": (5,)}, "twice"),
        (CHAIN, {"deletions": (2, 2)}, "twice"),
        (CHAIN, {"deletions": (5,), "offloaded": {5: UPLOADED}}, "twice"),
        (CHAIN.replace(offloaded={5: UPLOADED}), {"offloaded": {7: UPLOADED}}, "ledger 7 is offloaded and not in the chain"),
        (CURSOR, {"cursor_ledger_id": 3}, "not both"),
    ],
)
def test_impossible_records_cannot_be_made_or_read(record: Record, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        record.replace(**changes)
    fields = record.model_copy(update=changes).encode()
    with pytest.raises(CorruptRecordError, match=problem):
        type(record).decode(fields, "/k")


def test_a_ledger_leaves_the_bookies_only_when_its_upload_is_complete() -> None:
    with pytest.raises(ValidationError, match="is kept on the bookies"):
        UPLOADED.replace(complete=False, on_bookies=False)
    waiting = CHAIN.replace(offloaded={5: UPLOADED.replace(on_bookies=False)}, deletions=(5,))
    assert waiting.offload_of(5) is not None
    assert not waiting.is_on_bookies(5)


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CHAIN.epoch = 4  # type: ignore[misc]


async def test_repositories_read_and_change_records_by_version() -> None:
    store = MemoryStore(MemoryTree())
    topic = TopicName.parse("persistent://t/n/x")
    chains, cursors, ledgers = chain_records(store), cursor_records(store), ledger_records(store)
    assert await chains.get(topic) is None
    assert await chains.create(topic, CHAIN) == 0
    with pytest.raises(KeyExistsError):
        await chains.create(topic, CHAIN)
    changed = CHAIN.replace(epoch=4)
    assert await chains.replace(topic, changed, 0) == 1
    with pytest.raises(BadVersionError):
        await chains.replace(topic, CHAIN, 0)
    assert await chains.get(topic) == (changed, 1)
    await cursors.create((topic, "s"), CURSOR)
    await store.multi(
        [
            chains.replace_op(topic, CHAIN, 1),
            cursors.delete_op((topic, "s"), 0),
            ledgers.create_op(17, LEDGER),
        ]
    )
    assert await chains.get(topic) == (CHAIN, 2)
    assert not await cursors.exists((topic, "s"))
    assert await ledgers.get(17) == (LEDGER, 0)
    await ledgers.delete(17, 0)
    assert await ledgers.get(17) is None
    await store.create(keys.CLUSTER_KEY, b"garbage")
    with pytest.raises(CorruptRecordError, match="/cluster does not hold a valid cluster identity record"):
        await cluster_identity(store).get(None)


async def test_ephemeral_records_go_with_their_session() -> None:
    tree = MemoryTree()
    store, observer = MemoryStore(tree), MemoryStore(tree)
    registration = BrokerRegistration(broker_id="b", addresses={}, started_at_ms=1)
    await broker_records(store).create("b", registration, ephemeral=True)
    assert await broker_records(observer).get("b") == (registration, 0)
    await store.aclose()
    assert await observer.children("/brokers") == []
