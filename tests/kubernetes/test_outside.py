"""Clients outside of Kubernetes: each broker has an address of its own, by node ports and by load balancers.

The client runs on the node, in none of its pods. Nothing balances load here: the test gives the services their addresses, as the
controller of a cloud does, and kube-proxy of the node does the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.kubernetes.places import NODE_IP, RunningNode
from tests.kubernetes.release import Release, run, wait_until

TOPIC = "persistent://public/default/orders"
TOPICS = 12
BALANCERS = ["10.245.0.21", "10.245.0.22"]
LOOKUP = """
import json, ssl, sys, urllib.request
url, token, ca, count = sys.argv[1:5]
context = ssl.create_default_context(cafile=ca) if ca else None
found = []
for number in range(int(count)):
    request = urllib.request.Request(f"{url}/lookup/v2/topic/persistent/public/default/orders-{number}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, context=context, timeout=30) as answer:
        said = json.load(answer)
        found.append(said["brokerUrlTls"] if ca else said["brokerUrl"])
print(json.dumps(found))
"""


@contextmanager
def installed(
    node: RunningNode, name: str, *values: str, secure: bool, meanwhile: Callable[[Release], None] = lambda _: None
) -> Iterator[Release]:
    release = Release(node, name, "--set=profile=small,bookie.replicas=1,broker.replicas=2", *values, secure=secure)
    release.delete_namespace()
    release.create_namespace()
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(meanwhile, release)
            release.install()
            done.result()
        yield release
    finally:
        release.save_report()
        release.delete_namespace()


def serves_at(release: Release, addresses: list[str], admin: str) -> None:
    """Check that lookups name both brokers by these addresses, and that a client of each is served topics of both."""
    token, ca = (release.credentials()[3], release.credentials()[1]) if release.secure else ("", "")
    lookup = release.node.command(sys.executable, "-c", LOOKUP, admin, token, ca, str(TOPICS))
    found = json.loads(run(*lookup))
    assert set(found) == set(addresses)
    topics = {address: f"{TOPIC}-{found.index(address)}" for address in addresses}  # one of each broker
    for release.url in addresses:
        for topic in topics.values():
            report = release.publish(topic, 100)
            assert (report["error_count"], report["lost"]) == (0, 0), report


def test_node_ports_lead_to_each_broker(node: RunningNode) -> None:
    with installed(node, "ports", "--set=external.type=NodePort", secure=False) as release:
        serves_at(release, [f"pulsar://{NODE_IP}:{port}" for port in (30650, 30652)], f"http://{NODE_IP}:30651")
        uid = release.uid("ports-cepheid-broker-1")
        release.kubectl("delete", "pod", "ports-cepheid-broker-1")
        release.wait_pod_replaced("ports-cepheid-broker-1", uid)  # it has the same port again
        release.url = f"pulsar://{NODE_IP}:30652"
        assert release.publish(f"{TOPIC}-again", 100)["error_count"] == 0


def give_addresses(release: Release) -> None:
    """Do what a cloud does: brokers reach each other by these addresses, too, and `helm install --wait` waits for them."""
    services = [f"{release.name}-cepheid-broker-{number}-outside" for number in range(len(BALANCERS))]

    def exist() -> bool:
        return {*services} <= {service["metadata"]["name"] for service in release.objects("services")}

    wait_until(exist, 300, "services of the brokers")
    for service, address in zip(services, BALANCERS, strict=True):
        status = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
        release.kubectl("patch", "service", service, "--subresource=status", "--type=merge", f"--patch={status}")


def test_load_balancers_lead_to_each_broker_with_certificates_for_their_addresses(node: RunningNode) -> None:
    values = ["--set=external.type=LoadBalancer", f"--set=external.hosts={{{','.join(BALANCERS)}}}"]
    with installed(node, "balanced", *values, secure=True, meanwhile=give_addresses) as release:
        serves_at(release, [f"pulsar+ssl://{address}:6651" for address in BALANCERS], f"https://{BALANCERS[0]}:8443")
