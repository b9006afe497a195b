"""Clusters, tenants, namespaces: records over HTTP, and which of 404, 409 and 412 each refusal is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.admin.admin_world import AdminWorld

CLUSTERS, TENANTS, NAMESPACES = "/admin/v2/clusters", "/admin/v2/tenants", "/admin/v2/namespaces"
HERE = {"allowedClusters": ["standalone"]}


def test_the_first_objects_are_there(admin: AdminWorld) -> None:
    assert admin.get(CLUSTERS).json() == ["standalone"]
    assert admin.get(TENANTS).json() == ["public", "pulsar"]
    assert admin.get(f"{NAMESPACES}/public").json() == ["public/default"]
    assert admin.get(f"{NAMESPACES}/pulsar").json() == ["pulsar/system"]
    cluster = admin.get(f"{CLUSTERS}/standalone").json()
    assert cluster == {"serviceUrl": admin.standalone.admin_url, "brokerServiceUrl": admin.standalone.service_url}


def test_a_cluster_lives(admin: AdminWorld) -> None:
    body = {"serviceUrl": "http://far:8080/", "brokerServiceUrl": "pulsar://far:6650", "proxyProtocol": "SNI"}
    created = admin.put(f"{CLUSTERS}/far", json=body)
    assert (created.status_code, created.content) == (200, b"")  # 200 here, 204 nearly everywhere else
    assert admin.get(f"{CLUSTERS}/far").json() == {"serviceUrl": "http://far:8080/", "brokerServiceUrl": "pulsar://far:6650"}
    assert admin.post(f"{CLUSTERS}/far", json={"serviceUrl": "http://near:8080"}).status_code == 200
    assert admin.get(f"{CLUSTERS}/far").json() == {"serviceUrl": "http://near:8080"}, "replaced, never merged"
    assert admin.delete(f"{CLUSTERS}/far").status_code == 204
    assert admin.get(f"{CLUSTERS}/far").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", f"{CLUSTERS}/standalone", {}, 409),
        ("PUT", f"{CLUSTERS}/b%20ad", {}, 412),
        ("PUT", f"{CLUSTERS}/c", None, 400),
        ("PUT", f"{CLUSTERS}/c", {"serviceUrl": "pulsar://x:1"}, 400),
        ("PUT", f"{CLUSTERS}/c", {"brokerServiceUrl": "http://x:1"}, 400),
        ("POST", f"{CLUSTERS}/nowhere", {}, 404),
        ("DELETE", f"{CLUSTERS}/nowhere", None, 404),
        ("DELETE", f"{CLUSTERS}/standalone", None, 412),  # tenants use it
        ("GET", f"{TENANTS}/nobody", None, 404),
        ("PUT", f"{TENANTS}/public", HERE, 409),
        ("PUT", f"{TENANTS}/a%2Fb", HERE, 412),
        ("PUT", f"{TENANTS}/%2E", HERE, 412),
        ("PUT", f"{TENANTS}/%2E%2E", HERE, 412),
        ("PUT", f"{NAMESPACES}/public/%2E%2E", None, 412),
        ("PUT", f"{TENANTS}/t", {}, 412),
        ("PUT", f"{TENANTS}/t", {"allowedClusters": [" "]}, 412),
        ("PUT", f"{TENANTS}/t", {"allowedClusters": ["nowhere"]}, 412),
        ("PUT", f"{TENANTS}/t", {"allowedClusters": "standalone"}, 400),
        ("POST", f"{TENANTS}/nobody", HERE, 404),
        ("DELETE", f"{TENANTS}/nobody", None, 404),
        ("DELETE", f"{TENANTS}/public", None, 409),
        ("DELETE", f"{TENANTS}/public?force=true", None, 405),
        ("GET", f"{NAMESPACES}/nobody", None, 404),
        ("GET", f"{NAMESPACES}/b%20ad", None, 412),
        ("GET", f"{NAMESPACES}/public/nowhere", None, 404),
        ("PUT", f"{NAMESPACES}/nobody/ns", None, 404),
        ("PUT", f"{NAMESPACES}/public/default", None, 409),
        ("PUT", f"{NAMESPACES}/public/b%20ad", None, 412),
        ("PUT", f"{NAMESPACES}/public/ns", {"replication_clusters": ["nowhere"]}, 404),
        (
            "PUT",
            f"{NAMESPACES}/public/ns",
            {"bundles": {"boundaries": ["0x00000000", "0x20000000", "0x10000000", "0xffffffff"]}},
            400,
        ),
        ("PUT", f"{NAMESPACES}/public/ns", {"bundles": {"boundaries": ["0x00000001", "0x10000000", "0xffffffff"]}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"bundles": {"boundaries": ["0x00000000", "0x1000000", "0xffffffff"]}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"bundles": {"numBundles": 129}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"retention_policies": {"retentionTimeInMinutes": 5}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"retention_policies": {"retentionTimeInMinutes": -2, "retentionSizeInMB": 1}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"persistence": {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 2}}, 400),
        ("PUT", f"{NAMESPACES}/public/ns", {"autoTopicCreationOverride": {"allowAutoTopicCreation": True, "topicType": "x"}}, 412),
        ("PUT", f"{NAMESPACES}/public/ns", {"compaction_threshold": 60}, 501),  # would not be kept: never a wrong success
        ("DELETE", f"{NAMESPACES}/public/nowhere", None, 404),
        ("DELETE", f"{NAMESPACES}/public/default?force=true", None, 405),
    ],
)
def test_refusals_have_the_status_that_tools_test_for(admin: AdminWorld, method: str, path: str, body: Any, status: int) -> None:
    answer = admin.ask(method, path, json=body) if body is not None else admin.ask(method, path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["reason"]


def test_a_tenant_lives(admin: AdminWorld) -> None:
    created = admin.put(f"{TENANTS}/life", json={"adminRoles": None, "allowedClusters": ["standalone"]})  # null: Go's client
    assert (created.status_code, created.content) == (204, b"")
    assert admin.get(f"{TENANTS}/life").json() == {"adminRoles": [], "allowedClusters": ["standalone"]}
    assert admin.post(f"{TENANTS}/life", json={"adminRoles": ["a"], **HERE}).status_code == 204
    assert admin.get(f"{TENANTS}/life").json()["adminRoles"] == ["a"]
    assert admin.put(f"{NAMESPACES}/life/ns").status_code == 204
    assert admin.delete(f"{TENANTS}/life").status_code == 409
    assert admin.delete(f"{NAMESPACES}/life/ns").status_code == 204
    assert admin.delete(f"{TENANTS}/life").status_code == 204
    assert "life" not in admin.get(TENANTS).json()


def test_a_cluster_that_namespaces_use_stays_in_its_tenant(admin: AdminWorld) -> None:
    admin.put(f"{CLUSTERS}/other", json={})
    admin.put(f"{TENANTS}/moving", json={"allowedClusters": ["standalone", "other"]})
    admin.put(f"{NAMESPACES}/moving/ns")
    assert admin.post(f"{TENANTS}/moving", json={"allowedClusters": ["other"]}).status_code == 412
    assert admin.post(f"{TENANTS}/moving", json=HERE).status_code == 204


def test_a_namespace_is_made_without_a_body_and_with_policies(admin: AdminWorld) -> None:
    assert admin.put(f"{NAMESPACES}/public/plain").status_code == 204
    policies = admin.get(f"{NAMESPACES}/public/plain").json()
    assert policies["replication_clusters"] == ["standalone"]
    assert policies["bundles"] == {
        "boundaries": ["0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"],
        "numBundles": 4,
    }
    assert "retention_policies" not in policies, "not set is left out"
    body = {
        "bundles": {"numBundles": 2},
        "retention_policies": {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1},
        "persistence": {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 1, "bookkeeperAckQuorum": 1},
        "autoTopicCreationOverride": {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3},
        "properties": {"team": "a"},
        # what Java and Go fill in, and what holds anyway
        "offload_threshold": -1,
        "auth_policies": {"namespace_auth": {}, "destination_auth": {}},
        "schema_auto_update_compatibility_strategy": "Full",
        "message_ttl_in_seconds": 0,
        "persistence_unknown_to_us": None,
    }
    assert admin.put(f"{NAMESPACES}/public/rich", json=body).status_code == 204
    policies = admin.get(f"{NAMESPACES}/public/rich").json()
    for name in ("retention_policies", "autoTopicCreationOverride", "properties"):
        assert policies[name] == body[name]
    assert policies["persistence"]["bookkeeperEnsemble"] == 1
    assert admin.get(f"{NAMESPACES}/public/rich/bundles").json()["boundaries"] == ["0x00000000", "0x80000000", "0xffffffff"]


def test_what_was_read_can_be_sent_back(admin: AdminWorld) -> None:
    """Tools copy namespaces: GET the policies of one, PUT them for another."""
    policies = admin.get(f"{NAMESPACES}/public/default").json()
    assert admin.put(f"{NAMESPACES}/public/copied", json=policies).status_code == 204
    assert admin.get(f"{NAMESPACES}/public/copied").json() == policies


def test_a_topic_is_not_made_in_a_namespace_that_goes(admin: AdminWorld) -> None:
    """Whoever comes first wins; both succeeding would leave a topic that nobody can list."""
    outcomes = set()
    for round_number in range(30):
        namespace, topic = f"{NAMESPACES}/public/race-{round_number}", f"/admin/v2/persistent/public/race-{round_number}/t"
        admin.put(namespace)

        async def race(namespace: str = namespace, topic: str = topic, late_ms: float = round_number / 10) -> tuple[int, int]:
            deleting = asyncio.ensure_future(admin.send("DELETE", namespace))
            await asyncio.sleep(late_ms / 1000)
            return (await admin.send("PUT", topic)).status_code, (await deleting).status_code

        outcomes.add(admin.run(race()))
    assert outcomes <= {(204, 409), (404, 204)}, outcomes


def test_a_namespace_with_topics_is_not_deleted_and_goes_on(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACES}/public/full")
    admin.put("/admin/v2/persistent/public/full/t")
    assert admin.delete(f"{NAMESPACES}/public/full").status_code == 409
    assert admin.get(f"{NAMESPACES}/public/full").json()["deleted"] is False
    assert admin.put("/admin/v2/persistent/public/full/u").status_code == 204, "topics can be made in it again"
    for topic in ("t", "u"):
        assert admin.delete(f"/admin/v2/persistent/public/full/{topic}").status_code == 204
    assert admin.delete(f"{NAMESPACES}/public/full").status_code == 204
    assert "public/full" not in admin.get(f"{NAMESPACES}/public").json()
