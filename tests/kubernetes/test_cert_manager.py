"""`tls.certManager.issuerRef`: cert-manager signs, checks and renews the certificates. Its own controllers and webhook run here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.places import HERE, RunningNode
from tests.kubernetes.programs import CERT_MANAGER_CRDS
from tests.kubernetes.release import Release, run, wait_until

TOPIC = "persistent://public/default/orders"
ISSUER = "--set=tls.certManager.issuerRef.name=release-ca"
ISSUERS = [
    {"kind": "Issuer", "metadata": {"name": "self-signed"}, "spec": {"selfSigned": {}}},
    {
        "kind": "Certificate",
        "metadata": {"name": "release-ca"},
        "spec": {
            "isCA": True,
            "commonName": "release-ca",
            "secretName": "release-ca",
            "privateKey": {"algorithm": "ECDSA"},
            "issuerRef": {"name": "self-signed"},
        },
    },
    {"kind": "Issuer", "metadata": {"name": "release-ca"}, "spec": {"ca": {"secretName": "release-ca"}}},
]
WEBHOOKS = {
    "ValidatingWebhookConfiguration": ("/validate", ["CREATE", "UPDATE"], ["*/*"]),
    "MutatingWebhookConfiguration": ("/mutate", ["CREATE"], ["certificaterequests"]),
}


@pytest.fixture(scope="module")
def cert_manager(node: RunningNode) -> None:
    """Install it, and wait until its webhook answers."""
    run("kubectl", "apply", "--server-side", f"--filename={CERT_MANAGER_CRDS}")
    run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/certificates.cert-manager.io")
    run("kubectl", "apply", f"--filename={HERE / 'cert-manager.yaml'}")
    run("kubectl", "--namespace=cert-manager", "rollout", "status", "deployment/cert-manager", "--timeout=300s")
    secret = json.loads(run("kubectl", "--namespace=cert-manager", "get", "secret/cert-manager-webhook-ca", "--output=json"))
    for kind, (path, operations, resources) in WEBHOOKS.items():
        service = {"name": "cert-manager-webhook", "namespace": "cert-manager", "path": path}
        webhook = {
            "name": "webhook.cert-manager.io",
            "clientConfig": {"service": service, "caBundle": secret["data"]["ca.crt"]},
            "rules": [{"apiGroups": ["cert-manager.io"], "apiVersions": ["v1"], "operations": operations, "resources": resources}],
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }
        configuration = {"kind": kind, "metadata": {"name": "cert-manager-webhook"}, "webhooks": [webhook]}
        run(
            "kubectl", "apply", "--filename=-", stdin=json.dumps({"apiVersion": "admissionregistration.k8s.io/v1", **configuration})
        )


@pytest.fixture(scope="module", params=["one", "small"])
def issued(node: RunningNode, cert_manager: None, request: pytest.FixtureRequest) -> Iterator[Release]:
    values = (f"--set=profile={request.param}", ISSUER)
    release = Release(node, f"issued-{request.param}", *values, secure=True, ca=("-admin-tls", "ca.crt"))
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def certificates(release: Release) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"].removeprefix(f"{release.name}-cepheid-"): one for one in release.objects("certificates")}


def condition(certificate: dict[str, Any], kind: str) -> str:
    found = [each["status"] for each in certificate.get("status", {}).get("conditions", []) if each["type"] == kind]
    return found[0] if found else "Unknown"


def shown_certificate(release: Release) -> str:
    """Return the certificate that clients see at the service."""
    code = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 6651)))"
    return run(*release.node.command(sys.executable, "-c", code, release.service_host()))


def test_pods_wait_for_an_issuer_that_is_not_there_and_say_so(issued: Release) -> None:
    with pytest.raises(AssertionError):
        issued.install(timeout_s=60)
    wait_until(lambda: '-tls" not found' in issued.kubectl("describe", "pods"), 120, "the missing secret in the description")
    assert all(condition(one, "Ready") != "True" for one in certificates(issued).values())
    assert 'Referenced "Issuer" not found' in issued.kubectl("describe", "certificaterequests")


def test_the_release_is_served_once_the_issuer_is_there(issued: Release) -> None:
    for one in ISSUERS:
        issued.kubectl("apply", "--filename=-", stdin=json.dumps({"apiVersion": "cert-manager.io/v1", **one}))
    issued.upgrade()
    assert {name for name, one in certificates(issued).items() if condition(one, "Ready") == "True"} > {"admin-tls"}
    report = issued.publish(TOPIC, 100)
    assert (report["received"], report["error_count"]) == (100, 0), report


def test_helm_test_passes(issued: Release) -> None:
    issued.helm("test", issued.name, "--timeout=600s")


def test_the_webhook_accepts_what_it_checks(issued: Release) -> None:
    """It refuses others, so that what the chart renders was checked by it."""
    wrong = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate", "metadata": {"name": "wrong"}}
    spec = {"secretName": "wrong", "issuerRef": {"name": "release-ca"}}
    answer = issued.kubectl("apply", "--filename=-", stdin=json.dumps({**wrong, "spec": spec}), check=False)
    assert 'admission webhook "webhook.cert-manager.io" denied the request' in answer


def test_renewed_certificates_are_used_without_a_restart(issued: Release) -> None:
    before, pods = shown_certificate(issued), {pod: issued.uid(pod) for pod in issued.pods()}
    with issued.load(TOPIC + "-renewed") as report:
        issuing = [{"type": "Issuing", "status": "True", "reason": "Test", "message": "renewed by a test"}]
        patch = json.dumps({"status": {"conditions": issuing}})
        for name in sorted(set(certificates(issued)) - {"release-ca"}):
            certificate = f"certificate/{issued.name}-cepheid-{name}"
            issued.kubectl("patch", certificate, "--subresource=status", "--type=merge", f"--patch={patch}")
        wait_until(lambda: shown_certificate(issued) != before, 300, "new certificate at the service")
    assert {pod: issued.uid(pod) for pod in issued.pods()} == pods
    assert (report["lost"], report["error_count"]) == (0, 0), report
    report = issued.publish(TOPIC, 10)
    assert (report["received"], report["error_count"]) == (10, 0), report
