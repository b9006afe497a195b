"""Mistakes and bad luck at an install or upgrade: `kubectl describe`, a log or Helm says the reason, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import RunningNode
from tests.kubernetes.release import CHART, Release, wait_until


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
    ("typo", "meant"), [("bokie.replicas=3", "bookie"), ("standalone.config.max_conections=7", "max_connections")]
)
def test_a_typo_in_the_values_is_refused(wrong: Release, typo: str, meant: str) -> None:
    with pytest.raises(AssertionError, match=f"did you mean {meant}"):
        wrong.install(f"--set={typo}", timeout_s=15)
    assert wrong.objects("pods") == []


def test_a_second_install_of_the_same_name_is_refused_and_harms_nothing(wrong: Release) -> None:
    wrong.install()
    with pytest.raises(AssertionError, match="re-use a name"):
        wrong.install()
    report = wrong.publish("persistent://public/default/orders", 10)
    assert (report["received"], report["error_count"]) == (10, 0), report


CLASS_OF_NOBODY = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "nobody"},
    "provisioner": "nobody.example.org/volumes",
    "volumeBindingMode": "Immediate",
}


def test_a_claim_that_no_provisioner_serves_is_named(wrong: Release) -> None:
    wrong.kubectl("apply", "--filename=-", stdin=json.dumps(CLASS_OF_NOBODY))
    with pytest.raises(AssertionError):
        wrong.install("--set=standalone.storage.storageClass=nobody", timeout_s=15)
    for kind, reason in (
        ("pods", "unbound immediate PersistentVolumeClaims"),
        ("persistentvolumeclaims", "nobody.example.org/volumes"),
    ):
        wait_until(lambda: reason in wrong.kubectl("describe", kind), 60, f"{reason!r} in the description")  # noqa: B023


@pytest.mark.parametrize(
    ("role", "secure", "refused"),
    [
        (None, False, r"cannot \w+ resource"),
        ("edit", True, "roles.rbac.authorization.k8s.io"),  # may not create the role of the job that makes secrets
        ("edit", False, None),
        ("admin", True, None),
    ],
)
def test_rights_that_are_missing_are_named(node: RunningNode, role: str | None, secure: bool, refused: str | None) -> None:
    release = Release(node, "rights", "--set=profile=one", secure=secure)
    release.delete_namespace()
    release.create_namespace()
    try:
        if role is not None:
            release.kubectl("create", "rolebinding", "ann", f"--clusterrole={role}", "--user=ann")
        if refused is None:
            release.install("--kube-as-user=ann")
        else:
            with pytest.raises(AssertionError, match=f'(?s)forbidden: User "ann" .*{refused}|{refused}.* is forbidden: User "ann"'):
                release.install("--kube-as-user=ann", timeout_s=60)
            assert release.pods() == []
    finally:
        release.save_report()
        release.delete_namespace()


def test_values_that_an_older_chart_left_out_or_had_are_named_and_the_release_goes_on(wrong: Release) -> None:
    wrong.install()
    (pod,) = wrong.pods()
    uid = wrong.uid(pod)
    upgrade = ("upgrade", wrong.name, str(CHART), "--reuse-values", "--wait", "--timeout=120s")
    with pytest.raises(AssertionError, match=r"tls is missing\n.*--reset-then-reuse-values"):
        wrong.helm(*upgrade, "--set=tls=null")
    with pytest.raises(AssertionError, match=r"standalone\.volume is not a value of this chart"):
        wrong.helm(*upgrade, "--set=standalone.volume.size=1Gi")
    assert wrong.uid(pod) == uid
    wrong.helm("upgrade", wrong.name, str(CHART), "--reset-then-reuse-values", "--wait", "--timeout=120s")
    assert wrong.publish("persistent://public/default/orders", 10)["error_count"] == 0


def test_pods_say_that_zookeeper_is_away_at_the_install_and_start_when_it_is_back(node: RunningNode) -> None:
    release = Release(node, "away", "--set=profile=small")
    release.delete_namespace()
    release.create_namespace()
    try:
        with pytest.raises(AssertionError):
            release.install("--set=zookeeper.nodeSelector.nosuch=label", timeout_s=30)
        log = ("logs", release.pods("broker")[0], "--container=found-cluster")
        reason = "no session on ZooKeeper at away-cepheid-zookeeper-client"
        wait_until(lambda: reason in release.kubectl(*log, check=False), 120, f"{reason!r} in the log")
        release.upgrade("--set=scaleIn.enabled=false", timeout_s=300)  # the job of scale-in would ask ZooKeeper
        report = release.publish("persistent://public/default/orders", 10)
        assert (report["received"], report["error_count"]) == (10, 0), report
    finally:
        release.save_report()
        release.delete_namespace()
