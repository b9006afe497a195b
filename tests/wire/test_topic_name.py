from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import InvalidTopicNameError, NamespaceName, TopicName

entities = st.text("abcXYZ019-=:._", min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))
local_names = st.text("ab-partition-019 :?%&é✈\x80", min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("x", "persistent://public/default/x"),
        ("t/ns/x", "persistent://t/ns/x"),
        ("persistent://t/ns/x", "persistent://t/ns/x"),
        ("non-persistent://t/ns/x", "non-persistent://t/ns/x"),
        ("überflüge ✈", "persistent://public/default/überflüge ✈"),
    ],
)
def test_short_names_become_full_ones(name: str, full: str) -> None:
    assert str(TopicName.parse(name)) == full


@given(st.sampled_from(["persistent", "non-persistent"]), entities, entities, local_names)
def test_a_full_name_has_its_parts(domain: str, tenant: str, namespace: str, local_name: str) -> None:
    topic = TopicName.parse(f"{domain}://{tenant}/{namespace}/{local_name}")
    assert (topic.domain, topic.tenant, topic.namespace, topic.local_name) == (
        domain,
        tenant,
        NamespaceName(tenant, namespace),
        local_name,
    )
    assert topic.is_persistent == (domain == "persistent")
    assert TopicName.parse(str(topic)) == topic
    assert TopicName.parse(f"{tenant}/{namespace}/{local_name}").local_name == local_name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "last part is empty"),
        ("ns/x", "has 2 parts, not tenant/namespace/topic"),
        ("a/b/c/d", "has four parts; names with a cluster"),
        ("persistent://t/use/ns/x", "has four parts; names with a cluster"),
        ("persistent://a/b/c/d/e", "has 5 parts"),
        ("persistent://x", "has 1 parts"),
        ("persistent://", "has 1 parts"),
        ("topic://t/ns/x", "domain 'topic' is neither persistent nor non-persistent"),
        ("://t/ns/x", "domain '' is neither"),
        ("Persistent://t/ns/x", "domain 'Persistent' is neither"),
        ("persistent:///ns/x", "its tenant is empty"),
        ("persistent://t//x", "its namespace is empty"),
        ("persistent://t/ns/", "last part is empty"),
        ("t t/ns/x", "its tenant may have only letters"),
        ("t/ns\n/x", "its namespace may have only letters"),
        ("té/ns/x", "its tenant may have only letters"),
        (".", r"its last part is '\.'; .* choose another"),
        ("..", r"its last part is '\.\.'"),
        ("..-partition-0", "its last part is"),
        ("./ns/x", r"its tenant is '\.'"),
        ("t/../x", r"its namespace is '\.\.'"),
        ("a\x00b", "has a control character"),
        ("a\udcff", "is not UTF-8"),
        ("x" * 1025, "longer than 1024 bytes"),
        ("é" * 600, "longer than 1024 bytes"),
    ],
)
def test_an_invalid_name_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(InvalidTopicNameError, match=reason) as caught:
        TopicName.parse(name)
    str(caught.value).encode()
    assert len(str(caught.value)) < 1000


@given(st.text("ab:/-persistent.=é\x00\udcff", max_size=40))
def test_any_text_is_a_name_or_refused(name: str) -> None:
    try:
        topic = TopicName.parse(name)
    except InvalidTopicNameError:
        return
    assert TopicName.parse(str(topic)) == topic


@pytest.mark.parametrize(
    ("local_name", "index", "base"),
    [
        ("x-partition-0", 0, "x"),
        ("x-partition-17", 17, "x"),
        ("x-partition-1-partition-2", 2, "x-partition-1"),
        ("x-partition-2147483647", 2_147_483_647, "x"),
        ("x", -1, "x"),
        ("x-partition-01", -1, "x-partition-01"),
        ("x-partition-00", -1, "x-partition-00"),
        ("x-partition-", -1, "x-partition-"),
        ("x-partition--1", -1, "x-partition--1"),
        ("x-partition-+1", -1, "x-partition-+1"),
        ("x-partition-1a", -1, "x-partition-1a"),
        ("x-partition-٣", -1, "x-partition-٣"),  # a digit, but not one of ours
        ("x-partition-2147483648", -1, "x-partition-2147483648"),
        ("x-partition-99999999999999999999", -1, "x-partition-99999999999999999999"),
        ("-partition-1", -1, "-partition-1"),
    ],
)
def test_partitions_are_known_by_their_suffix(local_name: str, index: int, base: str) -> None:
    topic = TopicName.parse(f"t/ns/{local_name}")
    assert (topic.partition_index, topic.is_partition) == (index, index >= 0)
    assert topic.base == TopicName.parse(f"t/ns/{base}")


@given(st.integers(0, 2**31 - 1))
def test_a_partition_leads_back_to_its_topic(index: int) -> None:
    topic = TopicName.parse("non-persistent://t/ns/x")
    partition = topic.partition(index)
    assert (partition.base, partition.partition_index) == (topic, index)
    assert str(partition) == f"non-persistent://t/ns/x-partition-{index}"


def test_a_partition_has_no_partitions() -> None:
    with pytest.raises(InvalidTopicNameError, match="is a partition"):
        TopicName.parse("x-partition-1").partition(0)


@pytest.mark.parametrize("name", ["t", "t/c/ns", "/ns", "t/", "t/n s", ""])
def test_an_invalid_namespace_is_refused(name: str) -> None:
    with pytest.raises(InvalidTopicNameError):
        NamespaceName.parse(name)


def test_a_namespace_is_tenant_and_name() -> None:
    namespace = NamespaceName.parse("public/default")
    assert (str(namespace), namespace.tenant, namespace.local_name) == ("public/default", "public", "default")
