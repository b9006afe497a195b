"""The key layout: any name fits, nothing collides, and listings are complete or fail."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_metadata import (
    BookieRegistration,
    CorruptRecordError,
    InvalidNameError,
    MemoryStore,
    MemoryTree,
    StoreUnavailableError,
    available_bookies,
    keys,
    largest_ledger_id,
    list_chains,
    list_cursors,
    list_ledgers,
    list_namespaces,
    list_tenants,
    list_topics,
    repositories,
)
from cepheid_metadata.ledger_views import bookie_views
from cepheid_metadata.store import check_key
from cepheid_wire import NamespaceName, TopicName

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
HOSTILE = [".", "..", "/", "a/b", "//", "%2F", "%", " ", "\n", "\x00", "ümläut", "日本", "a-partition-0", "~", "🦀", "zookeeper"]


@pytest.mark.page
def test_the_layout_names_every_key_and_no_other() -> None:
    roots = {value for name, value in vars(keys).items() if name.endswith("_KEY")}
    layout, _, _ = (keys.__doc__ or "").partition("Rules:")
    paths = [f"{path}/" for path in re.findall(r"(?<= )/\S+", layout)]
    assert [root for root in roots if not any(path.startswith(f"{root}/") for path in paths)] == []
    assert [path for path in paths if not any(path.startswith(f"{root}/") for root in roots)] == []


@given(NAMES)
def test_any_name_is_one_segment_and_comes_back(name: str) -> None:
    segment = keys.encode_name(name)
    assert "/" not in segment
    check_key(f"/x/{segment}")
    assert keys.decode_name(segment) == name


@given(NAMES, NAMES)
def test_different_names_have_different_segments(one: str, other: str) -> None:
    assert (keys.encode_name(one) == keys.encode_name(other)) is (one == other)


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_what_cannot_name_anything_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        keys.encode_name(name)


def topic_named(local_name: str, domain: str = "persistent") -> TopicName:
    return TopicName(domain, NamespaceName("t/1", "n"), local_name)


TOPIC = TopicName("persistent", NamespaceName("public", "default"), "orders/eu-partition-3")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # The bucket is part of the format: another hash would hide every topic.
        (keys.topic_key(TOPIC), "/topics/public/default/persistent/cc/orders%2Feu-partition-3"),
        (keys.chain_key(TOPIC), "/chains/public/default/persistent/cc/orders%2Feu-partition-3"),
        (keys.cursor_key(TOPIC, "sub 1"), "/cursors/public/default/persistent/cc/orders%2Feu-partition-3/sub%201"),
        (keys.schemas_key(TOPIC), "/schemas/public/default/87/orders%2Feu"),
        (keys.schema_part_key(TOPIC, "f00d", 1), "/schemas/public/default/87/orders%2Feu/f00d-1"),
        (keys.tenant_key("t"), "/tenants/t"),
        (keys.namespace_key("t", ".."), "/namespaces/t/%2E%2E"),
        (keys.cluster_key("standalone"), "/clusters/standalone"),
        (keys.ledger_key(0), "/ledgers/0000/0000/0000"),
        (keys.ledger_key(123456), "/ledgers/0000/0012/3456"),
        (keys.ledger_key(10**12 - 1), "/ledgers/9999/9999/9999"),
        (keys.ledger_key(10**12), "/ledgers/high/000/0001/0000/0000/0000"),
        (keys.ledger_key(2**63 - 1), "/ledgers/high/922/3372/0368/5477/5807"),
        (keys.bookie_cookie_key("b:1"), "/bookies/cookies/b%3A1"),
        (keys.bookie_life_key("b:1"), "/bookies/lives/b%3A1"),
        (keys.available_bookie_key("b"), "/bookies/available/b"),
        (keys.readonly_bookie_key("b"), "/bookies/readonly/b"),
        (keys.broker_key("b"), "/brokers/b"),
        (keys.bundle_key("t", "n", "0x00000000_0x40000000"), "/bundles/t/n/0x00000000_0x40000000"),
        (keys.restored_bookie_key("b:1"), "/restored/bookies/b%3A1"),
    ],
)
def test_the_layout(made: str, expected: str) -> None:
    assert made == expected


@pytest.mark.parametrize("ledger_id", [0, 123456, 10**12 - 1, 10**12, 2**63 - 1])
def test_the_key_of_a_ledger_tells_its_id_and_no_other_key_does(ledger_id: int) -> None:
    assert keys.ledger_id_of(keys.ledger_key(ledger_id)) == ledger_id
    for other in (keys.deleted_ledger_key(ledger_id), keys.LEDGER_IDS_KEY, keys.ledger_key(ledger_id).rpartition("/")[0]):
        assert keys.ledger_id_of(other) is None


def test_all_keys_of_running_processes_are_known_to_a_backup() -> None:
    nouns: dict[str, object] = {"auditor_record": None, "repair_locks": 7, "bundle_owners": ("t", "n", "0x0_0x1")}
    found = []
    for name, make in vars(repositories).items():
        if "Ephemeral." in (getattr(make, "__doc__", None) or "") and name != "Records":
            found.append(name)
            key = make(MemoryStore(MemoryTree())).key_of(nouns.get(name, "b"))
            assert any(key == root or key.startswith(f"{root}/") for root in keys.EPHEMERAL_KEYS), key
    assert len(found) >= len(keys.EPHEMERAL_KEYS)


def test_topics_of_one_namespace_spread_over_buckets() -> None:
    buckets = {keys.topic_key(topic_named(f"x-{n}")).split("/")[-2] for n in range(5_000)}
    assert len(buckets) == 256


async def test_listings_give_every_name_back() -> None:
    store = MemoryStore(MemoryTree())
    assert await list_tenants(store) == await list_topics(store, "t", "n", "persistent") == []
    topics = [topic_named(name) for name in HOSTILE]
    for topic in topics:
        await store.create(keys.topic_key(topic), b"")
        await store.create(keys.tenant_key(topic.local_name), b"")
        await store.create(keys.namespace_key("t/1", topic.local_name), b"")
        await store.create(keys.cursor_key(topics[0], topic.local_name), b"")
    await store.create(keys.topic_key(topic_named("other", "non-persistent")), b"")
    await store.create(keys.chain_key(topics[3]), b"")
    names = sorted(HOSTILE)
    assert await list_topics(store, "t/1", "n", "persistent") == [topic_named(name) for name in names]
    assert await list_chains(store, "t/1", "n", "persistent") == [topics[3]]
    assert await list_tenants(store) == names
    assert await list_namespaces(store, "t/1") == names
    assert await list_cursors(store, topics[0]) == names
    assert await list_cursors(store, topics[1]) == []


LEDGER_IDS = [0, 9, 10, 9_999, 10_000, 123_456_789, 10**12 - 1, 10**12, 10**12 + 10_000, 2**63 - 1]


async def test_ledgers_are_listed_in_numeric_order_and_nothing_else_is() -> None:
    store = MemoryStore(MemoryTree())
    assert [ledger_id async for ledger_id in list_ledgers(store)] == []
    assert await largest_ledger_id(store) is None
    await store.create(keys.LEDGER_IDS_KEY, b"")
    for count, ledger_id in enumerate(LEDGER_IDS, start=1):
        await store.create(keys.ledger_key(ledger_id), b"")
        assert [found async for found in list_ledgers(store)] == LEDGER_IDS[:count]
        for above in (ledger_id, ledger_id - 1, LEDGER_IDS[0]):
            rest = [found for found in LEDGER_IDS[:count] if found > above]
            assert [found async for found in list_ledgers(store, above=above)] == rest
        assert await largest_ledger_id(store) == ledger_id
    for ledger_id in reversed(LEDGER_IDS[1:]):  # parents stay behind, empty
        await store.delete(keys.ledger_key(ledger_id), None)
    assert await largest_ledger_id(store) == 0


async def test_a_foreign_key_among_ledgers_is_an_error() -> None:
    store = MemoryStore(MemoryTree())
    await store.create(keys.ledger_key(1), b"")
    await store.create("/ledgers/0000/stray/0001", b"")
    for walk in (largest_ledger_id(store), anext(list_ledgers(store))):
        with pytest.raises(CorruptRecordError, match="/ledgers/0000/stray is not part of a ledger id"):
            await walk


class UnreachableBelow(MemoryStore):
    """Answers above a key, and fails below it."""

    def __init__(self, tree: MemoryTree, fails: Callable[[str], bool]) -> None:
        super().__init__(tree)
        self._fails = fails

    async def children(self, key: str) -> list[str]:
        if self._fails(key):
            raise StoreUnavailableError(f"{key} cannot be read")
        return await super().children(key)


async def test_an_error_in_the_middle_is_never_a_short_list() -> None:
    tree = MemoryTree()
    writer = MemoryStore(tree)
    for n in range(100):
        await writer.create(keys.topic_key(topic_named(f"x{n}")), b"")
        await writer.create(keys.ledger_key(n * 5_000), b"")
    topics_fail = UnreachableBelow(tree, lambda key: key.startswith("/topics/t%2F1/n/persistent/4"))
    with pytest.raises(StoreUnavailableError):
        await list_topics(topics_fail, "t/1", "n", "persistent")
    ledgers_fail = UnreachableBelow(tree, lambda key: key == "/ledgers/0000/0020")
    walk = list_ledgers(ledgers_fail)
    assert [await anext(walk) for _ in range(40)] == list(range(0, 200_000, 5_000))
    with pytest.raises(StoreUnavailableError):
        await anext(walk)


async def test_a_bookie_with_a_damaged_record_is_listed_among_the_others() -> None:
    store = MemoryStore(MemoryTree())
    for name in ("a", "b", "c"):
        await available_bookies(store).create(name, BookieRegistration(bookie_id=name, incarnation="i", addresses={}))
    await store.put(keys.available_bookie_key("b"), b"garbage", 0)
    await store.create(keys.bookie_cookie_key("c"), b"garbage")
    assert [(view["bookie_id"], view["state"]) for view in await bookie_views(store)] == [
        ("a", "writable"),
        ("b", "damaged"),
        ("c", "damaged"),
    ]
