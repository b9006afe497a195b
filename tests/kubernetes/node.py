"""The first process of the test node: makes the mounts and the network, then keeps the programs running. `node_control` starts it.

It is process 1 of its own pid, mount and network namespaces. When it ends, the kernel ends everything in them and removes their
mounts, interfaces and packet filters. The machine outside is never changed, so nothing has to be undone.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.kubernetes.places import (
    API_PORT,
    CGROUP,
    CNI_BIN,
    DNS_IP,
    HOME,
    NODE_IP,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_NET,
    SERVICE_NET,
)

RUN = Path("/run/cepheid")
"""HOME at a short path: names of sockets have at most 107 characters."""
PKI, CONF, STATE, LOG = (RUN / "node" / name for name in ("pki", "conf", "state", "log"))
API = f"https://{NODE_IP}:{API_PORT}"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
RESTART_AFTER_S = 1.0
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000,
}  # fmt: skip
"""What kubelet wants to set. These hold for the whole machine, so it is only shown files with the values."""


def main() -> None:
    make_mounts()
    make_network()
    make_cgroups()
    asyncio.run(run(socket.socket(fileno=int(sys.argv[1]))))


def make_mounts() -> None:
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    RUN.mkdir()
    sh("mount", "--bind", HOME, RUN)
    for path, place in ((STATE, "/var/lib"), (LOG, "/var/log")):  # folders of its own for kubelet, containerd, CNI and pods
        path.mkdir(parents=True, exist_ok=True)
        sh("mount", "--bind", path, place)
    for name, value in KERNEL_SETTINGS.items():
        shown = Path("/run/kernel", name)
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(f"{value}\n")
        if Path("/proc/sys", name).exists():
            sh("mount", "--bind", shown, f"/proc/sys/{name}")
    # Commands that tests run in the node resolve names of services.
    resolver = Path("/run/resolv.conf")
    resolver.write_text(
        f"nameserver {DNS_IP}\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5 timeout:1\n"
    )
    target = Path("/etc/resolv.conf").resolve()
    if not target.exists():  # a link into /run, which is empty now
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    sh("mount", "--bind", resolver, target)
    sh("mount", "--make-rshared", "/")


def make_network() -> None:
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "node0", "type", "bridge")  # a bridge without ports: some kernels lack "dummy" interfaces
    sh("ip", "addr", "add", f"{NODE_IP}/24", "dev", "node0")
    sh("ip", "link", "set", "node0", "up")
    sh("ip", "route", "add", "default", "dev", "node0")  # the address of a service needs a route before it is translated
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridge = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not bridge.exists():
        sys.exit("the kernel module br_netfilter is missing: answers between pods of one bridge would bypass their service")
    bridge.write_text("1")


def make_cgroups() -> None:
    """Make one group below the root of each hierarchy, which kubelet fills."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():  # version 2
        (root / "cgroup.subtree_control").write_text(
            " ".join("+" + name for name in (root / "cgroup.controllers").read_text().split())
        )
        (root / CGROUP).mkdir(exist_ok=True)
        return
    for hierarchy in root.iterdir():
        if hierarchy.is_symlink() or not (hierarchy / "cgroup.procs").exists():
            continue
        (hierarchy / CGROUP).mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # a new group of version 1 has no processors at first
            if (hierarchy / name).exists():
                (hierarchy / CGROUP / name).write_text((hierarchy / name).read_text())


