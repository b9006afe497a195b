"""Start the test node, give it images, and stop it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes.places import (
    BIN,
    CGROUP,
    HERE,
    IMAGES,
    KUBECONFIG,
    LOGS,
    NODE,
    NODE_IP,
    NODE_NAME,
    PID_FILE,
    REPOSITORY,
    SERVICE_IP,
    RunningNode,
    require_root,
    running_node,
    start_time,
)
from tests.kubernetes.programs import check_tools, missing_programs

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_INSIDE_NAMES = (
    "localhost",
    NODE_NAME,
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
SERVER_NAMES = ",".join(
    [*(f"IP:{address}" for address in ("127.0.0.1", NODE_IP, SERVICE_IP)), *(f"DNS:{name}" for name in _INSIDE_NAMES)]
)
USERS = {
    "admin": "/O=system:masters/CN=admin",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
    "kube-proxy": "/CN=system:kube-proxy",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kube-scheduler": "/CN=system:kube-scheduler",
}
"""Certificates, and the name and group that RBAC takes from each."""


def start() -> RunningNode:
    """Start the node and wait until it is Ready and answers names. Returns the one that runs already, if there is one."""
    require_root()
    if (node := running_node()) is not None:
        return node
    check_tools()
    if missing := missing_programs():
        sys.exit(f"{', '.join(missing)} are not built yet: python -m tests.kubernetes build")
    PID_FILE.unlink(missing_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    if shutil.which("modprobe"):  # fails where they are built into the kernel, which does not matter
        subprocess.run(["modprobe", "--all", "br_netfilter", "overlay"], stderr=subprocess.DEVNULL)
    make_certificates()
    deadline = time.monotonic() + START_TIMEOUT_S
    node = start_first_process()
    wait("containerd", deadline, lambda: succeeds(node.command("ctr", "version")))
    for archive in sorted(IMAGES.glob("*.tar")):
        import_image(node, archive)
    wait("API server", deadline, lambda: succeeds(kubectl("get", "--raw=/readyz")))
    subprocess.run(kubectl("apply", "--server-side", f"--filename={HERE / 'cluster.yaml'}"), check=True, stdout=subprocess.DEVNULL)
    wait("node", deadline, lambda: succeeds(kubectl("wait", "--for=condition=Ready", "--timeout=1s", "node", NODE_NAME)))
    # A node that was kept still has the status "Ready" of last time. Only an answer of CoreDNS proves pods, proxy and names.
    ask = (sys.executable, "-c", "import socket; socket.gethostbyname('kubernetes.default.svc.cluster.local.')")
    wait("CoreDNS", deadline, lambda: succeeds(node.command(*ask)))
    return node


def stop(*, keep: bool = False) -> None:
    """Stop the node and all it runs. `keep`: the next start finds the same cluster, as after a power cut."""
    require_root()
    if (node := running_node()) is not None:
        inner_start = start_time(node.inner_pid)
        os.kill(node.outer_pid, signal.SIGKILL)  # ends its child too, the node's process 1, and with that all others of the node
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while start_time(node.inner_pid) == inner_start:
            if time.monotonic() > deadline:
                sys.exit(f"process {node.inner_pid} does not end")
            time.sleep(0.05)
    PID_FILE.unlink(missing_ok=True)
    remove_cgroups()
    if not keep and NODE.exists():
        shutil.rmtree(NODE)


def import_image(node: RunningNode, archive: Path) -> None:
    with archive.open("rb") as content:
        command = node.command("ctr", "--namespace=k8s.io", "images", "import", "-")
        subprocess.run(command, stdin=content, stdout=subprocess.DEVNULL, check=True)


def kubectl(*words: str) -> list[str]:
    return [str(BIN / "kubectl"), f"--kubeconfig={KUBECONFIG}", *words]


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def wait(what: str, deadline: float, condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition():
        if running_node() is None:
            sys.exit(f"the node ended while waiting for {what}: see {LOGS / 'node.log'}")
        if time.monotonic() > deadline:
            sys.exit(
                f"{what} is not ready after {START_TIMEOUT_S:.0f} s: see {LOGS}; `python -m tests.kubernetes down` stops the node"
            )
        time.sleep(0.2)
    print(f"{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)


def start_first_process() -> RunningNode:
    with socket.create_server(("127.0.0.1", 0)) as listener, open(LOGS / "node.log", "ab") as log:
        # The socket stays in the network of this machine although its owner moves to that of the node: the way in for kubectl.
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "--"]
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "tests.kubernetes.node", str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            cwd=REPOSITORY,
        )
        write_kubeconfig(listener.getsockname()[1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except OSError:
            children = []
        if children:
            node = RunningNode(process.pid, int(children[0]))
            node.save()
            return node
        time.sleep(0.02)
    sys.exit(f"the node did not start: see {LOGS / 'node.log'}")


def make_certificates() -> None:
    pki = NODE / "pki"
    if (pki / "accounts.pub").exists():
        return
    pki.mkdir(parents=True, exist_ok=True)
    pki.chmod(0o700)
    (pki / "openssl.cnf").write_text("[req]\ndistinguished_name = dn\n[dn]\n")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=pki, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    new = [
        "req",
        "-x509",
        "-config",
        "openssl.cnf",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "365",
    ]
    authority = [
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
    ]
    openssl(*new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=cepheid-kubernetes", *authority)
    signed = [*new, "-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"]
    server = ["-addext", "extendedKeyUsage=serverAuth", "-addext", f"subjectAltName={SERVER_NAMES}"]
    openssl(*signed, "-keyout", "server.key", "-out", "server.crt", "-subj", f"/CN={NODE_NAME}", *server)
    for name, subject in USERS.items():
        openssl(
            *signed, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", subject, "-addext", "extendedKeyUsage=clientAuth"
        )
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "accounts.key")
    openssl("ec", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")


def write_kubeconfig(port: int) -> None:
    def data(name: str) -> str:
        return base64.b64encode((NODE / "pki" / name).read_bytes()).decode()

    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": data("ca.crt")}
    admin = {"client-certificate-data": data("admin.crt"), "client-key-data": data("admin.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "cepheid",
        "clusters": [{"name": "cepheid", "cluster": server}],
        "users": [{"name": "admin", "user": admin}],
        "contexts": [{"name": "cepheid", "context": {"cluster": "cepheid", "user": "admin"}}],
    }
    KUBECONFIG.touch(mode=0o600)
    KUBECONFIG.write_text(json.dumps(config, indent=2))


def remove_cgroups() -> None:
    root = Path("/sys/fs/cgroup")
    deadline = time.monotonic() + 5.0
    while True:  # a group stays busy for a moment after its last process
        try:
            for top in [root / CGROUP, *root.glob(f"*/{CGROUP}")]:
                for folder, _, _ in os.walk(top, topdown=False):
                    os.rmdir(folder)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
