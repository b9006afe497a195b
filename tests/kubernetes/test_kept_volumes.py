"""What volumes keep: bookies that are scaled in and out again, and the data of bookies when ZooKeeper lost its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import RunningNode
from tests.kubernetes.release import Release, run, wait_until

TOPIC = "persistent://public/default/orders"
FORGOTTEN_S = 15


@pytest.fixture(scope="module")
def kept(node: RunningNode) -> Iterator[Release]:
    values = f"--set=profile=small,bookie.replicas=4,bookie.config.recovery.grace_s={FORGOTTEN_S}"
    release = Release(node, "kept", values, secure=True)
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_a_bookie_that_was_scaled_in_starts_empty_on_its_kept_volume(kept: Release) -> None:
    last = "kept-cepheid-bookie-3"
    kept.install()
    with kept.load(TOPIC, rate_per_s=100) as report:
        kept.upgrade("--set=bookie.replicas=3", timeout_s=1200)

        def known() -> set[str]:
            return {bookie["bookie_id"] for bookie in json.loads(in_broker(kept, "cepheid", "bookies", "list", "--json"))}

        wait_until(lambda: last not in known(), 300, f"{last} that is forgotten")
        kept.upgrade("--set=bookie.replicas=4")
    assert (report["lost"], report["error_count"]) == (0, 0), report
    assert "bookie.started_over" in kept.kubectl("logs", last)
    assert in_broker(kept, "cepheid", "ledgers", "short", "--json").strip() in ("", "[]")
    kept.helm("test", kept.name, "--timeout=600s")


def test_no_cluster_is_founded_in_a_zookeeper_that_lost_its_volume_and_a_backup_brings_all_back(kept: Release) -> None:
    """The commands are those of docs/kubernetes.md, "Back up and restore"."""
    sent = [f"message {number}" for number in range(20)]
    in_broker(kept, "cepheid", "produce", TOPIC + "-restored", *sent)
    backup = in_broker(
        kept,
        "sh",
        "-c",
        "cepheid metadata backup /tmp/metadata.backup >&2 && base64 /tmp/metadata.backup && rm /tmp/metadata.backup",
    )
    zookeeper, bookie, broker = (f"kept-cepheid-{part}" for part in ("zookeeper", "bookie", "broker"))
    kept.kubectl("delete", "persistentvolumeclaim", f"data-{zookeeper}-0", "--wait=false")
    uid = kept.uid(f"{zookeeper}-0")
    kept.kubectl("delete", "pod", f"{zookeeper}-0")
    kept.wait_pod_replaced(f"{zookeeper}-0", uid)
    kept.kubectl("delete", "pod", f"{bookie}-0", f"{bookie}-1", f"{broker}-0", "--wait=false")
    for pod, reason in (
        (f"{bookie}-0", "holds no cluster: no cluster was created"),
        (f"{bookie}-1", "holds no cluster: no cluster was created"),
        (f"{broker}-0", "the metadata store holds no cluster"),
    ):
        wait_until(lambda: reason in founding_log(kept, pod), 200, f"{reason!r} in the log of {pod}")  # noqa: B023
    assert "cepheid metadata restore" in founding_log(kept, f"{bookie}-0")

    scale(kept, {broker: 0, bookie: 0})
    scale(kept, {zookeeper: 0})
    kept.kubectl("delete", "persistentvolumeclaim", f"data-{zookeeper}-0")
    scale(kept, {zookeeper: 1})
    kept.kubectl("rollout", "status", "statefulset", zookeeper, "--timeout=300s")
    for name, content in (("auth", kept.secret("-client")["metadata.auth"].encode()), ("backup", base64.b64decode(backup))):
        text = base64.b64encode(content).decode()
        kept.kubectl("exec", "-i", f"{zookeeper}-0", "--", "sh", "-c", f"umask 077; base64 -d > /tmp/metadata.{name}", stdin=text)
    kept.kubectl(
        "exec", f"{zookeeper}-0", "--", "env", "CEPHEID_METADATA_AUTH_FILE=/tmp/metadata.auth",
        "cepheid", "metadata", "restore", "/tmp/metadata.backup", "--metadata", "zk://127.0.0.1:2181",
    )  # fmt: skip
    scale(kept, {bookie: 4, broker: 2})
    kept.wait_rolled_out()
    wait_until(
        lambda: in_broker(kept, "cepheid", "ledgers", "short", "--json").strip() in ("", "[]"), 300, "ledger with all copies"
    )
    in_broker(kept, "cepheid", "metadata", "confirm", "--yes")
    read = in_broker(kept, "cepheid", "consume", TOPIC + "-restored", "--subscription=after", "--earliest", f"--count={len(sent)}")
    assert [message for message in sent if message not in read] == []
    kept.helm("test", kept.name, "--timeout=600s")


def in_broker(release: Release, *words: str) -> str:
    return release.kubectl("exec", release.pods("broker")[0], "--container=broker", "--", *words)


def founding_log(release: Release, pod: str) -> str:
    log = ("logs", pod, "--container=found-cluster")
    return release.kubectl(*log, check=False) + release.kubectl(*log, "--previous", check=False)


def scale(release: Release, replicas: dict[str, int]) -> None:
    for name, count in replicas.items():
        release.kubectl("scale", "statefulset", name, f"--replicas={count}")
    for name in [name for name, count in replicas.items() if count == 0]:
        selector = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component={name.rpartition('-')[2]}"
        run("kubectl", f"--namespace={release.namespace}", "wait", "--for=delete", "pod", "-l", selector, "--timeout=300s")
