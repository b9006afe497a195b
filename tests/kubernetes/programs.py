"""Build Kubernetes, etcd, CoreDNS, Helm and cert-manager from their Go modules, and the images of what runs in pods.

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
from tests.kubernetes.places import BIN, CERT_MANAGER_IMAGE, CNI_BIN, COREDNS_IMAGE, HERE, HOME, IMAGES, PAUSE_IMAGE

MODULE = HERE / "programs"
CERT_MANAGER = MODULE / "cert-manager"
"""A module of its own, because of its name (go.mod there says why)."""
CERT_MANAGER_CRDS = HOME / "cert-manager-crds.yaml"
PROGRAMS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl", "helm",
    "provisioner",
)  # fmt: skip
TOOLS = ("containerd", "containerd-shim-runc-v2", "runc", "ctr", "iptables", "conntrack", "ip", "nsenter", "unshare", "openssl")
PACKAGES = "containerd runc containernetworking-plugins iptables conntrack iproute2 openssl mmdebstrap"


def build_helm() -> None:
    """Build Helm alone, which renders the chart without a cluster."""
    environment, flags = _go_settings()
    BIN.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-o", str(BIN / "helm"), "-ldflags", flags, "helm.sh/helm/v3/cmd/helm"]
    subprocess.run(command, cwd=MODULE, env=environment, check=True)


def build_programs() -> None:
    environment, flags = _go_settings()
    BIN.mkdir(parents=True, exist_ok=True)
    subprocess.run(["go", "build", "-o", f"{BIN}/", "-ldflags", flags, "tool", "./..."], cwd=MODULE, env=environment, check=True)
    (BIN / "server").replace(BIN / "etcd")  # etcd's main package is called "server"
    command = ["go", "build", "-o", f"{BIN}/", "-ldflags=-s -w", "./..."]
    subprocess.run(["go", "mod", "download", "github.com/cert-manager/cert-manager"], cwd=CERT_MANAGER, env=environment, check=True)
    subprocess.run(command, cwd=CERT_MANAGER, env=environment, check=True)
    (BIN / "cepheid-kubernetes").replace(BIN / "cert-manager")  # named after its module
    crds = sorted(
        Path(_about(environment, "github.com/cert-manager/cert-manager", "Dir", CERT_MANAGER), "deploy/crds").glob("*.yaml")
    )
    CERT_MANAGER_CRDS.write_text("---\n".join(path.read_text() for path in crds))
    write_program_image(CERT_MANAGER_IMAGE, "cert-manager", user="65532:65532")
    write_program_image(PAUSE_IMAGE, "pause", user="")
    write_program_image(COREDNS_IMAGE, "coredns", user="65532:65532")


def _go_settings() -> tuple[dict[str, str], str]:
    """Return the environment of Go, and the linker's flags with the versions of Kubernetes and Helm."""
    if shutil.which("go") is None:
        sys.exit("go is missing: Kubernetes and Helm are built from their Go modules, which takes Go 1.25 or newer")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath"}

    kubernetes = _about(environment, "k8s.io/kubernetes")
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    # Without these, the programs call themselves v0.0.0, and kubelet, kubectl and Helm's kubeVersion compare versions.
    base, helm = "k8s.io/component-base/version", "helm.sh/helm/v3"
    values = {
        f"{base}.gitVersion": kubernetes,
        f"{base}.gitMajor": major,
        f"{base}.gitMinor": minor,
        f"{base}.gitTreeState": "clean",
    }
    values[f"{helm}/internal/version.version"] = _about(environment, helm)
    for package in ("chartutil", "lint/rules"):
        values |= {f"{helm}/pkg/{package}.k8sVersionMajor": major, f"{helm}/pkg/{package}.k8sVersionMinor": minor}
    return environment, " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in values.items())])


def _about(environment: dict[str, str], module: str, field: str = "Version", folder: Path = MODULE) -> str:
    command = ["go", "list", "-m", "-f", f"{{{{.{field}}}}}", module]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout.strip()


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
    images = (IMAGES / f"{name}.tar" for name in ("pause", "coredns", "cert-manager"))
    wanted = [*(BIN / name for name in PROGRAMS), *images, CERT_MANAGER_CRDS]
    return [path.name for path in wanted if not path.exists()]


def check_tools() -> None:
    """Leave with a message if a program of this machine is missing."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if not Path(CNI_BIN, "bridge").exists():
        missing.append(f"{CNI_BIN}/bridge")
    if missing:
        sys.exit(f"missing: {' '.join(missing)}. On Debian: apt-get install {PACKAGES}")
