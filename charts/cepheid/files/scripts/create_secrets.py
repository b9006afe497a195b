"""Run `cepheid secure init` and store what it made in Secrets of this namespace.

    create_secrets.py --namespace NAME --authority SECRET --server SECRET --bookie SECRET --client SECRET --host NAME …
                      [--ca-rotation trust|sign|finish]

    AUTHORITY   what cannot be made again: the key of the CA, the token key, the user of ZooKeeper. No pod gets it
    SERVER      for brokers: certificates and keys, token key, the brokers' own token, the user of ZooKeeper
    BOOKIE      for bookies: certificate and key, the user of ZooKeeper
    CLIENT      for operators, hooks and tests: certificates and token of an administrator, the user of ZooKeeper

Run again, it renews certificates and the administrator's token when less than a third of their time is left, adds hosts to the
certificates of servers, and adds what is missing, because a Secret was deleted or is of an older release. It leaves the rest. With
--ca-rotation it takes that stage of a new CA (`cepheid secure rotate-ca`), and waits before until pods have the files of the stage
before. Only names of Secrets and files are printed. The account of the pod may create Secrets, and read and change these four.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
AUTHORITY = ("ca.pem", "ca-key.pem", "token.key", "metadata.auth")
NEXT_KEY = "ca-next-key.pem"
"""Key of a new CA that signs nothing yet; the Secret AUTHORITY has it between the stages trust and sign."""
SETTLE_S = 180
"""Time in which pods get changed Secrets, and processes read them: kubelet looks every 60 to 90 seconds, a process every 10."""
RENEW_DAYS = 130
"""A third of the 397 days of a certificate: two upgrades a year renew all in time."""
FILES = {
    "server": (
        "ca.pem", "server.pem", "server-key.pem", "broker.pem", "broker-key.pem", "token.key", "broker.token", "metadata.auth",
        "admin.token", "admin.pem", "admin-key.pem",
    ),
    "bookie": ("ca.pem", "bookie.pem", "bookie-key.pem", "metadata.auth"),
    "client": ("ca.pem", "client.pem", "client-key.pem", "admin.pem", "admin-key.pem", "admin.token", "metadata.auth"),
}  # fmt: skip
NOT_FOUND, CONFLICT = 404, 409


class Kubernetes:
    """The Secrets of one namespace."""

    def __init__(self, url: str, namespace: str, token: str, context: ssl.SSLContext | None) -> None:
        self._base = f"{url}/api/v1/namespaces/{namespace}/secrets"
        self._token = token
        self._context = context

    def read(self, name: str) -> dict[str, bytes] | None:
        """Return a Secret's files, None if there is no such Secret."""
        try:
            found = self._call("GET", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND:
                return None
            raise
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def create(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Create a Secret; return False if another process was quicker."""
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": _encoded(files)}
        try:
            self._call("POST", "", body)
        except urllib.error.HTTPError as error:
            if error.code == CONFLICT:
                return False
            raise
        return True

    def put(self, name: str, files: Mapping[str, bytes], *, without: Sequence[str] = ()) -> None:
        """Add files to a Secret, in the place of those of the same name, and remove the files in `without`."""
        self._call("PATCH", f"/{name}", {"data": {**_encoded(files), **dict.fromkeys(without)}})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return json.load(answer)


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("namespace", "authority", *FILES):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--host", action="append", default=[], help="name under which a server is reached")
    parser.add_argument("--ca-rotation", default="", help="stage of a new CA: trust, sign or finish")
    options = parser.parse_args()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    token, context = (ACCOUNT / "token").read_text(), ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    address = f"[{host}]" if ":" in host else host
    cluster = Kubernetes(f"https://{address}:{port}", options.namespace, token, context)
    wanted = {getattr(options, kind): files for kind, files in FILES.items()}
    try:
        for line in ensure(cluster, options.authority, wanted, options.host, options.ca_rotation):
            print(line)
    except urllib.error.HTTPError as error:
        reason = json.loads(error.read() or b"{}").get("message", error.reason)
        sys.exit(f"Kubernetes refused: {reason}")


def ensure(
    cluster: Kubernetes, authority: str, wanted: Mapping[str, tuple[str, ...]], hosts: list[str], ca_rotation: str = ""
) -> list[str]:
    """Create, complete and renew the Secrets of `wanted`, by name, and return a line about each."""
    secrets = {authority: (*AUTHORITY, NEXT_KEY), **wanted}
    found = {name: cluster.read(name) or {} for name in secrets}
    existing = ", ".join(name for name in wanted if found[name])
    if not found[authority] and existing:
        if ca_rotation:
            sys.exit(f"{authority} with the key of the CA is not here: restore it to replace the CA")
        if all(key in found[name] for name, keys in wanted.items() for key in keys):
            return [f"{existing}: kept, and never renewed, because {authority} with the key of the CA is not here"]
        sys.exit(f"{existing} exists, but {authority} with the key of its CA does not: restore {authority}, or delete {existing}")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "secure")
        directory.mkdir(mode=0o700)
        for name, keys in secrets.items():  # what exists decides what is signed, and by which CA
            for key in keys:
                # The first one counts: after a run that was broken off the Secret of the authority is the newest.
                if key in found[name] and not (directory / key).exists():
                    (directory / key).write_bytes(found[name][key])
        if existing and not (directory / "token.key").exists():
            lines.append("the key of tokens is lost, and a new one is made: give all clients new tokens")
            for token in directory.glob("*.token"):
                token.unlink()
        if ca_rotation and existing:  # before the first install there is no CA to replace
            lines.append(
                cepheid_secure("rotate-ca", str(directory), f"--stage={ca_rotation}", f"--settle-s={SETTLE_S}").replace(
                    f"{directory}: ", "", 1
                )
            )
        cepheid_secure("init", str(directory), f"--renew-days={RENEW_DAYS}", *(f"--host={host}" for host in hosts))
        for name, keys in secrets.items():
            made = {key: (directory / key).read_bytes() for key in keys if (directory / key).exists()}
            files = {key: content for key, content in made.items() if content != found[name].get(key)}
            removed = [key for key in keys if key in found[name] and key not in made]
            if not files and not removed:
                lines.append(f"{name} exists, and is kept")
            elif found[name]:
                cluster.put(name, files, without=removed)
                lines.append(f"{name} gets {', '.join(files)}" + (f", and loses {', '.join(removed)}" if removed else ""))
            else:
                lines.append(f"{name} is created" if cluster.create(name, files) else f"{name} was created by another process")
    return lines


def cepheid_secure(*arguments: str) -> str:
    """Run a command of `cepheid secure` and return what it printed; end with its message when it fails."""
    done = subprocess.run(["cepheid", "secure", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cepheid secure {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
