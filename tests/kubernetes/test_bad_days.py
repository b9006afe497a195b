"""Mistakes at the install: each is visible in `kubectl describe` or in the answer of Helm, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.places import RunningNode
from tests.kubernetes.release import Release, wait_until


@pytest.fixture
def wrong(node: RunningNode) -> Iterator[Release]:
    release = Release(node, "wrong", "--set=profile=one")
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.delete_namespace()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("--set=standalone.storage.storageClass=nosuch", 'storageclass.storage.k8s.io "nosuch" not found'),
        ("--set=image.tag=nosuch", "ErrImagePull"),
        ("--set=standalone.resources.requests.memory=4Ti", "Insufficient memory"),
    ],
)
def test_the_reason_is_among_the_events_or_in_the_state_of_the_pod(wrong: Release, value: str, reason: str) -> None:
    with pytest.raises(AssertionError):
        wrong.install(value, "--set=standalone.resources.limits.memory=4Ti", timeout_s=15)
    wait_until(
        lambda: reason in wrong.kubectl("describe", "pods,persistentvolumeclaims", check=False),
        60,
        f"{reason!r} in the description",
    )


@pytest.mark.parametrize(
    ("typo", "meant"), [("bokie.replicas=3", "'bookie'"), ("standalone.config.max_conections=7", "'max_connections'")]
)
def test_a_typo_in_the_values_is_refused(wrong: Release, typo: str, meant: str) -> None:
    with pytest.raises(AssertionError, match=meant):
        wrong.install(f"--set={typo}", timeout_s=15)
    assert wrong.objects("pods") == []


def test_a_second_install_of_the_same_name_is_refused_and_harms_nothing(wrong: Release) -> None:
    wrong.install()
    with pytest.raises(AssertionError, match="re-use a name"):
        wrong.install()
    report = wrong.publish("persistent://public/default/orders", 10)
    assert (report["received"], report["error_count"]) == (10, 0), report
