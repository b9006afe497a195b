"""Write a pod's settings: those of the chart, and what depends on the pod.

configure_pod.py /etc/cepheid/config/broker.toml /run/cepheid/broker.toml

NODE_NAME        the zone of this node becomes the rack, as `region/zone`
NODE_IP          the broker is reached from outside: its address, unless EXTERNAL_HOSTS names one for each pod
FIRST_NODE_PORT  the first of the node ports; each broker has two
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"


def main(source: str, target: str) -> None:
    environment = os.environ
    labels = node_labels(environment["NODE_NAME"]) if "NODE_NAME" in environment else {}
    settings = settings_of_pod(environment, labels)
    Path(target).write_text(merged(Path(source).read_text(), settings))
    print(f"settings of {environment['POD_NAME']}: {settings}")


def settings_of_pod(environment: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str | int]:
    """Return settings outside of tables that this pod has for itself."""
    settings: dict[str, str | int] = {}
    if rack := rack_of(labels):
        settings["rack"] = rack
    if "NODE_IP" in environment:
        ordinal = int(environment["POD_NAME"].rpartition("-")[2])
        hosts = [host for host in environment.get("EXTERNAL_HOSTS", "").split(",") if host]
        if hosts and ordinal >= len(hosts):
            sys.exit(f"external.hosts has {len(hosts)} addresses, and none for {environment['POD_NAME']}: add one")
        settings["advertised_host"] = hosts[ordinal] if hosts else environment["NODE_IP"]
        if "FIRST_NODE_PORT" in environment:
            first = int(environment["FIRST_NODE_PORT"]) + 2 * ordinal
            tls = "tls_" if environment.get("SECURE") == "true" else ""
            settings[f"advertised_{tls}port"] = first
            settings[f"advertised_{tls}admin_port"] = first + 1
    return settings


def rack_of(labels: Mapping[str, str]) -> str:
    """Return `region/zone`, or what the node is labelled with; empty without labels."""
    return "/".join(labels[name].replace("/", "-") for name in (REGION, ZONE) if labels.get(name))


def merged(toml: str, settings: Mapping[str, str | int]) -> str:
    """Put settings before the first table of a TOML text, in place of settings of the same name there."""
    head, table, rest = re.fullmatch(r"(.*?)(^\[.*|\Z)()", toml, re.DOTALL | re.MULTILINE).groups()  # type: ignore[union-attr]
    kept = [line for line in head.splitlines() if line.partition("=")[0].strip() not in settings]
    own = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join([*kept, *own, "", table + rest])


def node_labels(name: str) -> dict[str, str]:
    """Ask Kubernetes for the labels of a node."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    address = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{address}:{port}/api/v1/nodes/{name}", headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            labels: dict[str, str] = json.load(answer)["metadata"].get("labels") or {}
    except urllib.error.HTTPError as error:
        sys.exit(f"the labels of node {name} cannot be read ({error}): grant `get` on nodes, or set rackAwareness.enabled=false")
    return labels


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
