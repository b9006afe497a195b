"""The chart rendered by Helm: every profile and the combinations that matter keep the rules of manifest_rules.py."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_cli import secure
from tests.charts.chart_pages import CHART
from tests.charts.helm_command import MISSING, find_helm, render, template
from tests.charts.kubernetes_schemas import NEWEST, OLDEST, schema_problems
from tests.charts.manifest_rules import containers_of, pod_of, problems

pytestmark = pytest.mark.skipif(find_helm() is None, reason=MISSING)

RENDER_LIMIT_S = 20.0
OPEN, SECURE = "secure=false", "secure=true"
ZOOKEEPER = "zookeeper.externalUrl=zk://zk.example.org:2181/cepheid"
ZOOKEEPER_TLS = ("zookeeper.externalUrl=zks://zk.example.org:2281", "zookeeper.tls.existingSecret=zk-tls")
MONITORING = ("monitoring.podMonitor.enabled=true", "monitoring.rules.enabled=true", "monitoring.dashboards.enabled=true")
EXTERNAL = ("external.type=LoadBalancer", "external.hosts={a.example.org,b.example.org,c.example.org}")
COMBINATIONS = [
    *([f"profile={profile}", *more] for profile in ("one", "small", "production") for more in ([], [OPEN], list(MONITORING))),
    ["profile=production", SECURE, *MONITORING, *EXTERNAL, "rackAwareness.enabled=true"],
    ["external.type=NodePort", OPEN],
    ["external.type=NodePort", SECURE, "security.hosts={10.0.0.1,broker.example.org}"],
    ["rackAwareness.enabled=true"],
    [ZOOKEEPER],
    [*ZOOKEEPER_TLS, "zookeeper.tls.clientCertificate=true", "rackAwareness.enabled=true"],
    [*ZOOKEEPER_TLS, OPEN, "bookie.replicas=5"],
    ["serviceAccount.create=true", "serviceAccount.annotations.role=arn", "rackAwareness.enabled=true"],
    ["serviceAccount.name=mine", "rackAwareness.enabled=true", "global.imagePullSecrets[0].name=regcred"],
    [ZOOKEEPER, OPEN],
    ["bookie.journal.size=10Gi", "bookie.storage.storageClass=fast", "bookie.journal.storageClass=-"],
    ["bookie.replicas=1", "broker.replicas=1"],
    ["bookie.replicas=12", "broker.replicas=7", "zookeeper.replicas=5"],
    ["tiering.url=s3://bucket/prefix?region=eu-1", "tiering.credentialsSecret=s3-keys"],
    ["profile=one", "tiering.url=s3://bucket", "tiering.credentialsSecret=s3-keys", "monitoring.annotations=false"],
    [SECURE, *(f"security.existingSecrets.{kind}=mine-{kind}" for kind in ("server", "bookie", "client"))],
    ["networkPolicy.enabled=false", "podDisruptionBudget=false", "upgradeGate.enabled=false", "scaleIn.enabled=false"],
    ["broker.config.tail_cache_bytes=268435456", "broker.config.dispatch.max_permits=500", "bookie.config.report_free_space=true"],
    [
        "broker.priorityClassName=high",
        "bookie.nodeSelector.disk=ssd",
        "bookie.podAnnotations.team=data",
        "image.pullSecrets={regcred}",
    ],
    ["tls.certManager.issuerRef.name=pub-ca", *EXTERNAL, "profile=production", "spark.enabled=true"],
    ["tls.certManager.issuerRef.name=pub-ca", "tls.certManager.issuerRef.kind=ClusterIssuer", "profile=one"],
    ["spark.enabled=true", SECURE, "spark.image=registry.example.org/cepheid:spark"],
    ["spark.enabled=true", OPEN, "profile=one"],
    ["bookie.rack=eu/a", "broker.rack=eu/a", "bookie.spread.zones=require", "bookie.spread.hosts=off"],
]


def sets(combination: list[str]) -> list[str]:
    return [f"--set={one}" for one in combination]


def test_every_combination_keeps_the_rules_and_all_together_take_20_seconds(tmp_path: Path) -> None:
    def used_s() -> float:
        return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    has_schemas = importlib.util.find_spec("kubernetes_validate") is not None
    found: dict[str, list[str]] = {}
    began_s = used_s()  # of the processor: the machine may have other work
    for combination in COMBINATIONS:
        manifests = render(*sets(combination))
        broken = problems(manifests, tmp_path)
        if has_schemas:
            broken += [each for version in (OLDEST, NEWEST) for each in schema_problems(manifests, version)]
        if broken:
            found[" ".join(combination)] = broken
    assert found == {}
    assert used_s() - began_s < RENDER_LIMIT_S


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
def test_the_schemas_notice_what_kubernetes_would_refuse() -> None:
    manifests = broken(render(), "spec.template.spec.containers.0.redinessProbe", {})
    (said,) = schema_problems(manifests, NEWEST)
    assert "redinessProbe" in said


@pytest.mark.parametrize("release", ["cepheid", "a", "my-very-long-release-name-of-more-than-forty-characters"[:53]])
def test_names_stay_short_enough_for_every_release(release: str, tmp_path: Path) -> None:
    arguments = sets(["profile=production", SECURE, *MONITORING, *EXTERNAL, "rackAwareness.enabled=true"])
    assert problems(render(*arguments, release=release, namespace="a" * 63), tmp_path) == []


def test_a_package_of_the_chart_has_no_compiled_scripts(tmp_path: Path) -> None:
    chart = tmp_path / "cepheid"
    shutil.copytree(CHART, chart)
    (chart / "files" / "scripts" / "__pycache__").mkdir(exist_ok=True)
    (chart / "files" / "scripts" / "__pycache__" / "scale_in.cpython-311.pyc").write_bytes(b"")
    helm = find_helm()
    assert helm is not None
    subprocess.run([helm, "package", str(chart), f"--destination={tmp_path}"], check=True, capture_output=True)
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert "cepheid/files/scripts/scale_in.py" in names
    assert not [name for name in names if "__pycache__" in name]


def test_rendering_twice_gives_the_same_text() -> None:
    arguments = sets(["profile=production", SECURE, *MONITORING])
    assert template(*arguments).stdout == template(*arguments).stdout


def test_objects_of_every_profile() -> None:
    kinds = {
        profile: {
            one["metadata"]["name"]: one["spec"]["replicas"]
            for one in render(f"--set=profile={profile}")
            if one["kind"] == "StatefulSet"
        }
        for profile in ("one", "small", "production")
    }
    assert kinds == {
        "one": {"my-cepheid-standalone": 1},
        "small": {"my-cepheid-zookeeper": 1, "my-cepheid-bookie": 3, "my-cepheid-broker": 2},
        "production": {"my-cepheid-zookeeper": 3, "my-cepheid-bookie": 3, "my-cepheid-broker": 3},
    }


def test_values_of_the_user_win_over_those_of_the_profile() -> None:
    bookie = named(render("--set=profile=production,bookie.replicas=5,bookie.resources.limits.memory=3Gi"), "StatefulSet", "bookie")
    (container,) = bookie["spec"]["template"]["spec"]["containers"]
    assert bookie["spec"]["replicas"] == 5
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "3Gi"}}


def test_a_change_of_settings_restarts_the_pods_that_read_them_and_no_others() -> None:
    def checksums(*arguments: str) -> dict[str, str]:
        return {
            one["metadata"]["name"]: one["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for one in render(*arguments)
            if one["kind"] == "StatefulSet"
        }

    before, after = checksums(), checksums("--set=broker.config.max_connections=7")
    assert [name for name in before if before[name] != after[name]] == ["my-cepheid-broker"]


def test_only_hooks_may_ask_kubernetes_for_anything() -> None:
    manifests = render("--set=secure=true")
    with_token = [one["metadata"]["name"] for one in manifests if (pod_of(one) or {}).get("automountServiceAccountToken")]
    assert with_token == ["my-cepheid-secrets"]
    rules = [rule for one in manifests if one["kind"] in ("Role", "ClusterRole") for rule in one["rules"]]
    assert {resource for rule in rules for resource in rule["resources"]} == {"secrets"}


def test_a_secured_broker_has_no_plain_port_and_its_pods_no_authority_key() -> None:
    manifests = render("--set=secure=true")
    ports = {port["name"] for one in manifests if one["kind"] == "Service" for port in one["spec"]["ports"]}
    assert not ports & {"pulsar", "admin"}
    secrets = {
        volume["secret"]["secretName"]
        for one in manifests
        for volume in (pod_of(one) or {}).get("volumes", ())
        if "secret" in volume
    }
    assert secrets == {"my-cepheid-server", "my-cepheid-bookie", "my-cepheid-client"}


def test_node_ports_of_brokers_do_not_collide() -> None:
    manifests = render("--set=external.type=NodePort,broker.replicas=3,security.hosts={10.0.0.1}")
    ports = [
        port["nodePort"] for one in manifests if one["kind"] == "Service" for port in one["spec"]["ports"] if "nodePort" in port
    ]
    assert ports == [30650, 30651, 30652, 30653, 30654, 30655]


def test_pods_of_hooks_and_tests_run_where_the_values_of_jobs_say() -> None:
    taint = {"key": "dedicated", "operator": "Exists"}
    manifests = render(
        f"--set-json=jobs.tolerations={json.dumps([taint])}",
        "--set=jobs.nodeSelector.disk=ssd,jobs.priorityClassName=high,spark.enabled=true",
        "--set=jobs.resources.limits.memory=300Mi,jobs.testResources.limits.memory=3Gi",
        "--is-upgrade",
    )
    pods = {one["metadata"]["name"].removeprefix("my-cepheid-"): pod for one in manifests if (pod := pod_of(one)) is not None}
    jobs = [pods.pop(name) for name in ("secrets", "scale-in", "test")]
    for pod in jobs:
        assert (pod["tolerations"], pod["nodeSelector"], pod["priorityClassName"]) == ([taint], {"disk": "ssd"}, "high")
    limits = [pod["containers"][0]["resources"]["limits"]["memory"] for pod in jobs]
    assert limits == ["300Mi", "300Mi", "3Gi"]
    init = [container for pod in pods.values() for container in pod.get("initContainers", ())]
    assert {container["resources"]["limits"]["memory"] for container in init} == {"300Mi"}
    assert not [name for name, pod in pods.items() if "tolerations" in pod]


def test_the_query_with_spark_is_off_by_default_and_runs_in_its_own_image_on_a_scratch_volume() -> None:
    def test_pod(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
        (pod,) = [one["spec"] for one in render(*arguments) if one["kind"] == "Pod"]
        return pod, pod["containers"][0]

    plain, with_spark = test_pod(), test_pod("--set=spark.enabled=true,spark.image=host:5000/cepheid:spark")
    assert plain[1]["command"] == ["python3", "/etc/cepheid/scripts/test_messages.py"]
    assert with_spark[1]["command"] == [*plain[1]["command"], "--spark"]
    assert with_spark[1]["image"] == "host:5000/cepheid:spark"
    assert {"name": "HOME", "value": "/scratch"} in with_spark[1]["env"]
    assert [volume for volume in with_spark[0]["volumes"] if volume not in plain[0]["volumes"]] == [
        {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}
    ]


@pytest.mark.parametrize(
    ("issuer", "wanted"),
    [("", {"name": "my-cepheid-client", "key": "ca.pem"}), ("pub-ca", {"name": "my-cepheid-admin-tls", "key": "ca.crt"})],
)
def test_prometheus_trusts_the_ca_that_signed_the_certificates(issuer: str, wanted: dict[str, str]) -> None:
    manifests = render(f"--set=monitoring.podMonitor.enabled=true,tls.certManager.issuerRef.name={issuer}")
    endpoints = [one["spec"]["podMetricsEndpoints"][0] for one in manifests if one["kind"] == "PodMonitor"]
    assert [endpoint["tlsConfig"]["ca"]["secret"] for endpoint in endpoints] == [wanted, wanted]


def test_metrics_have_the_label_by_which_alerts_tell_releases_apart() -> None:
    monitors = [one["spec"] for one in render("--set=monitoring.podMonitor.enabled=true") if one["kind"] == "PodMonitor"]
    assert [spec["podTargetLabels"] for spec in monitors] == [["app.kubernetes.io/instance"]] * 2


CERTIFICATE_FIELDS = {
    "secretName", "secretTemplate", "commonName", "privateKey", "usages", "dnsNames", "ipAddresses", "issuerRef",
}  # fmt: skip
"""Those of cert-manager.io/v1 that the chart uses; others would be dropped or refused."""


@pytest.mark.parametrize("profile", ["one", "small"])
def test_cert_manager_signs_every_certificate_that_pods_mount(profile: str) -> None:
    issuer = "--set=tls.certManager.issuerRef.name=pub-ca,security.hosts={10.0.0.1}"
    manifests, own = render(issuer, f"--set=profile={profile}"), render(f"--set=profile={profile}")
    certificates = {one["spec"]["secretName"]: one["spec"] for one in manifests if one["kind"] == "Certificate"}
    for spec in certificates.values():
        assert set(spec) <= CERTIFICATE_FIELDS
        assert spec["issuerRef"] == {"name": "pub-ca", "kind": "Issuer", "group": "cert-manager.io"}
    server = certificates[f"my-cepheid-{'server' if profile == 'one' else 'broker'}-tls"]
    assert server["usages"] == ["digital signature", "client auth", "server auth"]
    assert "my-cepheid.pub.svc" in server["dnsNames"]
    assert "10.0.0.1" in server["ipAddresses"]
    mounted: set[str] = set()
    for one in manifests:
        for volume in (pod_of(one) or {}).get("volumes", ()):
            assert "secret" not in volume
            paths = [item["path"] for each in volume.get("projected", {}).get("sources", ()) for item in each["secret"]["items"]]
            assert len(paths) == len(set(paths))
            mounted |= {each["secret"]["name"] for each in volume.get("projected", {}).get("sources", ())}
            settings = json.dumps([other.get("data") for other in manifests if other["kind"] == "ConfigMap"])
            if volume["name"] == "secure" and one["metadata"]["name"].endswith(("broker", "standalone")):
                named_files = set(re.findall(r"/etc/cepheid/secure/([\w.-]+)", settings)) - {"bookie.pem", "bookie-key.pem"}
                assert named_files <= set(paths)
    assert mounted >= set(certificates)
    assert not [one for one in own if one["kind"] == "Certificate"]


def test_a_stage_of_a_new_ca_is_taken_by_the_job_that_creates_secrets() -> None:
    def job(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = named(render(*arguments), "Job", "secrets")["spec"]
        return found

    plain, rotating = job(), job("--set=security.caRotation=sign")
    arguments = [spec["template"]["spec"]["containers"][0]["args"] for spec in (plain, rotating)]
    assert set(arguments[1]) - set(arguments[0]) == {"--ca-rotation=sign"}
    assert rotating["activeDeadlineSeconds"] - plain["activeDeadlineSeconds"] > 180  # what a stage waits for


def test_readiness_of_a_bookie_waits_for_its_copies_unless_the_gate_is_off() -> None:
    def path(*arguments: str) -> str:
        (container,) = named(render(*arguments), "StatefulSet", "bookie")["spec"]["template"]["spec"]["containers"]
        found: str = container["readinessProbe"]["httpGet"]["path"]
        return found

    assert (path(), path("--set=upgradeGate.enabled=false")) == ("/caught-up", "/ready")


def test_bookies_stop_after_brokers_and_both_after_zookeeper_has_come_back() -> None:
    manifests = render()
    waits = {}
    for component in ("broker", "bookie"):
        script = named(manifests, "ConfigMap", component)["data"]["before_stop.sh"]
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
        waits[component] = int(re.search(r"-lt (\d+) \]", script)[1])  # type: ignore[index]
        (container,) = named(manifests, "StatefulSet", component)["spec"]["template"]["spec"]["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/cepheid/config/before_stop.sh"]
    assert waits["bookie"] > waits["broker"]
    (service,) = [one for one in manifests if one["kind"] == "Service" and one["metadata"]["name"] == "my-cepheid-zookeeper-client"]
    assert service["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("brokr.replicas=3", "brokr is not a value of this chart: did you mean broker?"),
        ("bookie.storage.sise=1Gi", "bookie.storage.sise is not a value of this chart: did you mean size?"),
        ("broker.config.max_conections=3", "did you mean max_connections?"),
        (
            "broker.config.dispatch.maxPermits=3",
            "broker.config.dispatch.maxPermits is not a value of this chart: did you mean max_permits?",
        ),
        ("imagePullSecrets[0].name=regcred", "did you mean image.pullSecrets?"),
        ("tls.issuer=pub-ca", "tls.issuer is not a value of this chart: there are certManager"),
        ("broker.config.port=7000", "broker.config.port is decided by the chart"),
        ("profile=large", "profile"),
        ("broker.config.dispatch.max_permits=many", "max_permits"),
        ("zookeeper.replicas=2", "replicas"),
        ("security.caRotation=begin", "caRotation"),
        ("image.tag=latest", "tag"),
        ("spark.image=registry.example.org/spark:latest", "image"),
        ("bookie.storage.size=big", "size"),
    ],
)
def test_what_is_not_a_value_is_refused_by_name(wrong: str, said: str) -> None:
    done = template(f"--set={wrong}")
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    ("combination", "said"),
    [
        (["zookeeper.externalUrl=zks://zk:2281"], "needs zookeeper.tls.existingSecret"),
        ([ZOOKEEPER, "zookeeper.tls.existingSecret=zk-tls"], "zookeeper.tls.existingSecret is for zookeeper.externalUrl=zks://"),
        (["zookeeper.tls.clientCertificate=true"], "zookeeper.tls.clientCertificate needs zookeeper.tls.existingSecret"),
        (["serviceAccount.annotations.role=arn"], "serviceAccount.annotations needs serviceAccount.create=true"),
        (["external.type=LoadBalancer"], "external.hosts needs the address of each of the 2 brokers, got 0"),
        ([OPEN, "tls.certManager.issuerRef.name=pub-ca"], "needs secure=true"),
        ([OPEN, "security.caRotation=trust"], "security.caRotation replaces the chart's own CA"),
        (["security.caRotation=trust", "tls.certManager.issuerRef.name=pub-ca"], "security.caRotation replaces the chart's own CA"),
        (["profile=one", "external.type=NodePort"], "with profile one set service.type"),
        (["external.type=NodePort"], "list the addresses of all nodes in security.hosts"),
        (["external.type=NodePort", "external.hosts={10.0.0.1}"], "each of the 2 brokers, got 1: add the others"),
        (["profile=one", "standalone.config.advertised_host=a.example.org"], "--set 'security.hosts={a.example.org}'"),
        (
            ["security.existingSecrets.server=mine"],
            "set security.existingSecrets.bookie and security.existingSecrets.client too",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_what_to_do(combination: list[str], said: str) -> None:
    assert said in template(*sets(combination)).stderr


@pytest.mark.parametrize(
    "combination",
    [
        ["external.type=NodePort", "external.hosts={10.0.0.1,10.0.0.2}"],
        ["profile=one", "standalone.config.advertised_host=a.example.org", "security.hosts={a.example.org}"],
        ["profile=one", "standalone.config.advertised_host=a.example.org", OPEN],
        ["external.type=NodePort", *(f"security.existingSecrets.{kind}=mine-{kind}" for kind in ("server", "bookie", "client"))],
        ["security.existingSecrets.server=mine", OPEN],
    ],
)
def test_addresses_that_certificates_have_or_need_not_have_are_accepted(combination: list[str]) -> None:
    assert template(*sets(combination)).stderr == ""


def test_bookies_have_writers_and_named_readers_alone() -> None:
    values = json.dumps([{"namespaceSelector": {"matchLabels": {"team": "spark"}}}])
    policy = named(render(f"--set-json=networkPolicy.readers={values}"), "NetworkPolicy", "bookie")
    entries, _ = policy["spec"]["ingress"]
    components = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in entries["from"] if "podSelector" in peer
    ]
    assert components == ["broker", "bookie", "test"]
    assert entries["from"][-1] == {"namespaceSelector": {"matchLabels": {"team": "spark"}}}


def test_values_of_an_older_chart_are_refused_with_the_option_that_adds_the_new_ones() -> None:
    """`--reuse-values` leaves out what values.yaml has gained. Templates would end with "nil pointer"."""
    said = template("--set=tls=null,upgradeGate.timeout=null").stderr
    assert "tls is missing\nupgradeGate.timeout is missing\n" in said
    assert "--reset-then-reuse-values" in said


def test_every_typo_is_named_and_free_names_are_accepted() -> None:
    said = template("--set=brokr.replicas=3,zookeeper.replica=3").stderr
    assert "brokr is not a value" in said
    assert "zookeeper.replica is not a value of this chart: did you mean replicas?" in said
    render("--set=global.any=1,broker.podAnnotations.any=x,zookeeper.config.any=1,bookie.nodeSelector.any=x")


def test_extra_environment_reaches_the_process() -> None:
    values = json.dumps([{"name": "AWS_REGION", "value": "eu-1"}])
    pod = pod_of(named(render(f"--set-json=broker.extraEnv={values}"), "StatefulSet", "broker"))
    assert pod is not None
    assert {"name": "AWS_REGION", "value": "eu-1"} in containers_of(pod)[-1]["env"]


def test_only_the_first_bookie_founds_the_cluster_and_not_beside_data_of_another_one(tmp_path: Path) -> None:
    manifests = render()
    (founder,) = [one for one in init_containers(manifests, "bookie") if one["name"] == "found-cluster"]
    (joiner,) = [one for one in init_containers(manifests, "broker") if one["name"] == "found-cluster"]
    assert joiner["command"] == ["cepheid", "init", "--join"]
    assert "--data-dir=/data/bookie" in founder["args"]
    assert "/data" in [mount["mountPath"] for mount in founder["volumeMounts"]]
    cepheid = tmp_path / "cepheid"
    cepheid.write_text('#!/bin/sh\necho "$@"\n')
    cepheid.chmod(0o755)
    said = {}
    for pod in ("my-cepheid-bookie-0", "my-cepheid-bookie-1", "my-cepheid-bookie-10"):
        environment = {"POD_NAME": pod, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        command = [*founder["command"], *founder["args"]]
        said[pod] = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    assert {pod: "--join" in words for pod, words in said.items()} == dict(zip(said, (False, True, True), strict=True))
    assert said["my-cepheid-bookie-0"] == ["init", *founder["args"]]


def test_whatever_asks_an_external_zookeeper_has_its_ca() -> None:
    manifests = render(*sets([*ZOOKEEPER_TLS, "zookeeper.tls.clientCertificate=true"]), "--is-upgrade")
    asking = {
        container["name"]: {variable["name"]: variable["value"] for variable in container.get("env", ()) if "value" in variable}
        for one in manifests
        if (pod := pod_of(one)) is not None
        for container in containers_of(pod)
        if one["metadata"]["name"].endswith(("-bookie", "-broker", "-scale-in"))
    }
    assert set(asking) == {"found-cluster", "bookie", "broker", "scale-in"}
    for name, environment in asking.items():
        files = [environment.get(f"CEPHEID_METADATA_TLS_{kind}_FILE") for kind in ("CA", "CERTIFICATE", "KEY")]
        assert files == [f"/etc/cepheid/zookeeper/{file}" for file in ("ca.crt", "tls.crt", "tls.key")], name
    volumes = [
        volume["secret"]["items"]
        for one in manifests
        for volume in (pod_of(one) or {}).get("volumes", ())
        if volume["name"] == "zookeeper-tls"
    ]
    assert [[item["key"] for item in items] for items in volumes] == [["ca.crt", "tls.crt", "tls.key"]] * 3


@pytest.mark.parametrize(
    ("values", "account", "created"),
    [
        ([], None, []),
        (["serviceAccount.create=true"], "my-cepheid", ["my-cepheid"]),
        (["serviceAccount.create=true", "serviceAccount.name=mine"], "mine", ["mine"]),
        (["serviceAccount.name=mine", "rackAwareness.enabled=true"], "mine", []),
        (["rackAwareness.enabled=true"], "my-cepheid-node-reader", ["my-cepheid-node-reader"]),
    ],
)
def test_pods_have_the_account_of_the_values_and_that_one_may_read_nodes(
    values: list[str], account: str | None, created: list[str]
) -> None:
    manifests = render(*sets([*values, OPEN]))
    pods = {one["metadata"]["name"]: pod for one in manifests if one["kind"] == "StatefulSet" and (pod := pod_of(one)) is not None}
    assert {pod.get("serviceAccountName") for pod in pods.values()} == {account}
    assert [one["metadata"]["name"] for one in manifests if one["kind"] == "ServiceAccount"] == created
    assert [one["subjects"][0]["name"] for one in manifests if one["kind"] == "ClusterRoleBinding"] == (
        [account] if "rackAwareness.enabled=true" in values else []
    )


def test_pull_secrets_are_names_or_objects_and_those_of_a_parent_chart_are_added() -> None:
    manifests = render("--set=image.pullSecrets[0]=a,image.pullSecrets[1].name=b,global.imagePullSecrets[0].name=c", "--is-upgrade")
    found = [pod["imagePullSecrets"] for one in manifests if (pod := pod_of(one)) is not None]
    assert found == [[{"name": name} for name in "abc"]] * len(found)
    assert len(found) > 4


@pytest.mark.parametrize(
    ("profile", "component"), [("one", "standalone"), *(("small", part) for part in ("zookeeper", "bookie", "broker"))]
)
def test_further_volumes_are_mounted_in_the_main_container(profile: str, component: str) -> None:
    volume, mount = {"name": "extra", "configMap": {"name": "extra"}}, {"name": "extra", "mountPath": "/extra", "readOnly": True}
    values = [
        f"--set-json={component}.extraVolumes={json.dumps([volume])}",
        f"--set-json={component}.extraVolumeMounts={json.dumps([mount])}",
    ]
    pod = pod_of(named(render(f"--set=profile={profile}", *values), "StatefulSet", component))
    assert pod is not None
    assert volume in pod["volumes"]
    assert mount in pod["containers"][0]["volumeMounts"]


def init_containers(manifests: list[dict[str, Any]], component: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = named(manifests, "StatefulSet", component)["spec"]["template"]["spec"]["initContainers"]
    return found


def named(manifests: list[dict[str, Any]], kind: str, component: str) -> dict[str, Any]:
    (found,) = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == f"my-cepheid-{component}"]
    return found


@pytest.mark.parametrize(
    ("profile", "component", "written"),
    [("small", "broker", "broker"), ("small", "bookie", "bookie"), ("one", "standalone", "server")],
)
def test_secured_processes_have_the_settings_that_secure_init_writes(
    profile: str, component: str, written: str, tmp_path: Path
) -> None:
    """A setting that `cepheid secure init` adds to a role's file belongs into the chart as well.

    Except for `tls.crl`: the Secrets of the chart, as cert-manager makes them, have no list of revoked certificates.
    """
    done = CliRunner().invoke(secure.app, ["init", str(tmp_path / "made")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "made" / f"{written}.toml").read_text()
    wanted = tomllib.loads(text.replace(str(tmp_path / "made"), "/etc/cepheid/secure"))
    config = named(render(f"--set=profile={profile},{SECURE}"), "ConfigMap", component)["data"][f"{component}.toml"]
    settings = tomllib.loads(config)
    del wanted["tls"]["crl"]
    assert {name: settings.get(name) for name in wanted} == wanted


def broken(manifests: list[dict[str, Any]], path: str, value: Any) -> list[dict[str, Any]]:
    """Return the manifests with one value of the bookie's StatefulSet changed."""
    *keys, last = path.split(".")
    part: Any = named(manifests, "StatefulSet", "bookie")
    for key in keys:
        part = part[int(key)] if key.isdecimal() else part[key]
    part[last] = value
    return manifests


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("metadata.name", "a" * 60, "at most 63 characters"),
        ("metadata.labels", {}, "common labels are missing"),
        ("spec.serviceName", "other", "no headless service"),
        ("spec.template.spec.enableServiceLinks", True, "enableServiceLinks"),
        ("spec.template.spec.automountServiceAccountToken", True, "without an account"),
        ("spec.template.spec.securityContext", {}, "not restricted"),
        ("spec.template.spec.volumes", [], "volume config does not exist"),
        ("spec.template.spec.containers.0.image", "cepheid", "no fixed tag"),
        ("spec.template.spec.containers.0.image", "host:5000/cepheid:latest", "no fixed tag"),
        ("spec.template.spec.containers.0.securityContext.readOnlyRootFilesystem", False, "can be written"),
        ("spec.template.spec.containers.0.resources", {"requests": {"cpu": "1", "memory": "1Gi"}}, "limit of memory"),
        ("spec.template.spec.containers.0.env", [{"name": "CEPHEID_BOOKIE_PROT", "value": "1"}], "is not a setting"),
        ("spec.template.spec.containers.0.ports", [], "port grpc does not exist"),
        ("spec.template.spec.containers.0.startupProbe", {"httpGet": {"port": "htp"}}, "asks port htp"),
        ("spec.template.metadata.labels", {}, "selects no pod"),
    ],
)
def test_the_rules_notice_what_breaks_them(path: str, value: Any, said: str, tmp_path: Path) -> None:
    assert said in "\n".join(problems(broken(render(), path, value), tmp_path))


def test_the_rules_notice_settings_that_the_process_would_refuse(tmp_path: Path) -> None:
    manifests = render()
    settings = named(manifests, "ConfigMap", "broker")["data"]
    settings["broker.toml"] = f"prot = 1\n{settings['broker.toml']}"
    assert any("'prot'" in problem and "'port'" in problem for problem in problems(manifests, tmp_path))


def test_restricted_brokers_have_clients_monitoring_and_our_own_pods_alone() -> None:
    peers = [
        f"--set-json=networkPolicy.{kind}={json.dumps([{'podSelector': {'app': kind}}])}" for kind in ("clients", "monitoring")
    ]
    policy = named(render(*peers), "NetworkPolicy", "broker")
    clients, monitoring = policy["spec"]["ingress"]
    own = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in clients["from"][1:]]
    assert (clients["from"][0], own) == ({"podSelector": {"app": "clients"}}, ["broker", "scale-in", "test"])
    assert (monitoring["ports"], monitoring["from"]) == ([{"port": "admin-tls"}], [{"podSelector": {"app": "monitoring"}}])
