"""One installed release of the chart: what tests do to it, and what they ask it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kubernetes.places import BIN, HOME, KUBECONFIG, REPOSITORY, RunningNode

CHART = REPOSITORY / "charts/cepheid"
IMAGE_VALUES = ("--set=image.repository=localhost/cepheid", "--set=image.tag=dev")
REPORTS = HOME / "reports"
ENVIRONMENT = {**os.environ, "KUBECONFIG": str(KUBECONFIG), "PATH": f"{BIN}:{os.environ['PATH']}"}
COMMAND_TIMEOUT_S = 1500.0
"""All waits are for a machine with much other work; what is too slow for an idle one is seen in the figures."""
RATE_PER_S = 500


class Release:
    """A release in a namespace of its own, which enforces the restricted Pod Security profile."""

    def __init__(
        self, node: RunningNode, name: str, *values: str, secure: bool = False, ca: tuple[str, str] = ("-client", "ca.pem")
    ) -> None:
        """`ca`: ending of the name of the secret with the CA of the servers, and the file in it."""
        self.node = node
        self.name = name
        self.namespace = f"test-{name}"
        self.secure = secure
        self._ca = ca
        self.url = ""  # another one than that of the service, for clients outside
        self.values = [*IMAGE_VALUES, *values, f"--set=secure={str(secure).lower()}"]

    # ---- the life of the release

    def create_namespace(self) -> None:
        run("kubectl", "create", "namespace", self.namespace)
        run("kubectl", "label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")

    def install(self, *values: str, timeout_s: int = 900) -> None:
        self.helm("install", self.name, str(CHART), *self.values, *values, "--wait", f"--timeout={timeout_s}s")

    def upgrade(self, *values: str, timeout_s: int = 1200) -> None:
        """Upgrade and wait until the last pod was replaced. Values of earlier upgrades do not stay."""
        self.helm("upgrade", self.name, str(CHART), *self.values, *values, "--wait", f"--timeout={timeout_s}s")
        self.wait_rolled_out()

    def uninstall(self) -> None:
        self.helm("uninstall", self.name, "--wait", "--timeout=400s")

    def delete_namespace(self) -> None:
        """Delete the release with all it has. Its pods are killed: how they stop is tried by upgrades and `uninstall`."""
        run("kubectl", "delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        self.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", check=False)
        run("kubectl", "wait", "--for=delete", f"namespace/{self.namespace}", "--timeout=400s", check=False)
        assert run("kubectl", "get", "namespace", self.namespace, "--ignore-not-found", "--output=name") == ""

    def helm(self, *words: str) -> str:
        return run("helm", f"--namespace={self.namespace}", *words)

    # ---- what it consists of

    def kubectl(self, *words: str, check: bool = True, stdin: str | None = None) -> str:
        return run("kubectl", f"--namespace={self.namespace}", *words, check=check, stdin=stdin)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "--output=json"))["items"]
        return items

    def pods(self, component: str = "") -> list[str]:
        """Return the names of pods that belong to StatefulSets; pods of hooks and tests do not count."""
        found = []
        for pod in self.objects("pods"):
            owners = pod["metadata"].get("ownerReferences", [])
            if any(owner["kind"] == "StatefulSet" for owner in owners):
                found.append(pod["metadata"]["name"])
        return sorted(name for name in found if f"-{component}" in name)

    def wait_rolled_out(self, timeout_s: int = 1200) -> None:
        for item in self.objects("statefulsets"):
            self.kubectl("rollout", "status", f"statefulset/{item['metadata']['name']}", f"--timeout={timeout_s}s")

    def wait_pod_replaced(self, name: str, uid: str, timeout_s: float = 600.0) -> None:
        """Wait until a pod of this name exists that is not the old one, and is Ready."""

        def is_replaced() -> bool:
            pod = next((pod for pod in self.objects("pods") if pod["metadata"]["name"] == name), None)
            return pod is not None and pod["metadata"]["uid"] != uid and is_ready(pod)

        wait_until(is_replaced, timeout_s, f"a new pod {name} that is ready")

    def uid(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "--output=jsonpath={.metadata.uid}")

    def evict(self, pod: str) -> bool:
        """Evict a pod as a drain of its node does. Returns False if a disruption budget forbids it now."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        answer = subprocess.run(
            ["kubectl", "create", "--raw", path, "--filename=-"],
            input=json.dumps(eviction), capture_output=True, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        if answer.returncode and "disruption budget" not in answer.stderr:
            raise AssertionError(f"eviction of {pod}: {answer.stderr}")
        return answer.returncode == 0

    def memory_bytes(self) -> dict[str, int]:
        """Return the working set of each pod: what limits and evictions count."""
        summary = json.loads(run("kubectl", "get", "--raw=/api/v1/nodes/node/proxy/stats/summary"))
        return {
            pod["podRef"]["name"]: sum(container["memory"]["workingSetBytes"] for container in pod["containers"])
            for pod in summary["pods"]
            if pod["podRef"]["namespace"] == self.namespace and pod.get("containers")
        }

    def save_report(self) -> Path:
        """Write what the pods, their events and logs say, for the reader of a failure."""
        folder = REPORTS / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        for name, words in {"pods": ["get", "all,pvc,pdb", "--output=wide"], "describe": ["describe", "pods"]}.items():
            (folder / f"{name}.txt").write_text(self.kubectl(*words, check=False))
        (folder / "events.txt").write_text(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False))
        for pod in self.kubectl("get", "pods", "--output=name", check=False).split():
            log = self.kubectl("logs", "--all-containers", "--prefix", pod, check=False)
            log += self.kubectl("logs", "--all-containers", "--prefix", "--previous", pod, check=False)
            (folder / f"{pod.removeprefix('pod/')}.log").write_text(log)
        return folder

    # ---- what clients see

    def service_host(self) -> str:
        """Return the name of the service for clients: the only one with the port of the protocol and an address of its own, besides
        those of single brokers for clients outside.
        """
        names = [
            item["metadata"]["name"]
            for item in self.objects("services")
            if item["spec"].get("clusterIP") != "None"
            and any(port["port"] in (6650, 6651) for port in item["spec"]["ports"])
            and not item["metadata"]["name"].endswith("-outside")
        ]
        assert len(names) == 1, f"services for clients: {names}"
        return f"{names[0]}.{self.namespace}.svc.cluster.local"

    @contextmanager
    def load(self, topic: str, *options: str, rate_per_s: float = RATE_PER_S) -> Iterator[dict[str, Any]]:
        """Publish and consume with the official client meanwhile; `options` are those of load.py, whose report is yielded."""
        report: dict[str, Any] = {}
        process = self._start_load("--topic", topic, "--rate", str(rate_per_s), *options)
        time.sleep(3)  # so that traffic is flowing when the body begins
        try:
            yield report
        finally:
            output, errors = process.communicate("", timeout=300)
            (REPORTS / f"load-{self.name}.log").write_text(errors)
        assert process.returncode == 0, errors[-3_000:]
        report |= json.loads(output.splitlines()[-1])

    def publish(self, topic: str, count: int) -> dict[str, Any]:
        """Publish and consume so many messages, and return the report."""
        process = self._start_load("--topic", topic, "--count", str(count))
        output, errors = process.communicate("", timeout=300)
        assert process.returncode == 0, errors[-3_000:]
        report: dict[str, Any] = json.loads(output.splitlines()[-1])
        return report

    def secret(self, ending: str) -> dict[str, str]:
        """Return the contents of the secret whose name has this ending; some are not text."""
        (found,) = (item for item in self.objects("secrets") if item["metadata"]["name"].endswith(ending))
        return {name: base64.b64decode(content).decode("latin-1") for name, content in found["data"].items()}

    def credentials(self) -> list[str]:
        """Return the options by which the client of load.py trusts the servers, and is trusted by them."""
        folder = REPORTS / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        secret, file = self._ca
        (folder / "ca.pem").write_text(self.secret(secret)[file])
        return ["--ca", str(folder / "ca.pem"), "--token", self.secret("-client")["admin.token"].strip()]

    def images(self) -> set[str]:
        """Return the images that the pods of StatefulSets run."""
        pods = [pod for pod in self.objects("pods") if pod["metadata"]["name"] in self.pods()]
        return {status["image"] for pod in pods for status in pod["status"]["containerStatuses"]}

    def _start_load(self, *options: str) -> subprocess.Popen[str]:
        REPORTS.mkdir(parents=True, exist_ok=True)
        host = self.service_host()
        url = self.url or (f"pulsar+ssl://{host}:6651" if self.secure else f"pulsar://{host}:6650")
        credentials = self.credentials() if self.secure else []
        command = self.node.command(sys.executable, "-m", "tests.kubernetes.load", "--url", url, *credentials, *options)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY)


def run(*command: str, check: bool = True, stdin: str | None = None) -> str:
    """Run a command and return its output. A failure shows what it printed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=COMMAND_TIMEOUT_S)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}")
    return done.stdout + ("" if check else done.stderr)


def load_factor() -> float:
    """Return by how much slower than on an idle machine things may be: runnable processes per processor, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for a condition and return how many seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"no {what} after {timeout_s:.0f} s")
        time.sleep(0.5)
    return time.monotonic() - began
