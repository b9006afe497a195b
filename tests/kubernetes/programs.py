"""Build Kubernetes, etcd, CoreDNS and Helm from their Go modules, and the two images that every node needs.

Go keeps finished packages in its build cache: an interrupted build goes on where it stopped, and a repeated one takes seconds.
The programs are what programs/go.mod lists under `tool`, and the folders beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from container.oci_archive import fill_from_folder, write_archive, write_layer
from tests.kubernetes.places import BIN, CNI_BIN, COREDNS_IMAGE, HERE, IMAGES, PAUSE_IMAGE

MODULE = HERE / "programs"
PROGRAMS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl", "helm",
    "provisioner",
)  # fmt: skip
TOOLS = ("containerd", "containerd-shim-runc-v2", "runc", "ctr", "iptables", "conntrack", "ip", "nsenter", "unshare", "openssl")
PACKAGES = "containerd runc containernetworking-plugins iptables conntrack iproute2 openssl mmdebstrap"


def build_programs() -> None:
    if shutil.which("go") is None:
        sys.exit("go is missing: Kubernetes is built from its Go modules, which takes Go 1.24 or newer")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath"}

    def version_of(module: str) -> str:
        command = ["go", "list", "-m", "-f", "{{.Version}}", module]
        return subprocess.run(command, cwd=MODULE, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    kubernetes = version_of("k8s.io/kubernetes")
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    # Without these, the programs call themselves v0.0.0, and kubelet, kubectl and Helm's kubeVersion compare versions.
    base, helm = "k8s.io/component-base/version", "helm.sh/helm/v3"
    values = {
        f"{base}.gitVersion": kubernetes,
        f"{base}.gitMajor": major,
        f"{base}.gitMinor": minor,
        f"{base}.gitTreeState": "clean",
    }
    values[f"{helm}/internal/version.version"] = version_of(helm)
    for package in ("chartutil", "lint/rules"):
        values |= {f"{helm}/pkg/{package}.k8sVersionMajor": major, f"{helm}/pkg/{package}.k8sVersionMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in values.items())])
    BIN.mkdir(parents=True, exist_ok=True)
    subprocess.run(["go", "build", "-o", f"{BIN}/", "-ldflags", flags, "tool", "./..."], cwd=MODULE, env=environment, check=True)
    (BIN / "server").replace(BIN / "etcd")  # etcd's main package is called "server"
    write_program_image(PAUSE_IMAGE, "pause", user="")
    write_program_image(COREDNS_IMAGE, "coredns", user="65532:65532")


def write_program_image(name: str, program: str, *, user: str) -> None:
    """Write an image that contains one static program."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        shutil.copy2(BIN / program, root / program)
        layer = write_layer(Path(folder, "layer"), fill_from_folder(root))
        write_archive(IMAGES / f"{program}.tar", name, [layer], {"Entrypoint": [f"/{program}"], "User": user})


def missing_programs() -> list[str]:
    """Return what `build_programs` has not made yet."""
    wanted = [*(BIN / name for name in PROGRAMS), IMAGES / "pause.tar", IMAGES / "coredns.tar"]
    return [path.name for path in wanted if not path.exists()]


def check_tools() -> None:
    """Leave with a message if a program of this machine is missing."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if not Path(CNI_BIN, "bridge").exists():
        missing.append(f"{CNI_BIN}/bridge")
    if missing:
        sys.exit(f"missing: {' '.join(missing)}. On Debian: apt-get install {PACKAGES}")
