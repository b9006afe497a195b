"""Folders and addresses of the test node, and how to reach it while it runs.

The node has a network of its own, so its addresses collide with nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HOME = Path(os.environ.get("CEPHEID_KUBERNETES_CACHE") or Path.home() / ".cache/cepheid-kubernetes").absolute()
BIN, IMAGES, NODE = HOME / "bin", HOME / "images", HOME / "node"
LOGS = NODE / "log"
KUBECONFIG = NODE / "kubeconfig"
PID_FILE = NODE / "pids"

CNI_BIN = os.environ.get("CNI_BIN") or "/usr/lib/cni"
CGROUP = "cepheid-kubernetes"
NODE_NAME = "node"
NODE_IP, API_PORT = "10.245.0.1", 6443
POD_NET, SERVICE_NET = "10.244.0.0/16", "10.96.0.0/16"
SERVICE_IP, DNS_IP = "10.96.0.1", "10.96.0.10"
IMAGE, SPARK_IMAGE = "localhost/cepheid:dev", "localhost/cepheid:spark"
NEXT_IMAGE = "localhost/cepheid:next"
"""A release after that of IMAGE: it knows one storage format more."""
PAUSE_IMAGE, COREDNS_IMAGE, CERT_MANAGER_IMAGE = "localhost/pause:1", "localhost/coredns:1", "localhost/cert-manager:1"


@dataclass(frozen=True, slots=True)
class RunningNode:
    """The process that made the namespaces, and the first process inside them."""

    outer_pid: int
    inner_pid: int

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs `words` with the mounts, network and processes of the node."""
        return ["nsenter", f"--target={self.inner_pid}", "--mount", "--net", "--pid", f"--wd={os.getcwd()}", "--", *words]

    def save(self) -> None:
        PID_FILE.write_text(f"{self.outer_pid} {start_time(self.outer_pid)} {self.inner_pid} {start_time(self.inner_pid)}\n")


def running_node() -> RunningNode | None:
    try:
        outer, outer_start, inner, inner_start = PID_FILE.read_text().split()
    except (OSError, ValueError):
        return None
    if start_time(int(outer)) == outer_start and start_time(int(inner)) == inner_start:
        return RunningNode(int(outer), int(inner))
    return None


def start_time(pid: int) -> str:
    """Return when a process began, in ticks since boot, or "" if it has ended. Its pid alone may belong to another one by now."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before may contain blanks
    return "" if fields[0] == "Z" else fields[19]


def require_root() -> None:
    if os.geteuid() != 0:
        sys.exit("the test node needs root: it makes namespaces, mounts and control groups")
