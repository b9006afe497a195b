"""`profile: small`: one ZooKeeper, three bookies, two brokers, and what happens to them on good and bad days."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import IMAGE, NEXT_IMAGE, RunningNode
from tests.kubernetes.release import Release, load_factor, wait_until

TOPIC = "persistent://public/default/orders"
FIRST_MESSAGE_LIMIT_S = 120.0
NEXT = "--set=image.tag=next"
MEMORY_LIMIT_BYTES = 1.2e9


@pytest.fixture(scope="module")
def small(node: RunningNode) -> Iterator[Release]:
    release = Release(node, "small", "--set=profile=small")
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_the_first_message_follows_the_install(small: Release, figures: dict[str, object]) -> None:
    began = time.monotonic()
    small.install()
    figures["small: install, s"] = round(time.monotonic() - began, 1)
    report = small.publish(TOPIC, 100)
    took_s = time.monotonic() - began
    figures["small: install to 100 messages, s"] = round(took_s, 1)
    assert (report["received"], report["error_count"]) == (100, 0), report
    assert took_s < FIRST_MESSAGE_LIMIT_S * load_factor()


def test_helm_test_passes(small: Release) -> None:
    small.helm("test", small.name, "--timeout=600s")


def test_the_memory_of_all_pods_stays_below_1200_mb(small: Release, figures: dict[str, object]) -> None:
    memory = small.memory_bytes()
    figures["small: memory, MB"] = {name: round(used / 1e6) for name, used in sorted(memory.items())}
    figures["small: memory of all pods, MB"] = round(sum(memory.values()) / 1e6)
    assert sum(memory.values()) < MEMORY_LIMIT_BYTES


def test_an_upgrade_of_all_pods_to_another_image_is_not_noticed(small: Release, figures: dict[str, object]) -> None:
    before = {pod: small.uid(pod) for pod in small.pods()}
    with small.load(TOPIC + "-upgrade") as report:
        began = time.monotonic()
        small.upgrade(NEXT)
        figures["small: upgrade of all pods, s"] = round(time.monotonic() - began, 1)
    figures["small: upgrade, longest gap s"] = report["longest_message_gap_s"]
    figures["small: upgrade, messages"] = report["received"]
    assert {pod for pod in small.pods() if small.uid(pod) == before.get(pod)} == set(), "pods that were not replaced"
    assert small.images() == {NEXT_IMAGE}
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_a_rollback_is_not_noticed(small: Release, figures: dict[str, object]) -> None:
    with small.load(TOPIC + "-rollback") as report:
        small.helm("rollback", small.name, "--wait", "--timeout=1200s")
        small.wait_rolled_out()
    assert small.images() == {IMAGE}
    figures["small: rollback, longest gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_each_pod_may_be_deleted(small: Release, figures: dict[str, object]) -> None:
    with small.load(TOPIC + "-deleted") as report:
        for pod in small.pods():
            uid = small.uid(pod)
            small.kubectl("delete", "pod", pod)
            small.wait_pod_replaced(pod, uid)
    figures["small: deletion of each pod, longest gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_each_pod_may_be_evicted_but_never_two_bookies(small: Release) -> None:
    bookies = small.pods("bookie")
    with small.load(TOPIC + "-evicted") as report:
        uid = small.uid(bookies[0])
        wait_until(lambda: small.evict(bookies[0]), 120, f"eviction of {bookies[0]}")
        assert not small.evict(bookies[1]), "a second bookie was evicted while the first was away"
        small.wait_pod_replaced(bookies[0], uid)
        for pod in [pod for pod in small.pods() if pod != bookies[0]]:
            uid = small.uid(pod)
            wait_until(lambda pod=pod: small.evict(pod), 400, f"eviction of {pod}")  # type: ignore[misc]
            small.wait_pod_replaced(pod, uid)
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_more_bookies_and_fewer_again(small: Release) -> None:
    with small.load(TOPIC + "-scaled") as report:
        small.upgrade("--set=bookie.replicas=4")
        assert len(small.pods("bookie")) == 4
        small.upgrade("--set=bookie.replicas=3", timeout_s=1200)
        wait_until(lambda: len(small.pods("bookie")) == 3, 400, "three bookies")
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_too_few_bookies_are_refused(small: Release) -> None:
    with pytest.raises(AssertionError, match="bookie"):
        small.upgrade("--set=bookie.replicas=1", timeout_s=400)
    assert len(small.pods("bookie")) == 3
    small.upgrade()


def test_a_bookie_that_lost_its_volume_is_filled_again(small: Release) -> None:
    pod = small.pods("bookie")[-1]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for each in small.objects("pods")
        if each["metadata"]["name"] == pod
        for volume in each["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    with small.load(TOPIC + "-lost") as report:
        small.kubectl("delete", "persistentvolumeclaim", *claims, "--wait=false")
        uid = small.uid(pod)
        small.kubectl("delete", "pod", pod)
        accept_empty_volume(small, pod, uid)
        small.wait_pod_replaced(pod, uid, timeout_s=900)
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_a_release_installed_again_finds_its_volumes(small: Release) -> None:
    small.publish(TOPIC + "-kept", 100)
    small.uninstall()
    wait_until(lambda: small.pods() == [], 400, "end of all pods")
    assert len(small.objects("persistentvolumeclaims")) >= 4
    small.install()
    report = small.publish(TOPIC + "-kept", 100)
    assert (report["received"], report["error_count"]) == (100, 0), report


def test_after_the_end_of_an_upgrade_a_rollback_is_refused_and_changes_nothing(small: Release) -> None:
    small.upgrade(NEXT)
    before = {pod: small.uid(pod) for pod in small.pods()}
    small.kubectl("exec", small.pods("broker")[0], "--", "cepheid", "cluster", "finish-upgrade", "--yes")
    with pytest.raises(AssertionError, match="scale-in"):
        small.helm("rollback", small.name, "--wait", "--timeout=300s")
    assert "start a newer release" in small.kubectl("logs", f"job/{small.name}-cepheid-scale-in")
    assert {pod: small.uid(pod) for pod in small.pods()} == before
    # Helm takes the rollback for one in progress, and refuses upgrades until the deployed revision is rolled back to.
    history = json.loads(small.helm("history", small.name, "--output=json"))
    (deployed,) = [each["revision"] for each in history if each["status"] == "deployed"]
    small.helm("rollback", small.name, str(deployed), "--wait", "--timeout=300s")
    assert {pod: small.uid(pod) for pod in small.pods()} == before
    report = small.publish(TOPIC + "-finished", 100)
    assert (report["received"], report["error_count"]) == (100, 0), report


def accept_empty_volume(small: Release, pod: str, old_uid: str) -> None:
    """Do what docs/kubernetes.md says for a bookie whose volume is gone; before that it must refuse to start, and say so."""

    def refusal() -> str:
        found = [each for each in small.objects("pods") if each["metadata"]["name"] == pod and each["metadata"]["uid"] != old_uid]
        statuses = [status for each in found for status in each["status"].get("containerStatuses", [])]
        ended = [
            state["terminated"] for status in statuses for state in (status["state"], status["lastState"]) if "terminated" in state
        ]
        return " ".join(each.get("message", "") for each in ended)

    wait_until(lambda: "--accept-empty-disk" in refusal(), 400, f"refusal of {pod} to start on an empty volume")
    small.kubectl("annotate", "pod", pod, "cepheid/accept-empty-disk=true")