def sh(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


async def run(listener: socket.socket) -> None:
    Programs(write_configs()).start_all()
    server = await asyncio.start_server(forward, sock=listener)
    await server.serve_forever()


class Programs:
    """Keeps each program running. One that ends is started again a second later: kubelet ends while containerd is not there yet."""

    def __init__(self, commands: dict[str, list[str]]) -> None:
        self._commands = commands
        self._names: dict[int, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)
        for name in self._commands:
            self.start(name)

    def start(self, name: str) -> None:
        with open(LOG / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._names[process.pid], self._processes[name] = name, process

    def reap(self) -> None:
        """Wait for every child that ended: our own, and orphans, since this is process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (name := self._names.pop(pid, None)) is not None:
                self._processes[name].returncode = os.waitstatus_to_exitcode(status)
                print(f"{name} ended with {self._processes[name].returncode}; it is started again", flush=True)
                asyncio.get_running_loop().call_later(RESTART_AFTER_S, self.start, name)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection from the loopback of this machine to the API server, which only the network of the node can reach."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.write_eof()
        except OSError:
            sink.close()

    try:
        api_reader, api_writer = await asyncio.open_connection(NODE_IP, API_PORT)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, api_writer), copy(api_reader, writer))
    api_writer.close()
    writer.close()


def write_configs() -> dict[str, list[str]]:
    """Write the configuration files and return the command line of each program."""
    CONF.mkdir(parents=True, exist_ok=True)
    containerd, kubelet, proxy = containerd_config(), kubelet_config(), proxy_config()
    programs = RUN / "bin"
    commands: dict[str, list[object]] = {
        "etcd": [
            programs / "etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn",
            "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
        ],
        "kube-apiserver": [
            programs / "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--secure-port={API_PORT}",
            f"--advertise-address={NODE_IP}", f"--service-cluster-ip-range={SERVICE_NET}", "--anonymous-auth=false",
            "--allow-privileged=true", "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={pki('ca.crt')}", f"--tls-cert-file={pki('server.crt')}",
            f"--tls-private-key-file={pki('server.key')}",
            f"--kubelet-certificate-authority={pki('ca.crt')}", "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki('admin.crt')}", f"--kubelet-client-key={pki('admin.key')}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki('accounts.pub')}", f"--service-account-signing-key-file={pki('accounts.key')}",
        ],
        "kube-controller-manager": [
            programs / "kube-controller-manager", f"--kubeconfig={kubeconfig('kube-controller-manager')}", "--leader-elect=false",
            "--use-service-account-credentials=true", f"--root-ca-file={pki('ca.crt')}",
            f"--service-account-private-key-file={pki('accounts.key')}",
            f"--cluster-signing-cert-file={pki('ca.crt')}", f"--cluster-signing-key-file={pki('ca.key')}",
        ],
        "kube-scheduler": [programs / "kube-scheduler", f"--kubeconfig={kubeconfig('kube-scheduler')}", "--leader-elect=false"],
        "containerd": ["containerd", f"--config={containerd}"],
        "kubelet": [
            programs / "kubelet", f"--config={kubelet}", f"--kubeconfig={kubeconfig('kubelet')}", f"--node-ip={NODE_IP}",
            f"--hostname-override={NODE_NAME}",
        ],
        "kube-proxy": [programs / "kube-proxy", f"--config={proxy}"],
        "provisioner": [programs / "provisioner", f"--kubeconfig={kubeconfig('admin')}", "--root=/var/lib/volumes"],
    }  # fmt: skip
    return {name: [str(word) for word in words] for name, words in commands.items()}


def containerd_config() -> str:
    cni = CONF / "cni"
    cni.mkdir(exist_ok=True)
    addresses = {"type": "host-local", "ranges": [[{"subnet": POD_NET}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    write("cni/pods.conflist", {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]})
    filesystem = subprocess.run(["stat", "--file-system", "--format=%T", STATE], capture_output=True, text=True, check=True).stdout
    snapshotter = "native" if filesystem.startswith("overlay") else "overlayfs"  # overlays do not stack: in a container, copy
    return write(
        "containerd.toml",
        f"""
version = 2
oom_score = 0
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true  # lowering it needs a capability that a container or small machine may lack
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_BIN}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
""",
    )


def kubelet_config() -> str:
    return write("kubelet.json", {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": pki("ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki("server.crt"), "tlsPrivateKeyFile": pki("server.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,  # Kubernetes 1.35 and newer refuse control groups of version 1 otherwise
        "failSwapOn": False,
        "clusterDNS": [DNS_IP], "clusterDomain": "cluster.local",
        "resolvConf": write("resolv.conf", "# pods know names of the cluster only\n"),
        "protectKernelDefaults": True, "oomScoreAdj": 0, "maxOpenFiles": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        # No image can be fetched again, so none is ever collected. A developer's disk that is nearly full must not evict pods.
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99, "imageMaximumGCAge": "0s",
        "evictionHard": {
            "memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%",
        },
        "volumePluginDir": "/var/lib/kubelet/volumeplugins", "serializeImagePulls": False, "syncFrequency": "10s",
    })  # fmt: skip


def proxy_config() -> str:
    return write("proxy.json", {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
        "clientConnection": {"kubeconfig": kubeconfig("kube-proxy")}, "clusterCIDR": POD_NET, "hostnameOverride": NODE_NAME,
        "conntrack": {"maxPerCore": 0, "min": 0}, "oomScoreAdj": 0, "iptables": {"minSyncPeriod": "200ms"},
    })  # fmt: skip


def kubeconfig(user: str) -> str:
    return write(f"{user}.kubeconfig", {
        "apiVersion": "v1", "kind": "Config", "current-context": "node",
        "clusters": [{"name": "node", "cluster": {"server": API, "certificate-authority": pki("ca.crt")}}],
        "users": [{"name": user, "user": {"client-certificate": pki(f"{user}.crt"), "client-key": pki(f"{user}.key")}}],
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": user}}],
    })  # fmt: skip


def pki(name: str) -> str:
    return str(PKI / name)


def write(name: str, content: object) -> str:
    path = CONF / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return str(path)


if __name__ == "__main__":
    main()
