"""`profile: one`: the whole platform in one pod."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import RunningNode
from tests.kubernetes.release import Release

TOPIC = "persistent://public/default/orders"
MEMORY_LIMIT_BYTES = 300e6


@pytest.fixture(scope="module")
def one(node: RunningNode) -> Iterator[Release]:
    release = Release(node, "one", "--set=profile=one")
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_it_serves_the_official_client_after_the_install(one: Release, figures: dict[str, object]) -> None:
    began = time.monotonic()
    one.install()
    report = one.publish(TOPIC, 100)
    figures["one: install to 100 messages, s"] = round(time.monotonic() - began, 1)
    assert (report["received"], report["error_count"]) == (100, 0), report


def test_helm_test_passes(one: Release) -> None:
    one.helm("test", one.name, "--timeout=600s")


def test_its_memory_stays_below_300_mb(one: Release, figures: dict[str, object]) -> None:
    memory = one.memory_bytes()
    figures["one: memory, MB"] = {name: round(used / 1e6) for name, used in memory.items()}
    assert sum(memory.values()) < MEMORY_LIMIT_BYTES


def test_a_deleted_pod_comes_back_with_its_messages(one: Release, figures: dict[str, object]) -> None:
    (pod,) = one.pods()
    uid = one.uid(pod)
    with one.load(TOPIC + "-kept", "--send-timeout=180") as report:  # there is no other broker: producers wait for the new pod
        one.kubectl("delete", "pod", pod)
        one.wait_pod_replaced(pod, uid)
    figures["one: pod deletion, gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_a_release_installed_again_finds_the_volume(one: Release) -> None:
    one.uninstall()
    one.install()
    stored = one.kubectl("exec", *one.pods(), "--", "cepheid", "topics", "list", "public/default")
    assert TOPIC + "-kept" in stored
    assert one.publish(TOPIC + "-kept", 10)["error_count"] == 0
