"""`secure=true`: TLS and tokens from secrets that the chart creates once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import NEXT_IMAGE, RunningNode
from tests.kubernetes.release import Release, run

TOPIC = "persistent://public/default/orders"


@pytest.fixture(scope="module", params=["one", "small"])
def secured(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[Release]:
    release = Release(node, f"secured-{request.param}", f"--set=profile={request.param}", secure=True)
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_a_client_with_ca_and_token_is_served(secured: Release) -> None:
    secured.install()
    report = secured.publish(TOPIC, 100)
    assert (report["received"], report["error_count"]) == (100, 0), report


def test_helm_test_passes(secured: Release) -> None:
    secured.helm("test", secured.name, "--timeout=600s")


def test_a_client_without_a_token_is_refused(secured: Release) -> None:
    ca = secured.credentials()[:2]
    url = f"pulsar+ssl://{secured.service_host()}:6651"
    load = secured.node.command(sys.executable, "-c", STRANGER, url, ca[1])
    # The C++ client tries again until its time is over when a broker refuses its credentials.
    assert run(*load, check=False).split()[-1] in ("AuthenticationError", "Timeout")


def test_an_upgrade_keeps_the_secrets_and_adds_a_host(secured: Release) -> None:
    before = secured.secret("-client"), secured.secret("-server")
    secured.upgrade("--set=security.hosts={broker.example.org}")
    client, server = secured.secret("-client"), secured.secret("-server")
    changed = {name for name, value in server.items() if before[1][name] != value}
    assert (client, changed) == (before[0], {"server.pem", "server-key.pem", "broker.pem", "broker-key.pem"})
    report = secured.publish(TOPIC, 10)
    assert (report["received"], report["error_count"]) == (10, 0), report


def test_a_deleted_secret_comes_back_and_clients_keep_their_tokens(secured: Release) -> None:
    token, credentials = secured.secret("-server")["token.key"], secured.secret("-client")
    secured.kubectl("delete", "secret", f"{secured.name}-cepheid-server")
    secured.upgrade("--set=standalone.podAnnotations.test=again", "--set=broker.podAnnotations.test=again")
    assert (secured.secret("-server")["token.key"], secured.secret("-client")) == (token, credentials)
    report = secured.publish(TOPIC, 10)
    assert (report["received"], report["error_count"]) == (10, 0), report


@pytest.mark.parametrize("secured", ["small"], indirect=True)
def test_the_ca_is_replaced_while_a_client_publishes(secured: Release, figures: dict[str, object]) -> None:
    old = secured.secret("-client")["ca.pem"]
    with secured.load(TOPIC + "-rotated") as report:
        for stage in ("trust", "sign", "finish"):
            secured.upgrade(f"--set=security.caRotation={stage}")
            secured.credentials()  # the client reads the new ca.pem for its next connection
            # Brokers connect to bookies and to each other, and the client to them, with the files of this stage.
            secured.upgrade(f"--set=security.caRotation={stage}", f"--set=broker.podAnnotations.test={stage}")
    figures["small, secured: new CA with restarts of brokers, longest gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report
    new = {secured.secret(ending)["ca.pem"] for ending in ("-client", "-server", "-bookie", "-ca")}
    assert len(new) == 1
    assert old not in new
    assert "ca-next-key.pem" not in secured.secret("-ca")
    secured.helm("test", secured.name, "--timeout=600s")


@pytest.mark.parametrize("secured", ["small"], indirect=True)
def test_an_upgrade_of_all_pods_to_another_image_is_not_noticed(secured: Release, figures: dict[str, object]) -> None:
    with secured.load(TOPIC + "-upgrade") as report:
        began = time.monotonic()
        secured.upgrade("--set=image.tag=next")
        figures["small, secured: upgrade of all pods, s"] = round(time.monotonic() - began, 1)
    assert secured.images() == {NEXT_IMAGE}
    figures["small, secured: upgrade, longest gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report


def test_no_secret_is_printed(secured: Release) -> None:
    secrets = [value for ending in ("-client", "-server") for name, value in secured.secret(ending).items() if "ca.pem" not in name]
    folder = secured.save_report()
    printed = "".join(path.read_text() for path in folder.glob("*.log")) + secured.helm("status", secured.name)
    assert not [value[:12] for value in secrets if value.strip() in printed]


STRANGER = """
import sys, pulsar
client = pulsar.Client(sys.argv[1], tls_trust_certs_file_path=sys.argv[2], operation_timeout_seconds=10)
try:
    client.create_producer("persistent://public/default/orders")
except Exception as error:
    print(type(error).__name__)
"""
