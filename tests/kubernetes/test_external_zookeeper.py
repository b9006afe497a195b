"""`zookeeper.externalUrl` with TLS: a ZooKeeper that has a CA of its own, and asks for client certificates."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cepheid_security.authority import Authority
from tests.kubernetes.places import IMAGE, RunningNode
from tests.kubernetes.release import Release

TOPIC = "persistent://public/default/orders"
HOST = "zk.test-external.svc.cluster.local"
CONFIG = """tickTime=1000
dataDir=/data
secureClientPort=2281
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
ssl.keyStore.location=/secrets/server-with-key.pem
ssl.keyStore.type=PEM
ssl.trustStore.location=/secrets/ca.crt
ssl.trustStore.type=PEM
admin.enableServer=false
"""
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture
def external(node: RunningNode, tmp_path: Path) -> Iterator[Release]:
    values = [
        "--set=profile=small,bookie.replicas=1,broker.replicas=1",
        f"--set=zookeeper.externalUrl=zks://{HOST}:2281/external",
        "--set=zookeeper.tls.existingSecret=zookeeper-tls,zookeeper.tls.clientCertificate=true",
    ]
    release = Release(node, "external", *values, secure=True)
    release.delete_namespace()
    release.create_namespace()
    for manifest in zookeeper_manifests(tmp_path):
        release.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))
    yield release
    release.save_report()
    release.delete_namespace()


def zookeeper_manifests(directory: Path) -> list[dict[str, Any]]:
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    authority.issue("server", hosts=[HOST], for_servers=True)
    authority.issue("client", for_servers=False)

    def text(*names: str) -> str:
        return "".join((directory / name).read_text() for name in names)

    def of(kind: str, name: str, **content: Any) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": {"app": "zk"}}, **content}

    pod = {
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "zookeeper",
                "image": IMAGE,
                "command": ["zookeeper-server", "/config/zoo.cfg"],
                "env": [{"name": "ZOOKEEPER_JVM_FLAGS", "value": "-Xmx128m -XX:+UseSerialGC"}],
                "securityContext": RESTRICTED,
                "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("config", "secrets", "data", "tmp")],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": "zk"}},
            {"name": "secrets", "secret": {"secretName": "zk"}},
            {"name": "data", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }  # fmt: skip
    server = {"ca.crt": text("ca.pem"), "server-with-key.pem": text("server.pem", "server-key.pem")}
    client = {"ca.crt": text("ca.pem"), "tls.crt": text("client.pem"), "tls.key": text("client-key.pem")}
    return [
        of("Secret", "zk", stringData=server),
        of("Secret", "zookeeper-tls", stringData=client),
        of("ConfigMap", "zk", data={"zoo.cfg": CONFIG}),
        of("Service", "zk", spec={"selector": {"app": "zk"}, "ports": [{"port": 2281}]}),
        of("Pod", "zk", spec=pod),
    ]


def test_a_release_uses_a_zookeeper_with_a_ca_of_its_own(external: Release) -> None:
    external.install(timeout_s=300)
    report = external.publish(TOPIC, 100)
    assert (report["received"], report["error_count"]) == (100, 0), report
    external.helm("test", external.name, "--timeout=300s")
    external.upgrade("--set=broker.podAnnotations.test=again")  # its hook asks ZooKeeper, too
